"""Which image files a split has, and the class of each: trees, split files."""

import dataclasses
import functools
import hashlib
import os

from absl import logging
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.image_files import images
from anp_jax.data.sources import skipped_files

SUFFIXES = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.bmp', '.gif')
# Those that training cannot decode, and `prepare` turns into others.
CONVERTIBLE = ('.webp', '.tif', '.tiff', '.avif', '.jp2', '.ppm', '.pgm')
# Share of a tree without splits that is used for training.
_TRAIN_SHARE = 0.8
_ALL = '.'  # the split that is all of a tree without splits
# Names that folders of splits go by, in any case; one row is one split.
_SPLITS = (
  ('train', 'training'),
  ('validation', 'valid', 'val'),
  ('test', 'testing'),
)
# These need no class folders of their own, whose absence is told then.
_PLAIN_SPLITS = ('train', 'validation', 'val', 'test')
_DEEPER, _OUTSIDE = 'in deeper folders', 'outside of class folders'


@dataclasses.dataclass(frozen=True)
class Listing:
  """The files of one split, in the order of its indices.

  Attributes:
    root: folder that `files` are relative to.
    files: paths.
    labels: (n,) int32, class of each file.
    vocabulary: of the labels.
    name: what messages call the split.
    left_out: a line about files of the tree that are in no split; '': none.
  """

  root: str
  files: tuple[str, ...]
  labels: np.ndarray
  vocabulary: vocabulary.Vocabulary
  name: str
  left_out: str = ''


def convertible() -> tuple[str, ...]:
  """Suffixes that training cannot decode, and Pillow can here."""
  return CONVERTIBLE + images.HEIF_SUFFIXES * images.has_heif()


def find(
  path: str, split: str, lists: str = '', other_splits: tuple[str, ...] = (),
  suffixes: tuple[str, ...] = SUFFIXES, pairs: str = 'auto',
) -> Listing:  # fmt: skip
  """The files of a split.

  A tree has a folder for each class: ROOT/SPLIT/CLASS/image, ROOT/CLASS/image.
  The split's folder may be in any case, or go by another of its usual names
  (training, val, valid, testing). A tree without splits is divided into train
  and validation by a hash of each file's CLASS/NAME, about 80 to 20 in every
  class. No file's side depends on other files, so one that is added moves none.
  The split '.' is all of it.

  A split file has a line for each image: its path below ROOT, then the class's
  id, or the ids of the pair, the noun and the adjective; single spaces. The
  classes are those of `lists`, else the names of the images' folders.

  Args:
    path: ROOT.
    split: its name, or the path of a split file (.txt), seen from here or ROOT.
    lists: 'ANPS.txt' or 'ANPS.txt,ADJECTIVES.txt,NOUNS.txt', which give classes
      their ids; folders that they do not name are left out.
    other_splits: of the run; without lists, their classes count too.
    suffixes: of a tree's files, in lower case; others are left out.
    pairs: whether listed classes are adjective_noun, see config.data.pairs.

  Returns:
    Files in the order of their labels and names, or of the split file's lines.

  Raises:
    ConfigError: naming the file and line, or the folder, and what is expected.
  """
  root = os.path.expanduser(path)
  if not os.path.isdir(root):
    raise config_lib.ConfigError(f'{root} is not a folder')
  known = vocabulary.from_spec(lists, pairs) if lists else None
  if split.endswith('.txt'):
    return _from_split_file(root, split, known, other_splits)
  return _from_tree(root, split, known, other_splits, suffixes)


def _from_tree(root, split, known, other_splits, suffixes):
  base, divided = _base(root, split)
  folders = _class_folders(base)
  left_out = skipped_files.SkippedFiles()
  for file in _images(base):
    left_out.add(file, _OUTSIDE)
  if not folders:
    raise config_lib.ConfigError(
      f'{base} has no class folders' + _shape(root, base, suffixes, left_out)
    )
  if known is None:
    names = set(folders)
    for other in other_splits:
      folder = '' if other.endswith('.txt') else _split_folder(root, other)
      if folder:
        names.update(_class_folders(folder))
    known = vocabulary.Vocabulary(tuple(sorted(names)))
  present = set(folders)
  if present.isdisjoint(known.names):
    raise config_lib.ConfigError(
      f'{base} has none of the {len(known)} listed classes: its first folder '
      f'is {folders[0]!r}, the first class {known.names[0]!r}'
      f'{config_lib.nearest(folders[0], known.names)}'
    )
  ignored = present.difference(known.names)
  if ignored:
    warn_once(
      '%s: %d of %d folders are no listed class and are left out, such as %s',
      base, len(ignored), len(folders), min(ignored),
    )  # fmt: skip
  files, labels, total = [], [], 0
  for label, name in enumerate(known.names):
    if name not in present:
      continue
    for file in _class_files(base, name, suffixes, left_out):
      total += 1
      inside = f'{name}/{file}'
      if divided or (_in_train(inside) == (split == 'train')):
        files.append(inside)
        labels.append(label)
  if total and not files:
    raise config_lib.ConfigError(
      f'{root}: {split} has no examples: none of its images ({total:,}) falls '
      f'to {split} by its hash; give each split a folder of its own'
    )
  if not files:
    raise config_lib.ConfigError(
      f'{base} has no images in its class folders'
      + _shape(root, base, suffixes, left_out)
    )
  text = left_out.text(_hints(suffixes))
  return Listing(
    base, tuple(files), np.array(labels, np.int32), known, f'{root}: {split}',
    text and f'{base}: left out {text}',
  )  # fmt: skip


def _shape(root, base, suffixes, left_out):
  """What a tree has that has no images in class folders, and should have."""
  text = f'; left out {left_out.text(_hints(suffixes))}' if left_out else ''
  text += f'; expected {root}/CLASS/IMAGE or {root}/SPLIT/CLASS/IMAGE'
  first = next(_images(base, below=True), '').split(os.sep)
  if base == root and len(first) == 3:
    text += f'; is config.data.path={os.path.join(root, first[0])} meant?'
  return text


def _hints(suffixes):
  """What can be done about files that are left out, by suffix."""
  hints = skipped_files.heif_hints()
  for suffix in convertible():
    if suffix not in suffixes:
      hints[suffix] = 'prepare converts them'
  return hints


def split_folders(root: str) -> list[str]:
  """Names of the folders in a tree that go by the name of a split."""
  usual = [name for names in _SPLITS for name in names]
  folders = [f for f in _class_folders(root) if _is_split(root, f, usual)]
  return sorted(folders, key=lambda f: usual.index(f.casefold()))


def _split_folder(root, split):
  """The folder of a split of a tree; '' if there is none."""
  if os.path.isdir(os.path.join(root, split)):
    return os.path.join(root, split)
  name = split.casefold()
  usual = next((names for names in _SPLITS if name in names), ())
  folders = [
    f for f in _class_folders(root) if _is_split(root, f, (name, *usual))
  ]  # fmt: skip
  same = [f for f in folders if f.casefold() == name]
  folders = same or folders
  if len(folders) > 1:
    raise config_lib.ConfigError(
      f'{root} has no split {split!r}, but {" and ".join(folders)}; set '
      'config.data.train_split and config.data.eval_split'
    )
  return os.path.join(root, folders[0]) if folders else ''


def _is_split(root, folder, names):
  """Whether a folder goes by one of these names, and is not a class's."""
  return folder.casefold() in names and (
    folder in _PLAIN_SPLITS or bool(_class_folders(os.path.join(root, folder)))
  )


@functools.cache
def warn_once(*text):
  """Logs a warning that another split of the same tree would repeat."""
  logging.warning(*text)


def _base(root, split):
  """The folder of the class folders, and whether it is one split's own."""
  base = root if split in ('', _ALL) else _split_folder(root, split)
  if base:
    return base, True
  others = split_folders(root)
  if others:
    text = (
      f'{root} has no split {split!r} (it has {", ".join(others)}); set '
      'config.data.train_split and config.data.eval_split'
    )
    if len(others) == 1:
      text += (
        f', or config.data.path={os.path.join(root, others[0])} to have '
        'that divided into train and validation'
      )
    elif others[0].casefold() in _SPLITS[0]:
      text += f', as in config.data.eval_split={others[-1]}'
    raise config_lib.ConfigError(text)
  if split not in ('train', 'validation'):
    raise config_lib.ConfigError(
      f'{root} has no split {split!r}; a tree of classes without splits '
      'is divided into train and validation: set config.data.train_split and '
      'config.data.eval_split to these'
    )
  return root, False


def _from_split_file(root, split, known, other_splits):
  file, rows = _rows(root, split)
  if known is None:
    parts = [(file, rows)]
    parts += [_rows(root, s) for s in other_splits if s.endswith('.txt')]
    known = _vocabulary_of(parts)
  _check_rows(file, rows, known)
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
  return Listing(root, files, labels, known, file)


def _rows(root, split):
  """A split file's path and its lines as (path, id) or (path, 3 ids)."""
  file = os.path.expanduser(split)
  if not os.path.exists(file):
    inside = os.path.join(root, split)
    file = inside if os.path.exists(inside) else file
  lines = vocabulary.read_lines(file)
  columns = 3 if _row(lines[0], 3) else 1
  seen, rows = {}, []
  for number, line in enumerate(lines, 1):
    row = _row(line, columns)
    if row is None:
      ids = 'ANP_ID NOUN_ID ADJECTIVE_ID' if columns == 3 else 'CLASS_ID'
      raise config_lib.ConfigError(
        f'{file}:{number}: {line[:80]!r}, expected PATH {ids}, with single '
        'spaces'
      )
    first = seen.setdefault(row[0], number)
    if first != number:
      raise config_lib.ConfigError(
        f'{file}:{number}: {row[0]!r} stands in line {first} already'
      )
    rows.append(row)
  return file, rows


def _row(line, columns):
  """(path, ids...) of a line, None if it has another form."""
  parts = line.rsplit(' ', columns)
  ids = parts[1:]
  # int() would take ' 1', '+1', '1_000' and digits of other scripts too.
  if len(ids) != columns or not all(i.isdecimal() and i.isascii() for i in ids):
    return None
  path = parts[0]
  if not path or path != path.strip() or '\0' in path or len(ids[0]) > 9:
    return None
  return (path, *(int(i) for i in ids))


def _vocabulary_of(parts):
  """Classes named by their images' folders, of all split files together."""
  names, nouns, adjectives = ({}, {}), ({}, {}), ({}, {})
  for file, rows in parts:
    for number, (path, label, *ids) in enumerate(rows, 1):
      where = f'{file}:{number}'
      name = _folder(path)
      if not name:
        raise config_lib.ConfigError(
          f'{where}: {path!r} is in no folder that names its class; give the '
          'classes (config.data.lists)'
        )
      _agree(where, names, 'class', label, name)
      if ids:
        adjective, _, noun = name.partition('_')
        if not adjective or not noun or '_' in noun:
          raise config_lib.ConfigError(
            f'{where}: noun and adjective ids, but folder {name!r} is no '
            'adjective_noun pair'
          )
        _agree(where, nouns, 'noun', ids[0], noun)
        _agree(where, adjectives, 'adjective', ids[1], adjective)
  orders = [
    _in_order(parts, kind, table)
    for kind, table in (
      ('class', names), ('adjective', adjectives), ('noun', nouns),
    )
  ]  # fmt: skip
  return vocabulary.Vocabulary(orders[0], orders[1] or None, orders[2] or None)


def _agree(where, tables, kind, number, name):
  """Notes that an id has a name; each has one other."""
  name_of, number_of = tables
  before = name_of.setdefault(number, name), number_of.setdefault(name, number)
  if before != (name, number):
    raise config_lib.ConfigError(
      f'{where}: {kind} {number} is {name!r}, but above {kind} {before[1]} is '
      f'{before[0]!r}'
    )


def _in_order(parts, kind, tables):
  table = tables[0]
  files = ', '.join(file for file, _ in parts)
  for number in range(len(table)):
    if number not in table:
      raise config_lib.ConfigError(
        f'{files}: no image of {kind} {number}, but of {max(table)}; give the '
        'names (config.data.lists)'
      )
  return tuple(table[number] for number in range(len(table)))


def _check_rows(file, rows, known):
  """Refuses ids that are out of range or another name's than the folder's."""
  positions = {name: i for i, name in enumerate(known.names)}
  nouns, adjectives = known.noun_ids(), known.adjective_ids()
  for number, (path, label, *ids) in enumerate(rows, 1):
    if label >= len(known):
      raise config_lib.ConfigError(
        f'{file}:{number}: class {label}, expected 0 to {len(known) - 1}'
      )
    folder = _folder(path)
    if positions.get(folder, label) != label:
      raise config_lib.ConfigError(
        f'{file}:{number}: class {label} is {known.names[label]!r}, but the '
        f'folder is {folder!r} (class {positions[folder]})'
      )
    if not ids:
      continue
    if not len(nouns):
      raise config_lib.ConfigError(
        f'{file}:{number}: noun and adjective ids, but the classes are no '
        f'adjective_noun pairs (the first is {known.names[0]!r})'
      )
    for kind, given, want in (
      ('noun', ids[0], nouns[label]),
      ('adjective', ids[1], adjectives[label]),
    ):
      if given != want:
        raise config_lib.ConfigError(
          f'{file}:{number}: {kind} {given}, but that of '
          f'{known.names[label]!r} is {want}'
        )


def _folder(path):
  return os.path.basename(os.path.dirname(path))


def _class_folders(folder):
  # Hidden ones are of other programs, such as .ipynb_checkpoints.
  try:
    return sorted(
      e.name
      for e in os.scandir(folder)
      if e.is_dir() and not e.name.startswith('.')
    )
  except OSError as e:
    raise config_lib.ConfigError(f'{folder}: {e.strerror}') from e


def _class_files(base, name, suffixes, left_out):
  """Names of a class's files; counts what else its folder has."""
  files = []
  folder = os.path.join(base, name)
  for entry in sorted(os.scandir(folder), key=lambda e: e.name):
    # macOS leaves a hidden ._NAME.jpg, no image, for each file it copies.
    if entry.name.startswith('.'):
      continue
    # By name first: of a link, is_dir() would ask the file system.
    if entry.name.lower().endswith(suffixes):
      files.append(entry.name)
    elif entry.is_dir():
      for file in _images(entry.path, below=True):
        left_out.add(os.path.join(name, entry.name, file), _DEEPER)
    else:
      left_out.add(os.path.join(name, entry.name))
  return files


def _images(folder, below=False):
  """Yields the image files in a folder, or also below it, by suffix."""
  suffixes = SUFFIXES + CONVERTIBLE + images.HEIF_SUFFIXES
  for place, folders, names in os.walk(folder):
    folders[:] = sorted(f for f in folders if below and not f.startswith('.'))
    for name in sorted(names):
      if name.lower().endswith(suffixes) and not name.startswith('.'):
        yield os.path.relpath(os.path.join(place, name), folder)


def _in_train(path):
  """Whether a file of an undivided tree is trained on, by its own name."""
  digest = hashlib.sha256(path.encode(errors='surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big') / 2.0**64 < _TRAIN_SHARE
