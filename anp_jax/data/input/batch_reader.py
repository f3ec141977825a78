"""The rows of a step's batch, read from any kind of source."""

import collections
from collections.abc import Callable, Iterator
from concurrent import futures
import dataclasses
import functools
import itertools
import time
from typing import Any

import numpy as np

from anp_jax.data import sources
from anp_jax.data.input import batch_sampler, corruption

# Seconds that a batch waits for a disk or a network with a fault, and between
# two attempts. Rows wait together: an outage must not stall a run for hours.
_MAX_OUTAGE, _RETRY_PAUSE = 3.0, 0.2
# Batches that threads work on ahead, so that none waits for a batch's slowest row;
# parts of a batch for each thread; and the fewest rows of a part, whose own work takes
# Python's lock for 0.1 ms.
_BATCHES_AHEAD, _PARTS_PER_THREAD, _FEWEST_ROWS = 3, 2, 8

# images (n, size, size, 3) uint8, labels (n,) int32, weights (n,) float32.
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
# (image as the source has it, position in the stream) to (size, size, 3) uint8.
Decode = Callable[[Any, int], np.ndarray]
# An image as the source has it, to one whose `shape` begins with its height and width.
Prepare = Callable[[Any], Any]
# (prepared image, box, whether it is mirrored, (size, size, 3) uint8 that becomes the view).
Cut = Callable[[Any, np.ndarray, bool, np.ndarray], None]


@dataclasses.dataclass(eq=False)
class BatchReader:
  """The rows of batches, with other examples in place of damaged ones.

  A decoder reads all rows of a batch at once (`read`). Where one of them fails,
  it makes the batch row by row (`decode_rows`), so that it harms no other.

  Attributes:
    source: source of any kind but 'synthetic'.
    sampler: examples of each batch, and their cuts.
    registry: damaged examples of the source.
    pool: threads that decode.
    threads: number of them.
  """

  source: sources.Source
  sampler: batch_sampler.BatchSampler
  registry: corruption.Registry
  pool: futures.Executor
  threads: int = 1

  def batch_indices(self) -> Iterator[int]:
    """The indices of the stream's batches, from sampler.start on."""
    if self.sampler.steps is None:
      return itertools.count(self.sampler.start)
    return iter(range(self.sampler.start, self.sampler.steps))

  def read(self, batch_index: int) -> tuple[np.ndarray, list, np.ndarray, np.ndarray]:
    """Reads all rows of a batch at once.

    Args:
      batch_index: place of the batch in the stream.

    Returns:
      Positions in the stream (n,); images as the source has them, a list of n; labels
      (n,); weights (n,), 0 where another example replaces a damaged one.

    Raises:
      Exception: whatever the source raises for an example that it cannot read.
    """
    positions, indices, weights = self.sampler.indices(batch_index)
    readable = self.registry.replacements(indices)
    images, labels = self.source.read(readable)
    return positions, images, labels, weights * (readable == indices)

  def batches(self, prepare: Prepare, cut: Cut) -> Iterator[Batch]:
    """The batches, decoded in parts by the threads of the pool, some batches ahead.

    Args:
      prepare: makes of an image one whose size is known; it may raise anything.
      cut: writes a view of it; it may raise anything.
    """
    side = self.sampler.config.data.image_size

    def view(prepared, positions, outs):
      sizes = np.array([image.shape[:2] for image in prepared])
      views = self.sampler.views(positions, sizes)
      for image, box, flip, out in zip(prepared, views.boxes, views.flips.tolist(), outs):
        cut(image, box, flip, out)

    def decode_row(image, position):
      out = np.empty((1, side, side, 3), np.uint8)
      view([prepare(image)], np.array([position]), out)
      return out[0]

    def submit(batch_index):
      positions, indices, weights = self.sampler.indices(batch_index)
      readable = self.registry.replacements(indices)
      images = np.empty((len(indices), side, side, 3), np.uint8)
      labels = np.empty(len(indices), np.int32)

      def decode_part(part):
        read, labels[part] = self.source.read(readable[part])
        view([prepare(image) for image in read], positions[part], images[part])

      rows = max(-(-len(indices) // (self.threads * _PARTS_PER_THREAD)), _FEWEST_ROWS)
      parts = [slice(i, i + rows) for i in range(0, len(indices), rows)]
      tasks = [self.pool.submit(decode_part, part) for part in parts]
      return batch_index, tasks, (images, labels, weights * (readable == indices))

    def finished(batch_index, tasks, batch):
      errors = [task.exception() for task in tasks]  # waits for all
      return self.decode_rows(batch_index, decode_row) if any(errors) else batch

    # A ticket may wait until an earlier one's batch was used.
    ahead = 0 if self.sampler.tickets else _BATCHES_AHEAD
    pending: collections.deque = collections.deque()
    for batch_index in self.batch_indices():
      pending.append(submit(batch_index))
      if len(pending) > ahead:
        yield finished(*pending.popleft())
    while pending:
      yield finished(*pending.popleft())

  def decode_rows(self, batch_index: int, decode: Decode) -> Batch:
    """Reads and decodes a batch row by row, in the threads of the pool.

    A damaged example's row shows the next whole example, with weight 0, and is
    remembered. Rows that an outage keeps from being read are black and have
    weight 0.

    Args:
      batch_index: place of the batch in the stream.
      decode: makes a row's pixels; it may raise anything.
    """
    side = self.sampler.config.data.image_size
    # The first row that meets a disk or a network with a fault sets it for all.
    deadline = functools.cache(lambda: time.monotonic() + _MAX_OUTAGE)

    def row(position, index, weight):
      for candidate in self.registry.candidates(index):
        try:
          image, label = self._read_one(candidate, deadline)
          image = decode(image, position)
        except Exception as e:  # whatever a reader or a decoder raises
          if corruption.is_transient(e):
            self.registry.log_transient(candidate, e)
            break
          self.registry.mark_damaged(candidate, e)
        else:
          return image, label, weight if candidate == index else 0.0
      return np.zeros((side, side, 3), np.uint8), 0, 0.0

    images, labels, weights = zip(*self.pool.map(row, *self.sampler.indices(batch_index)))
    return (np.stack(images), np.array(labels, np.int32), np.array(weights, np.float32))

  def _read_one(self, index, deadline):
    while True:
      try:
        (image,), (label,) = self.source.read(np.array([index]))
        return image, label
      except Exception as e:
        if not corruption.is_transient(e) or time.monotonic() > deadline():
          raise
        time.sleep(_RETRY_PAUSE)
