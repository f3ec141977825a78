"""Sets of Hugging Face's `datasets` on disk, read without that library."""

from collections.abc import Sequence
import functools
import os
from typing import Any

from absl import logging
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anp_jax import config as config_lib
from anp_jax.data.sources import (
  class_texts,
  hf_columns,
  hf_files,
  image_folder,
  splits,
  stored_images,
  table_cache,
)
from anp_jax.system import files

_KIND = 'parquet-1'  # with the version of the copies of Parquet files
_ROWS = 64  # of a batch of these


class ArrowRows:
  """Images in a column of Arrow files that are mapped into memory."""

  def __init__(
    self,
    paths: tuple[str, ...],
    folder: str,
    column: str,
    rows: np.ndarray,
    states: tuple[tuple[int, int], ...] | None = None,
  ):
    """Creates the storage; the files are mapped when they are first read.

    Args:
      paths: paths of the Arrow files.
      folder: folder that the paths of images outside of these are relative to.
      column: name of the images' column.
      rows: (n,) int64, numbers of the rows in all files.
      states: sizes and times of the files; None: those of now.
    """
    self._paths, self._folder, self._column, self._rows = paths, folder, column, rows
    self._states = tuple(map(files.state, paths)) if states is None else states
    self._values: pa.ChunkedArray | None = None

  def __reduce__(self):
    return ArrowRows, (self._paths, self._folder, self._column, self._rows, self._states)

  def read(self, index: int) -> bytes:
    """The bytes of an image, from any thread."""
    # Two threads may open the files; either result will do.
    if self._values is None:
      self._values = read_table(self._paths, self._states)[self._column]
    value = self._values[int(self._rows[index])]
    path = ''
    if isinstance(value, pa.StructScalar) and value.is_valid:
      path = value['path'].as_py() if 'path' in value else ''
      value = value['bytes']
    if value.is_valid:
      return value.as_buffer().to_pybytes()
    if not path:
      raise stored_images.UnusableError('there is no image in the row')
    return stored_images.read_file(os.path.join(self._folder, path), self._folder or '.')

  def state(self, index: int) -> tuple[int, int]:
    """The size and time of the set's files, together."""
    del index
    sizes, times = zip(*self._states)
    return sum(sizes), max(times)

  def select(self, indices: np.ndarray) -> 'ArrowRows':
    """The images of these indices."""
    return ArrowRows(self._paths, self._folder, self._column, self._rows[indices], self._states)


def find(d: Any, split: str, other_split: str, data_dir: str) -> image_folder.Listing:
  """The examples of a split of config.data.source=hf:PATH.

  A set without splits is divided as a tree without splits, by a hash of each
  row's number; the split '' is then all of it.

  Args:
    d: namespace with source, path (that a relative PATH starts from), lists and
      pairs, as config.data.
    split: name of the split.
    other_split: other split of the run, or ''; its classes count too.
    data_dir: data folder; Parquet files are copied there as Arrow files, which
      have random access.

  Raises:
    ConfigError: naming the folder or file at fault.
  """
  path = full_path(d.source, d.path)
  part = hf_files.find(path, split)
  name = f'{path}: {split}' if split else path
  paths, table, columns = _open(part, data_dir)
  texts = hf_columns.texts(table, columns, name)
  declared = hf_columns.vocabulary(columns)
  other_texts: Sequence[str] = ()
  if d.lists or declared is None:  # else no class is in the other split alone
    other_texts = _other_texts(path, part, split, other_split, data_dir)
  labels, classes = class_texts.classify(
    texts, d, part.folder, lambda i: f'{name}, row {i}', other_texts, declared
  )
  # An example without a label stays; the lists may leave classes out.
  rows = np.array(
    [
      i
      for i, (label, text) in enumerate(zip(labels, texts))
      if (label >= 0 or not text) and (part.is_split or splits.in_half(str(i), split))
    ],
    np.int64,
  )
  storage = ArrowRows(paths, part.folder, columns.image, rows)
  root = part.folder
  if part.is_split and part.are_parquet:
    root = os.path.join(root, split)
  names = tuple(_names(table[columns.image], rows))
  return image_folder.Listing(root, names, labels[rows], classes, name, storage)


def full_path(source: str, path: str) -> str:
  """The path of the set that config.data.source and path name."""
  return os.path.join(os.path.expanduser(path), os.path.expanduser(source.removeprefix('hf:')))


@functools.lru_cache(4)
def read_table(paths: Sequence[str], states: Sequence[tuple[int, int]]) -> pa.Table:
  """The rows of Arrow files; a process has many tasks on the same ones.

  Args:
    paths: paths of the files.
    states: size and time of each, which tell other content of the same paths.

  Raises:
    ConfigError: if one cannot be read or has other columns.
  """
  del states
  tables = [table_cache.read(path) for path in paths]
  for path, table in zip(paths, tables):
    if table.schema != tables[0].schema:
      raise config_lib.ConfigError(f'{path} has other columns than {paths[0]}')
  return pa.concat_tables(tables)


def _names(column, rows):
  """Yields the name of each image: its row, and its file's name."""
  has_paths = pa.types.is_struct(column.type) and column.type.get_field_index('path') >= 0
  paths = pc.struct_field(column, 'path').to_pylist() if has_paths else [None] * len(column)
  for row in rows.tolist():
    path = paths[row]
    yield f'{row}-{os.path.basename(path)}' if path else str(row)


def _open(part, data_dir):
  """The Arrow files of a set, their table, and its columns."""
  paths = part.paths
  if part.are_parquet:
    paths = (_arrow_copy(part, data_dir),)
  table = read_table(paths, tuple(map(files.state, paths)))
  return paths, table, hf_columns.choose(table.schema, part.folder)


def _arrow_copy(part, data_dir):
  """The Arrow file of a set's Parquet files, written once."""

  def build(path):
    logging.info('Copying %s, once: Parquet has no random access.', part.paths[0])
    try:
      _copy(part, path)
    except pa.ArrowException as e:
      raise config_lib.ConfigError(
        f'{part.folder} has a damaged Parquet file: {str(e).splitlines()[0]}'
      ) from e

  return table_cache.ensure(data_dir, _KIND, part.paths, build)


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
  _, table, columns = _open(other, data_dir)
  return hf_columns.texts(table, columns, path)
