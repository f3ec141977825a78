"""Files that list a split's images, with the class of each.

A split file has a line for each image: its path below ROOT, then the class's
id, or the ids of the pair, the noun and the adjective; single spaces.
"""

import os

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import stored_images

_FORMS = {1: 'CLASS_ID', 3: 'ANP_ID NOUN_ID ADJECTIVE_ID'}


def read(
  root: str, split: str, vocabulary: vocabulary_lib.Vocabulary | None, other_splits: tuple[str, ...]
) -> tuple[str, tuple[str, ...], np.ndarray, vocabulary_lib.Vocabulary]:
  """The images of a split file.

  Args:
    root: folder that the paths start from.
    split: path of the file, from here or from the root.
    vocabulary: classes; None: those that the images' folders name.
    other_splits: other splits of the run; their split files name classes too.

  Returns:
    The file's path; the images' paths below the root, their labels (n,) int32,
    and the vocabulary.

  Raises:
    ConfigError: naming the file and line, and what is expected.
  """
  file, rows = _rows(root, split)
  if vocabulary is None:
    siblings = [_rows(root, s) for s in other_splits if s.endswith('.txt')]
    vocabulary = _vocabulary_of_rows([(file, rows), *siblings])
  _check_rows(file, rows, vocabulary)
  files = tuple(path for path, _ in rows)
  stored_images.check_root(root, files, lambda i: f'{file}:{i + 1}')
  return file, files, np.array([ids[0] for _, ids in rows], np.int32), vocabulary


def _rows(root, split):
  """A split file's path and its lines as (path, 1 or 3 ids)."""
  file = os.path.expanduser(split)
  inside = os.path.join(root, split)
  if not os.path.exists(file) and os.path.exists(inside):
    file = inside
  lines = vocabulary_lib.read_lines(file)
  columns = 3 if _row(lines[0], 3) else 1
  line_of, rows = {}, []
  for number, line in enumerate(lines, 1):
    row = _row(line, columns)
    if row is None:
      raise config_lib.ConfigError(
        f'{file}:{number}: {line[:80]!r}, expected PATH {_FORMS[columns]}, with single spaces'
      )
    first = line_of.setdefault(row[0], number)
    if first != number:
      raise config_lib.ConfigError(f'{file}:{number}: {row[0]!r} stands in line {first} already')
    rows.append(row)
  return file, rows


def _row(line, columns):
  """(path, ids) of a line, None if it has another form."""
  path, *ids = line.rsplit(' ', columns)
  # int() would take ' 1', '+1', '1_000' and digits of other scripts too.
  if len(ids) != columns or not all(i.isdecimal() and i.isascii() for i in ids):
    return None
  if not path or path != path.strip() or '\0' in path or max(map(len, ids)) > 9:
    return None
  return path, [int(i) for i in ids]


def _vocabulary_of_rows(tables):
  """The classes that the folders of images name, in all split files together."""
  words_of = {'class': {}, 'noun': {}, 'adjective': {}}  # by kind: word by id
  for file, rows in tables:
    for number, (path, ids) in enumerate(rows, 1):
      name = _folder(path)
      if not name:
        raise config_lib.ConfigError(
          f'{file}:{number}: {path!r} is in no folder that names its class; give the '
          'classes (config.data.lists)'
        )
      adjective, _, noun = name.partition('_')
      for kind, kind_id, word in zip(words_of, ids, (name, noun, adjective)):
        first = words_of[kind].setdefault(kind_id, word)
        if first != word:
          raise config_lib.ConfigError(
            f'{file}:{number}: {kind} {kind_id} is {word!r}, but above it is {first!r}'
          )
  places = ', '.join(file for file, _ in tables)
  for kind, words in words_of.items():
    gap = next((i for i in range(len(words)) if i not in words), None)
    if gap is not None:
      raise config_lib.ConfigError(
        f'{places}: no image of {kind} {gap}, but of {max(words)}; give the names '
        '(config.data.lists)'
      )
  names, nouns, adjectives = (
    tuple(words[i] for i in range(len(words))) for words in words_of.values()
  )
  try:
    return vocabulary_lib.Vocabulary(names, adjectives or None, nouns or None)
  except config_lib.ConfigError as e:
    raise config_lib.ConfigError(f'{places}: {e}') from e


def _check_rows(file, rows, vocabulary):
  """Refuses ids that are out of range or another name's than the folder's."""
  positions = {name: i for i, name in enumerate(vocabulary.names)}
  nouns, adjectives = vocabulary.noun_ids(), vocabulary.adjective_ids()
  for number, (path, (label, *ids)) in enumerate(rows, 1):
    place = f'{file}:{number}'
    if label >= len(vocabulary):
      raise config_lib.ConfigError(f'{place}: class {label}, expected 0 to {len(vocabulary) - 1}')
    folder, name = _folder(path), vocabulary.names[label]
    if positions.get(folder, label) != label:
      raise config_lib.ConfigError(
        f'{place}: class {label} is {name!r}, but the folder is {folder!r} '
        f'(class {positions[folder]})'
      )
    if ids and not len(nouns):
      raise config_lib.ConfigError(
        f'{place}: noun and adjective ids, but the classes are no '
        f'adjective_noun pairs (the first is {vocabulary.names[0]!r})'
      )
    for kind, kind_id, expected in zip(('noun', 'adjective'), ids, (nouns, adjectives)):
      if kind_id != expected[label]:
        raise config_lib.ConfigError(
          f'{place}: {kind} {kind_id}, but that of {name!r} is {expected[label]}'
        )


def _folder(path):
  return os.path.basename(os.path.dirname(path))
