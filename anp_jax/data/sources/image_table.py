"""Lists of images with their classes: a CSV or Parquet file with a row each."""

import csv
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anp_jax import config as config_lib
from anp_jax.data.sources import class_texts, image_folder, stored_images

SUFFIXES = ('.csv', '.parquet')
# Names that a column goes by, in any case.
_PATHS = ('path', 'file', 'image', 'filename', 'file_name')
_LABELS = ('label', 'class', 'anp')
_PAIR = ('adjective', 'noun')
_SPLITS = ('split',)


def find(d, split: str, other_split: str = '') -> image_folder.Listing:
  """The images of a split of config.data.source=list:FILE.

  A row has a path, a class (a name or a number) or an adjective and a noun,
  and a split if the list has that column. Without it, the images are divided
  as those of a tree without splits, by a hash of each path; the split '' is
  then all of them.

  Args:
    d: with source, path (that paths start from; '': the list's folder), lists
      and pairs, as config.data.
    split: its name, or another that it usually goes by.
    other_split: of the run; unused: the classes are those of all rows.

  Returns:
    The files, in the order of the rows.

  Raises:
    ConfigError: naming the list and its row, and what is expected.
  """
  del other_split
  file = os.path.expanduser(d.source.removeprefix('list:'))
  rows = _rows(file)
  folder = os.path.dirname(file)
  root = os.path.expanduser(d.path) or folder or '.'
  texts = [row[1] for row in rows]
  classes = class_texts.vocabulary({*texts}, d.lists, folder, d.pairs)
  labels = class_texts.labels(texts, classes, lambda i: f'{file}:{rows[i][3]}', bool(d.lists))
  chosen = np.flatnonzero(_in_split(file, rows, split) & (labels >= 0))
  names = tuple(rows[i][0] for i in chosen)
  _check_root(file, root, [rows[i] for i in chosen])
  storage = stored_images.DiskFiles(root, names, confined_to=root)
  name = f'{file}: {split}' if split else file
  return image_folder.Listing(root, names, labels[chosen], classes, name, storage)


def has_splits(path: str) -> bool:
  """Whether a list has a column of splits."""
  file = os.path.expanduser(path)
  _, columns, _ = _table(file)
  return _column(columns, _SPLITS) is not None


def _rows(file):
  """The rows of a list: path, class, split or None, and number."""
  kind, columns, rows = _table(file)
  path, split = _column(columns, _PATHS), _column(columns, _SPLITS)
  label = _column(columns, _LABELS)
  pair = [_column(columns, (name,)) for name in _PAIR]
  if path is None or label is None and None in pair:
    raise config_lib.ConfigError(
      f'{file} has the columns {", ".join(columns) or "none"}; expected path, '
      'label or adjective and noun, and optionally split'
    )
  fields = [path, *(pair if label is None else [label])]
  fields += [] if split is None else [split]
  result, number_of = [], {}
  for number, row in rows:
    if len(row) != len(columns):
      raise config_lib.ConfigError(f'{file}:{number}: {len(row)} columns, expected {len(columns)}')
    for i in fields:
      if not row[i] or '\0' in row[i]:
        raise config_lib.ConfigError(
          f'{file}:{number}: {columns[i]} is {row[i]!r}, expected a text'
        )
    first = number_of.setdefault(row[path], number)
    if first != number:
      raise config_lib.ConfigError(
        f'{file}:{number}: {row[path]!r} stands in {kind} {first} already'
      )
    name = '_'.join(row[i] for i in pair) if label is None else row[label]
    result.append((row[path], name, None if split is None else row[split], number))
  if not result:
    raise config_lib.ConfigError(f'{file} has no rows')
  return result


def _table(file):
  """What a row is called, the columns, and rows of texts by number."""
  if file.lower().endswith('.parquet'):
    return 'row', *_parquet(file)
  if file.lower().endswith('.csv'):
    return 'line', *_csv(file)
  raise config_lib.ConfigError(f'{file}: expected a list that ends in {" or ".join(SUFFIXES)}')


def _csv(file):
  """Lines are counted from 1, the head's; empty ones are left out."""
  try:
    with open(file, encoding='utf-8-sig', newline='') as f:
      reader = csv.reader(f, strict=True)
      rows = []
      for row in reader:
        if row:
          rows.append((reader.line_num, [cell.strip() for cell in row]))
  except csv.Error as e:
    raise config_lib.ConfigError(f'{file}:{reader.line_num}: {e}') from e
  except UnicodeDecodeError as e:
    raise config_lib.ConfigError(f'{file} is not UTF-8: {e.reason}') from e
  except OSError as e:
    raise config_lib.ConfigError(f'cannot read {file}: {e.strerror}') from e
  return (rows[0][1], rows[1:]) if rows else ([], [])


def _parquet(file):
  """Rows are counted from 0, as pandas does."""
  try:
    names = pq.read_schema(file).names
    lower = {*_PATHS, *_LABELS, *_PAIR, *_SPLITS}
    names = [name for name in names if name.lower() in lower]
    columns = [c.to_pylist() for c in pq.read_table(file, columns=names)]
  except (OSError, pa.ArrowException) as e:
    raise config_lib.ConfigError(f'cannot read {file}: {str(e).splitlines()[0]}') from e
  rows = [
    (i, ['' if cell is None else str(cell).strip() for cell in row])
    for i, row in enumerate(zip(*columns))
  ]
  return names, rows


def _column(columns, names):
  """The index of the column of the first of these names; None without one."""
  lower = [c.lower() for c in columns]
  return next((lower.index(n) for n in names if n in lower), None)


def _in_split(file, rows, split):
  """(rows,) bool: whether each row is of a split."""
  if rows[0][2] is None:
    image_folder.check_half(file, split)
    return np.array([image_folder.in_half(r[0], split) for r in rows], bool)
  present = dict.fromkeys(row[2] for row in rows)
  usual = image_folder.split_names(split)
  same = [n for n in present if n == split]
  same = same or [n for n in present if n.casefold() in usual]
  if len(same) != 1:
    raise config_lib.ConfigError(
      f'{file} has no split {split!r} (it has {", ".join(present)}); set '
      'config.data.train_split and config.data.eval_split'
      f'{config_lib.nearest(split, present)}'
    )
  return np.array([row[2] == same[0] for row in rows], bool)


def _check_root(file, root, rows):
  """Refuses a path that leaves the root, and a root without three files."""
  if not rows:
    return
  for row in rows:
    if not stored_images.is_inside(row[0], root):
      raise config_lib.ConfigError(
        f'{file}:{row[3]}: {row[0]!r} lies outside of {root}; config.data.path '
        'names a folder that all paths lie in'
      )
  some = (rows[0], rows[len(rows) // 2], rows[-1])
  if not any(os.path.exists(os.path.join(root, row[0])) for row in some):
    raise config_lib.ConfigError(
      f'{file}:{rows[0][3]}: no file {os.path.join(root, rows[0][0])!r}; is '
      f'{root} the folder that the paths start from (config.data.path)?'
    )
