"""Images in Arrow files, by their numbers."""

from collections.abc import Sequence
import dataclasses
import functools
import os

import numpy as np
import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.data.sources import stored_images, table_cache


@dataclasses.dataclass(frozen=True, eq=False)
class ArrowRows:
  """Images in a column of Arrow files, which are mapped into memory when they are first read.

  Attributes:
    paths: paths of the Arrow files.
    states: their sizes and times, see `files.state`.
    folder: folder that the paths of images outside of these are relative to.
    column: name of the images' column.
    rows: (n,) int64, numbers of the rows in all files.
  """

  paths: tuple[str, ...]
  states: tuple[tuple[int, int], ...]
  folder: str
  column: str
  rows: np.ndarray

  def __reduce__(self):
    return ArrowRows, (self.paths, self.states, self.folder, self.column, self.rows)

  @functools.cached_property
  def _values(self) -> pa.ChunkedArray:
    return _table(self.paths, self.states)[self.column]

  def read(self, index: int) -> bytes:
    """The bytes of an image, from any thread."""
    value = self._values[int(self.rows[index])]
    path = ''
    if isinstance(value, pa.StructScalar) and value.is_valid:
      path = value['path'].as_py() if 'path' in value else ''
      value = value['bytes']
    if value.is_valid:
      return value.as_buffer().to_pybytes()
    if not path:
      raise stored_images.UnusableError('there is no image in the row')
    return stored_images.read_file(os.path.join(self.folder, path), self.folder or '.')

  def state(self, index: int) -> tuple[int, int]:
    """The size and time of the set's files, together."""
    del index
    sizes, times = zip(*self.states)
    return sum(sizes), max(times)

  def select(self, indices: np.ndarray) -> 'ArrowRows':
    """The images of these indices."""
    return dataclasses.replace(self, rows=self.rows[indices])


@functools.lru_cache(4)
def _table(paths: Sequence[str], _states: Sequence[tuple[int, int]]) -> pa.Table:
  """The rows of files in these states; a process has many tasks on the same ones."""
  tables = [table_cache.read(path) for path in paths]
  for path, table in zip(paths, tables):
    if table.schema != tables[0].schema:
      raise config_lib.ConfigError(f'{path} has other columns than {paths[0]}')
  return pa.concat_tables(tables)
