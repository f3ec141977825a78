"""Image files kept in memory, as config.data.cache says."""

import threading

import ml_collections
import numpy as np

from anp_jax.data.sources import mapped, source as source_lib


def wrap(source: source_lib.Source, config: ml_collections.ConfigDict) -> source_lib.Source:
  """A source that keeps what it has read, as config.data.cache says."""
  d = config.data
  if source.kind != 'encoded' or d.cache == 'none':
    return source
  if d.cache == 'mapped':
    return mapped.Mapped(source, config)
  return Encoded(source, int(d.cache_gigabytes * 2**30))


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
        items[i] = (file, label)
        self._store(int(indices[i]), items[i])
    images, labels = zip(*items)
    return list(images), np.array(labels, np.int32)

  def _store(self, index, item):
    size = len(item[0])
    with self._lock:
      if index not in self._items and size <= self._bytes_left:
        self._bytes_left -= size
        self._items[index] = item
