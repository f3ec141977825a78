"""Images in Arrow files, by their numbers."""

from collections.abc import Sequence
import functools
import os

import numpy as np
import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.data.sources import stored_images, table_cache
from anp_jax.system import files


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
      self._values = _table(self._paths, self._states)[self._column]
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


@functools.lru_cache(4)
def _table(paths: Sequence[str], _states: Sequence[tuple[int, int]]) -> pa.Table:
  """The rows of files in these states; a process has many tasks on the same ones."""
  tables = [table_cache.read(path) for path in paths]
  for path, table in zip(paths, tables):
    if table.schema != tables[0].schema:
      raise config_lib.ConfigError(f'{path} has other columns than {paths[0]}')
  return pa.concat_tables(tables)
