"""Sets of Hugging Face's `datasets` on disk, which that library finds and describes."""

import glob
import logging
import os
import re
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anp_jax import config as config_lib
from anp_jax.data.sources import (
  arrow_rows,
  class_texts,
  hf_columns,
  image_folder,
  splits,
  table_cache,
)
from anp_jax.system import error_lines, files

_SPLITS, _STATE = 'dataset_dict.json', 'state.json'  # files that save_to_disk writes
# data/train-00000-of-00001.parquet, also with a digest behind it, train-0.parquet, train.parquet
_NAME = re.compile(r'(.+?)(?:-\d+(?:-of-\d+(?:-[0-9a-f]{16})?)?)?\.parquet')
_FOLDER = 'huggingface'  # folder of the data folder, for Arrow files of Parquet sets


def find(d: Any, split: str, other_split: str, data_dir: str) -> image_folder.Listing:
  """The examples of a split of config.data.source=hf:PATH.

  A set without splits is divided as a tree without splits, by a hash of each
  row's number; the split '' is then all of it.

  Args:
    d: namespace with source, path (that a relative PATH starts from), lists and
      pairs, as config.data.
    split: name of the split.
    other_split: other split of the run, or ''; its classes count too.
    data_dir: data folder; the library copies Parquet files there into Arrow files,
      which have random access.

  Raises:
    ConfigError: naming the set at fault, or the package that is missing.
  """
  path = full_path(d.source, d.path)
  parts = _load(path, data_dir)
  folder = path if os.path.isdir(path) else os.path.dirname(path)
  is_divided = has_splits(path)
  if is_divided:
    is_saved = os.path.exists(os.path.join(path, _SPLITS))
    name = splits.choose(path, split, parts, f'hf:{path}/' * is_saved)
    other_name = (splits.matches(other_split, parts) or [name])[0]
  else:
    splits.check_half(path, split)
    name = other_name = ''
  root = os.path.join(folder, name) if name else folder
  place = f'{path}: {split}' if split else path
  part, other = parts[name], parts[other_name]
  columns = hf_columns.choose(part.features, root)
  texts = hf_columns.texts(part.data.table, columns, place)
  other_texts = hf_columns.texts(other.data.table, hf_columns.choose(other.features, path), path)
  labels, classes = class_texts.classify(
    texts, d, folder, lambda i: f'{place}, row {i}', other_texts, columns.vocabulary()
  )
  # An example without a label stays; the lists may leave classes out.
  rows = np.array(
    [
      i
      for i, (label, text) in enumerate(zip(labels, texts))
      if (label >= 0 or not text) and (is_divided or splits.in_half(str(i), split))
    ],
    np.int64,
  )
  paths = tuple(entry['filename'] for entry in part.cache_files)
  states = tuple(map(files.state, paths))
  storage = arrow_rows.ArrowRows(paths, states, folder, columns.image, rows)
  names = tuple(_names(part.data.table[columns.image], rows))
  return image_folder.Listing(root, names, labels[rows], classes, place, storage)


def full_path(source: str, path: str) -> str:
  """The path of the set that config.data.source and path name."""
  return os.path.join(os.path.expanduser(path), os.path.expanduser(source.removeprefix('hf:')))


def has_splits(path: str) -> bool:
  """Whether a set is divided into splits."""
  return os.path.isdir(path) and not os.path.exists(os.path.join(path, _STATE))


def _load(path, data_dir):
  """{split: set}; that of a set without splits is called ''."""
  try:
    import datasets
  except ImportError as e:
    raise config_lib.ConfigError(
      "hf:PATH needs the package datasets, which is not installed: pip install '.[hf]'"
    ) from e
  datasets.utils.logging.set_verbosity(logging.CRITICAL)  # errors are raised, too
  if not sys.stderr.isatty():
    datasets.disable_progress_bars()
  folder = os.path.join(os.path.abspath(os.path.expanduser(data_dir)), _FOLDER)
  in_folder = {'cache_dir': folder, 'keep_in_memory': False}
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as e:
    raise config_lib.ConfigError(
      f'{folder} cannot be written ({e.strerror or e}); config.data.dir names another folder'
    ) from e
  try:
    if any(os.path.exists(os.path.join(path, name)) for name in (_SPLITS, _STATE)):
      parts = datasets.load_from_disk(path, keep_in_memory=False)
    elif os.path.isdir(path):
      parts = datasets.load_dataset('parquet', data_files=_parquet_files(path), **in_folder)
    else:
      parts = datasets.load_dataset('parquet', data_files=path, split='train', **in_folder)
  except config_lib.ConfigError:
    raise
  except Exception as e:  # noqa: BLE001 - the library and Arrow raise many kinds
    _refuse_damaged(path)
    raise config_lib.ConfigError(
      f'{path} cannot be read as a data set of Hugging Face (a folder made by save_to_disk, or '
      f'Parquet files): {error_lines.typed_line(e.__cause__ or e)}'
    ) from e
  return parts if isinstance(parts, dict) else {'': parts}


def _refuse_damaged(path):
  """Refuses the first file at fault, which the library's errors do not name."""
  for file in _files(path, '.arrow'):
    table_cache.read(file)
  schemas = {}
  for file in _files(path, '.parquet'):
    try:
      schemas[file] = pq.read_schema(file).names
    except (OSError, pa.ArrowException) as e:
      line = error_lines.first_line(e)
      raise config_lib.ConfigError(f'{file} cannot be read as a Parquet file: {line}') from e
    first = next(iter(schemas))
    if schemas[file] != schemas[first]:
      raise config_lib.ConfigError(f'{file} has other columns than {first}')


def _files(path, suffix):
  """The files of a folder and of those below it, or of a pattern, in order."""
  pattern = os.path.join(glob.escape(path), '**', '*') if os.path.isdir(path) else path
  return sorted(file for file in glob.glob(pattern, recursive=True) if file.endswith(suffix))


def _parquet_files(folder):
  """{split: paths}, of the names of files or of their folders.

  The library's own search takes a split's name anywhere in the path for it, the
  folders that the set lies in included.
  """
  by_split = {}
  for path in _files(folder, '.parquet'):
    name = _NAME.fullmatch(os.path.basename(path))[1]
    if not re.search('[A-Za-z]', name):  # train/0000.parquet
      name = os.path.basename(os.path.dirname(path))
    by_split.setdefault(name, []).append(path)
  for name, group in by_split.items():
    folders = sorted({os.path.dirname(path) for path in group})
    if len(folders) > 1:
      raise config_lib.ConfigError(
        f'{folder} has the split {name!r} in {folders[0]} and {folders[1]}; '
        'expected the path of one of these'
      )
  if not by_split:
    raise config_lib.ConfigError(
      f'{folder} has neither {_STATE} or {_SPLITS}, which save_to_disk writes, nor Parquet files'
    )
  return by_split


def _names(column, rows):
  """Yields the name of each image: its row, and its file's name."""
  has_paths = pa.types.is_struct(column.type) and column.type.get_field_index('path') >= 0
  paths = pc.struct_field(column, 'path').to_pylist() if has_paths else [None] * len(column)
  for row in rows.tolist():
    path = paths[row]
    yield f'{row}-{os.path.basename(path)}' if path else str(row)
