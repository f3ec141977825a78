"""Lists of images with their classes: a CSV or Parquet file with a row each."""

import csv
import os
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anp_jax import config as config_lib
from anp_jax.config import errors
from anp_jax.data.sources import class_texts, image_folder, splits, stored_images

SUFFIXES = ('.csv', '.parquet')
# Names that a column goes by, in any case.
_PATHS = ('path', 'file', 'image', 'filename', 'file_name')
_SPLITS = ('split',)


class _Row(NamedTuple):
  """An image of a list; `place` names its row in messages, `split` may be ''."""

  path: str
  label: str
  split: str
  place: str


def find(d: Any, split: str) -> image_folder.Listing:
  """The images of a split of config.data.source=list:FILE.

  A row has a path, a class (a name or a number) or an adjective and a noun,
  and a split if the list has that column. Without it, the images are divided
  as those of a tree without splits, by a hash of each path; the split '' is
  then all of them.

  Args:
    d: namespace with source, path (that paths start from; '': the list's
      folder), lists and pairs, as config.data.
    split: name, or another that the split usually goes by.

  Returns:
    The files, in the order of the rows.

  Raises:
    ConfigError: naming the list and its row, and what is expected.
  """
  file = os.path.expanduser(d.source.removeprefix('list:'))
  folder = os.path.dirname(file)
  root = os.path.expanduser(d.path) or folder or '.'
  rows = _rows(file, root)
  labels, classes = class_texts.classify(
    [row.label for row in rows], d, folder, lambda i: rows[i].place
  )
  chosen = np.flatnonzero(_in_split(file, rows, split) & (labels >= 0))
  names = tuple(rows[i].path for i in chosen)
  stored_images.check_root(root, names, lambda i: rows[chosen[i]].place)
  storage = stored_images.DiskFiles(root, names, confined_to=root)
  name = f'{file}: {split}' if split else file
  return image_folder.Listing(root, names, labels[chosen], classes, name, storage)


def has_splits(path: str) -> bool:
  """Whether a list has a column of splits."""
  columns, _ = _table(os.path.expanduser(path))
  return _column(columns, _SPLITS) is not None


def _rows(file, root):
  """The rows of a list, whose paths are relative to a folder."""
  columns, table = _table(file)
  path, split = _column(columns, _PATHS), _column(columns, _SPLITS)
  lower = [c.lower() for c in columns]
  labels = [lower.index(name) for name in class_texts.columns(lower)]
  if path is None or not labels:
    raise config_lib.ConfigError(
      f'{file} has the columns {", ".join(columns) or "none"}; expected path, '
      'label or adjective and noun, and optionally split'
      f'{_hint(lower, (*_PATHS, "label", "adjective", "noun"))}'
    )
  if split is None and (hint := _hint(lower, _SPLITS)):
    image_folder.warn_once(f'{file} has the columns {", ".join(columns)}, and no split{hint}')
  rows, firsts = [], {}
  for number, cells in table:
    place = f'{file}:{number}'
    if len(cells) != len(columns):
      raise config_lib.ConfigError(f'{place}: {len(cells)} columns, expected {len(columns)}')
    for i in (path, *labels, *([] if split is None else [split])):
      if not cells[i] or '\0' in cells[i]:
        raise config_lib.ConfigError(f'{place}: {columns[i]} is {cells[i]!r}, expected a text')
    # However it is spelled: ./a.jpg is a.jpg.
    first = firsts.setdefault(os.path.abspath(os.path.join(root, cells[path])), place)
    if first != place:
      raise config_lib.ConfigError(f'{place}: {cells[path]!r} stands already in {first}')
    name = '_'.join(cells[i] for i in labels)
    rows.append(_Row(cells[path], name, '' if split is None else cells[split], place))
  if not rows:
    raise config_lib.ConfigError(f'{file} has no rows')
  return rows


def _table(file):
  """The columns of a list, and its rows of texts by number."""
  if file.lower().endswith('.parquet'):
    return _parquet(file)
  if file.lower().endswith('.csv'):
    return _csv(file)
  raise config_lib.ConfigError(f'{file}: expected a list that ends in {" or ".join(SUFFIXES)}')


def _csv(file):
  """Lines are counted from 1, the head's; empty ones are left out."""
  try:
    with open(file, encoding='utf-8-sig', newline='') as f:
      reader = csv.reader(f, strict=True)
      rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
  except csv.Error as e:
    raise config_lib.ConfigError(f'{file}:{reader.line_num}: {e}') from e
  except UnicodeDecodeError as e:
    raise config_lib.ConfigError(f'{file} is not UTF-8: {e.reason}') from e
  except OSError as e:
    raise config_lib.ConfigError(f'cannot read {file}: {e.strerror}') from e
  return (rows[0][1], rows[1:]) if rows else ([], [])


def _parquet(file):
  """Rows are counted from 0, as pandas does; NaN is nothing."""
  try:
    names = pq.read_schema(file).names
    # Not others of such a name: a column `image` may hold pictures.
    lower = class_texts.columns([name.lower() for name in names])
    indices = {_column(names, [name]) for name in lower}
    indices |= {_column(names, _PATHS), _column(names, _SPLITS)} - {None}
    names = [names[i] for i in sorted(indices)]
    columns = [c.to_pylist() for c in pq.read_table(file, columns=names)]
  except (OSError, pa.ArrowException) as e:
    raise config_lib.ConfigError(f'cannot read {file}: {str(e).splitlines()[0]}') from e
  return names, [
    (i, [_cell(f'{file}:{i}', value) for value in row]) for i, row in enumerate(zip(*columns))
  ]


def _cell(place, value):
  try:
    return '' if value is None or value != value else class_texts.text(value).strip()
  except ValueError as e:
    raise config_lib.ConfigError(f'{place}: {e}') from e


def _column(columns, names):
  """The index of the column of the first of these names; None without one."""
  lower = [c.lower() for c in columns]
  return next((lower.index(n) for n in names if n in lower), None)


def _hint(columns, names):
  """The name that a column may mean, as text for an error line; '' if there is none."""
  return next(filter(None, (errors.nearest(c, names) for c in columns if c not in names)), '')


def _in_split(file, rows, split):
  """(rows,) bool: whether each row is of a split."""
  names = dict.fromkeys(row.split for row in rows)
  if '' in names:
    splits.check_half(file, split)
    return np.array([splits.in_half(row.path, split) for row in rows], bool)
  name = splits.choose(file, split, names)
  for other in names.keys() - {name}:
    if hint := errors.nearest(other, [name]):
      first = next(row for row in rows if row.split == other)
      image_folder.warn_once(f'{first.place}: the split {other!r} is not read{hint}')
  return np.array([row.split == name for row in rows], bool)
