"""Images kept in memory: the files as they are, or decoded and made smaller."""

import threading

import ml_collections
import numpy as np

from anp_jax.data.image_files import images
from anp_jax.data.sources import source as source_lib


def wrap(source: source_lib.Source, config: ml_collections.ConfigDict) -> source_lib.Source:
  """A source that keeps what it has read, as config.data.cache says."""
  d = config.data
  if source.kind != 'encoded' or d.cache == 'none':
    return source
  budget = int(d.cache_gigabytes * 2**30)
  if d.cache == 'encoded':
    return Encoded(source, budget)
  return Decoded(source, budget, d.resize, d.max_megapixels)


class Encoded(source_lib.Wrapper):
  """Image files, kept until the budget is spent.

  The first files stay: a shuffled stream needs each example once per epoch, so
  no example is worth more than another.
  """

  def __init__(self, source: source_lib.Source, budget: int):
    """Creates a cache of a source of kind 'encoded'; budget in bytes."""
    super().__init__(source)
    self._bytes_left = budget
    self._items: dict[int, tuple] = {}  # (image, label) by index
    self._lock = threading.Lock()

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Images by index, from memory where they are, and labels."""
    items = [self._items.get(int(i)) for i in indices]
    missing = [i for i, item in enumerate(items) if item is None]
    if missing:
      read = self._source.read(np.asarray(indices)[missing])
      for i, file, label in zip(missing, *read):
        items[i] = (self._prepare(file), label)
        self._store(int(indices[i]), items[i])
    prepared, labels = zip(*items)
    return list(prepared), np.array(labels, np.int32)

  def _prepare(self, file):
    return file

  def _store(self, index, item):
    size = memoryview(item[0]).nbytes
    with self._lock:
      if index not in self._items and size <= self._bytes_left:
        self._bytes_left -= size
        self._items[index] = item


class Decoded(Encoded):
  """Images decoded by Pillow, the shorter side brought down to a length.

  A JPEG is decoded at 1/2 to 1/8 of its scale where twice the length is left.
  An example looks the same whether it is cached or decoded again, so the budget
  changes no batch.
  """

  def __init__(self, source: source_lib.Source, budget: int, shorter: int, max_megapixels: float):
    """Creates a cache of a source of kind 'encoded'; `shorter` in pixels."""
    super().__init__(source, budget)
    self.kind = 'pixels'
    self._shorter, self._max_megapixels = shorter, max_megapixels

  def _prepare(self, file):
    return images.decode_shrunk(file, self._shorter, self._max_megapixels)
