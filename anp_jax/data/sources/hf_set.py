"""Sets of Hugging Face's `datasets` on disk, read without that library."""

from collections.abc import Sequence
import functools
import hashlib
import json
import os

from absl import logging
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anp_jax import config as config_lib
from anp_jax.data.sources import (
  class_texts,
  hf_columns,
  hf_files,
  image_folder,
  stored_images,
  table_cache,
)
from anp_jax.system import files

_VERSION = 1  # of the copies of Parquet files
_ROWS = 64  # of a batch of these


class ArrowRows(stored_images.Storage):
  """Images in a column of Arrow files that are mapped into memory."""

  def __init__(self, paths, folder: str, column: str, rows, states):
    """Creates the storage; nothing is opened.

    Args:
      paths: of the Arrow files.
      folder: that the paths of images outside of these are relative to.
      column: of the images.
      rows: (n,) int64, of the files' rows in their order.
      states: size and time of each file.
    """
    self._paths, self._folder, self._column = paths, folder, column
    self._rows, self._states = rows, states
    self._values = None

  def __getstate__(self):
    return self._paths, self._folder, self._column, self._rows, self._states

  def __setstate__(self, state):
    self.__init__(*state)

  def __len__(self):
    return len(self._rows)

  def read(self, index):
    """Returns the bytes of an image, from any thread."""
    value = self._value(index)
    path = _path(value)
    if isinstance(value, pa.StructScalar):
      value = value['bytes'] if value.is_valid else value
    if value.is_valid:
      return value.as_buffer().to_pybytes()
    if not path:
      raise stored_images.UnusableError('there is no image in the row')
    return stored_images.read_file(os.path.join(self._folder, path), self._folder or '.')

  def state(self, index):
    """Returns the size and time of the set's files, together."""
    sizes, times = zip(*self._states)
    return sum(sizes), max(times)

  def select(self, indices):
    """Returns the images of these indices."""
    return ArrowRows(self._paths, self._folder, self._column, self._rows[indices], self._states)

  def name(self, index: int) -> str:
    """Returns what messages call an image: its row, and its file's name."""
    path = _path(self._value(index))
    return f'{self._rows[index]}' + (f'-{os.path.basename(path)}' if path else '')

  def _value(self, index):
    # Two threads may open the files; either result will do.
    if self._values is None:
      self._values = _table(self._paths, self._states)[self._column]
    return self._values[int(self._rows[index])]


def find(d, split: str, other_split: str, data_dir: str) -> image_folder.Listing:
  """The examples of a split of config.data.source=hf:PATH.

  A set without splits is divided as a tree without splits, by a hash of each
  row's number; the split '' is then all of it.

  Args:
    d: with source, path (which a relative PATH starts from), lists and pairs,
      as config.data.
    split: its name.
    other_split: of the run, or ''; its classes count too.
    data_dir: the data folder; Parquet files are copied there as Arrow files,
      which have random access.

  Raises:
    ConfigError: naming the folder or file at fault.
  """
  path = full_path(d.source, d.path)
  part = hf_files.find(path, split)
  name = f'{path}: {split}' if split else path
  paths, states, columns = _open(part, data_dir)
  texts = hf_columns.texts(_table(paths, states), columns, name)
  fixed = hf_columns.vocabulary(columns)
  classes, are_names = fixed, fixed is not None
  if d.lists or fixed is None:
    other_texts = _other_texts(path, part, split, other_split, data_dir)
    all_texts = {*texts, *other_texts} - {''}
    classes = class_texts.vocabulary(all_texts, d.lists, part.folder, d.pairs)
    # Of both splits: the names of one alone may all look like numbers.
    are_names = are_names or not class_texts.are_numbers(all_texts)
  labeled = np.array([bool(text) for text in texts], bool)
  places = np.flatnonzero(labeled)
  labels = np.full(len(texts), -1, np.int32)
  labels[places] = class_texts.labels(
    (texts[i] for i in places),
    classes,
    lambda i: f'{name}, row {places[i]}',
    bool(d.lists),
    are_names,
  )
  chosen = (labels >= 0) | ~labeled  # the lists may leave classes out
  if not part.is_split:
    chosen &= [image_folder.in_half(str(i), split) for i in range(len(texts))]
  rows = np.flatnonzero(chosen)
  storage = ArrowRows(paths, part.folder, columns.image, rows, states)
  root = part.folder
  if part.is_split and part.are_parquet:
    root = os.path.join(root, split)
  return image_folder.Listing(root, _Names(storage), labels[rows], classes, name, storage)


def full_path(source: str, path: str) -> str:
  """The path of the set that config.data.source and path name."""
  return os.path.join(os.path.expanduser(path), os.path.expanduser(source.removeprefix('hf:')))


class _Names(Sequence):
  """The names of images in a storage, read when they are asked for."""

  def __init__(self, storage):
    self._storage = storage

  def __len__(self):
    return len(self._storage)

  def __getitem__(self, index):
    if not 0 <= index < len(self):
      raise IndexError(index)
    return self._storage.name(index)


def _open(part, data_dir):
  """The Arrow files of a set, their states, and its columns."""
  paths = part.paths
  if part.are_parquet:
    paths = (_arrow_copy(part, data_dir),)
  states = tuple(map(files.state, paths))
  schema = _table(paths, states).schema
  return paths, states, hf_columns.choose(schema, part.folder)


@functools.lru_cache(4)
def _table(paths, states):
  """The rows of Arrow files; a process has many tasks on the same ones."""
  del states  # of the same paths with another content
  tables = [table_cache.read(path) for path in paths]
  for path, table in zip(paths, tables):
    if table.schema != tables[0].schema:
      raise config_lib.ConfigError(f'{path} has other columns than {paths[0]}')
  return pa.concat_tables(tables)


def _arrow_copy(part, data_dir):
  """The Arrow file of a set's Parquet files, written once."""
  states = [(os.path.abspath(p), *files.state(p)) for p in part.paths]
  key = json.dumps([_VERSION, states])

  def build(path):
    logging.info('Copying %s, once: Parquet has no random access.', part.paths[0])
    try:
      _copy(part, path)
    except pa.ArrowException as e:
      raise config_lib.ConfigError(
        f'{part.folder} has a damaged Parquet file: {str(e).splitlines()[0]}'
      ) from e

  digest = hashlib.sha256(key.encode()).hexdigest()
  return table_cache.ensure(data_dir, f'parquet-{digest[:32]}', build)


def _copy(part, path):
  """Writes the images and labels of Parquet files as an Arrow file."""
  schema = _parquet_schema(part.paths[0])
  columns = hf_columns.choose(schema, part.folder)
  names = [columns.image, *columns.label]
  schema = pa.schema([schema.field(n) for n in names], schema.metadata)
  with pa.OSFile(path, 'wb') as file, pa.ipc.new_file(file, schema) as out:
    for source in part.paths:
      if not {*names} <= {*_parquet_schema(source).names}:
        raise config_lib.ConfigError(f'{source} has other columns than {part.paths[0]}')
      for batch in pq.ParquetFile(source).iter_batches(_ROWS, columns=names):
        out.write_batch(batch.select(names).cast(schema))


def _parquet_schema(path):
  """The schema of a Parquet file."""
  try:
    return pq.read_schema(path)
  except (OSError, pa.ArrowException) as e:
    raise config_lib.ConfigError(
      f'{path} cannot be read as a Parquet file: {str(e).splitlines()[0]}'
    ) from e


def _other_texts(path, part, split, other_split, data_dir):
  """The classes of the run's other split, if the set has it."""
  if not part.is_split or other_split in ('', split):
    return []
  try:
    other = hf_files.find(path, other_split)
  except config_lib.ConfigError:  # opening it says so, if the run needs it
    return []
  paths, states, columns = _open(other, data_dir)
  return hf_columns.texts(_table(paths, states), columns, path)


def _path(value):
  """The path that an image names; '' without one."""
  if not isinstance(value, pa.StructScalar) or not value.is_valid:
    return ''
  if 'path' not in value:
    return ''
  return value['path'].as_py() or ''
