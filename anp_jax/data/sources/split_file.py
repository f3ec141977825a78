"""Files that list a split's images, with the class of each.

A split file has a line for each image: its path below ROOT, then the class's
id, or the ids of the pair, the noun and the adjective; single spaces.
"""

import os

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import stored_images


def read(
  root: str, split: str, vocabulary: vocabulary_lib.Vocabulary | None, other_splits: tuple[str, ...]
) -> tuple[str, tuple[str, ...], np.ndarray, vocabulary_lib.Vocabulary]:
  """The images of a split file.

  Args:
    root: folder that the paths start from.
    split: path of the file, seen from here or from the root.
    vocabulary: the classes; None: those that the images' folders name.
    other_splits: of the run; those that are split files name classes too.

  Returns:
    The file's path; the images' paths below the root, their labels (n,) int32,
    and the vocabulary.

  Raises:
    ConfigError: naming the file and line, and what is expected.
  """
  file, rows = _rows(root, split)
  if vocabulary is None:
    tables = [(file, rows)]
    tables += [_rows(root, s) for s in other_splits if s.endswith('.txt')]
    vocabulary = _vocabulary_of_rows(tables)
  _check_rows(file, rows, vocabulary)
  files = tuple(row[0] for row in rows)
  # A million look-ups would take minutes on a shared file system: three tell a
  # wrong root, and the reader names a single file that is gone.
  some = {files[0], files[len(files) // 2], files[-1]}
  if not any(os.path.exists(os.path.join(root, name)) for name in some):
    raise config_lib.ConfigError(
      f'{file}:1: no file {os.path.join(root, files[0])!r}; is {root} the '
      'folder that the paths start from?'
    )
  labels = np.array([row[1] for row in rows], np.int32)
  return file, files, labels, vocabulary


def _rows(root, split):
  """A split file's path and its lines as (path, id) or (path, 3 ids)."""
  file = os.path.expanduser(split)
  if not os.path.exists(file):
    inside = os.path.join(root, split)
    file = inside if os.path.exists(inside) else file
  lines = vocabulary_lib.read_lines(file)
  columns = 3 if _row(lines[0], 3) else 1
  line_of, rows = {}, []
  for number, line in enumerate(lines, 1):
    row = _row(line, columns)
    if row is None:
      ids = 'ANP_ID NOUN_ID ADJECTIVE_ID' if columns == 3 else 'CLASS_ID'
      raise config_lib.ConfigError(
        f'{file}:{number}: {line[:80]!r}, expected PATH {ids}, with single spaces'
      )
    if not stored_images.is_inside(row[0], root):
      raise config_lib.ConfigError(
        f'{file}:{number}: {row[0]!r} lies outside of {root}; config.data.path '
        'names a folder that all paths lie in'
      )
    first = line_of.setdefault(row[0], number)
    if first != number:
      raise config_lib.ConfigError(f'{file}:{number}: {row[0]!r} stands in line {first} already')
    rows.append(row)
  return file, rows


def _row(line, columns):
  """(path, ids...) of a line, None if it has another form."""
  path, *ids = line.rsplit(' ', columns)
  # int() would take ' 1', '+1', '1_000' and digits of other scripts too.
  if len(ids) != columns or not all(i.isdecimal() and i.isascii() for i in ids):
    return None
  if not path or path != path.strip() or '\0' in path or len(ids[0]) > 9:
    return None
  return (path, *(int(i) for i in ids))


def _vocabulary_of_rows(tables):
  """Classes named by their images' folders, of all split files together."""
  # Of each kind: name by id, and id by name.
  names, nouns, adjectives = ({}, {}), ({}, {}), ({}, {})
  for file, rows in tables:
    for number, (path, label, *ids) in enumerate(rows, 1):
      place = f'{file}:{number}'
      name = _folder(path)
      if not name:
        raise config_lib.ConfigError(
          f'{place}: {path!r} is in no folder that names its class; give the '
          'classes (config.data.lists)'
        )
      _add_id(place, names, 'class', label, name)
      if ids:
        adjective, _, noun = name.partition('_')
        if not adjective or not noun or '_' in noun:
          raise config_lib.ConfigError(
            f'{place}: noun and adjective ids, but folder {name!r} is no adjective_noun pair'
          )
        _add_id(place, nouns, 'noun', ids[0], noun)
        _add_id(place, adjectives, 'adjective', ids[1], adjective)
  files = ', '.join(file for file, _ in tables)
  orders = [
    _in_order(files, kind, maps[0])
    for kind, maps in (('class', names), ('adjective', adjectives), ('noun', nouns))
  ]
  names, adjectives, nouns = orders
  return vocabulary_lib.Vocabulary(names, adjectives or None, nouns or None)


def _add_id(place, maps, kind, number, name):
  """Adds an id and its name; refuses a second name or a second id."""
  name_of, number_of = maps
  before = name_of.setdefault(number, name), number_of.setdefault(name, number)
  if before != (name, number):
    raise config_lib.ConfigError(
      f'{place}: {kind} {number} is {name!r}, but above {kind} {before[1]} is {before[0]!r}'
    )


def _in_order(files, kind, name_of):
  """The names by id; refuses ids with a gap."""
  for number in range(len(name_of)):
    if number not in name_of:
      raise config_lib.ConfigError(
        f'{files}: no image of {kind} {number}, but of {max(name_of)}; give '
        'the names (config.data.lists)'
      )
  return tuple(name_of[number] for number in range(len(name_of)))


def _check_rows(file, rows, vocabulary):
  """Refuses ids that are out of range or another name's than the folder's."""
  positions = {name: i for i, name in enumerate(vocabulary.names)}
  nouns, adjectives = vocabulary.noun_ids(), vocabulary.adjective_ids()
  for number, (path, label, *ids) in enumerate(rows, 1):
    if label >= len(vocabulary):
      raise config_lib.ConfigError(
        f'{file}:{number}: class {label}, expected 0 to {len(vocabulary) - 1}'
      )
    folder = _folder(path)
    if positions.get(folder, label) != label:
      raise config_lib.ConfigError(
        f'{file}:{number}: class {label} is {vocabulary.names[label]!r}, but '
        f'the folder is {folder!r} (class {positions[folder]})'
      )
    if not ids:
      continue
    if not len(nouns):
      raise config_lib.ConfigError(
        f'{file}:{number}: noun and adjective ids, but the classes are no '
        f'adjective_noun pairs (the first is {vocabulary.names[0]!r})'
      )
    for kind, id_in_row, want in (
      ('noun', ids[0], nouns[label]),
      ('adjective', ids[1], adjectives[label]),
    ):
      if id_in_row != want:
        raise config_lib.ConfigError(
          f'{file}:{number}: {kind} {id_in_row}, but that of {vocabulary.names[label]!r} is {want}'
        )


def _folder(path):
  return os.path.basename(os.path.dirname(path))
