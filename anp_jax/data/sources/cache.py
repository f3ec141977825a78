"""Images kept in memory: the files as they are, or decoded and made smaller."""

import threading

import numpy as np

from anp_jax.data.image_files import images


def wrap(source, config):
  """A source that keeps what it has read, as config.data.cache says."""
  d = config.data
  if source.kind != 'encoded' or d.cache == 'none':
    return source
  budget = int(d.cache_gigabytes * 2**30)
  if d.cache == 'encoded':
    return Encoded(source, budget)
  return Decoded(source, budget, d.resize, d.max_megapixels)


class Encoded:
  """Image files, kept until the budget is spent.

  What came first stays: a shuffled stream needs each example once an epoch, so
  no example is worth more than another.
  """

  kind = 'encoded'

  def __init__(self, source, budget: int):
    """Wraps a source of kind 'encoded'; budget in bytes."""
    self.name = source.name
    self.vocabulary = source.vocabulary
    self.labels = source.labels
    self.example_name = source.example_name
    self._source = source
    self._left = budget
    self._kept = {}
    self._lock = threading.Lock()

  def __len__(self):
    return len(self._source)

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """See `sources.Source.read`."""
    kept = [self._kept.get(int(i)) for i in indices]
    missing = [i for i, item in enumerate(kept) if item is None]
    if missing:
      images, labels = self._source.read(np.asarray(indices)[missing])
      for i, image, label in zip(missing, images, labels):
        kept[i] = (self._prepared(image), label)
        self._keep(int(indices[i]), kept[i])
    images, labels = zip(*kept)
    return list(images), np.array(labels, np.int32)

  def _prepared(self, image):
    return image

  def _keep(self, index, item):
    size = memoryview(item[0]).nbytes
    with self._lock:
      if index not in self._kept and size <= self._left:
        self._left -= size
        self._kept[index] = item


class Decoded(Encoded):
  """Images decoded by Pillow, the shorter side brought down to a length.

  A JPEG is decoded at 1/2 to 1/8 of its scale where twice the length is left.
  All examples look alike whether they are kept or made again, so the budget
  changes no batch.
  """

  kind = 'pixels'

  def __init__(self, source, budget: int, shorter: int, max_megapixels: float):
    """Wraps a source of kind 'encoded'; `shorter` in pixels."""
    super().__init__(source, budget)
    self._shorter, self._max_megapixels = shorter, max_megapixels

  def _prepared(self, image):
    return images.decode_shrunk(image, self._shorter, self._max_megapixels)
