"""From host batches to device arrays, ahead of the step that needs them."""

import atexit
from collections.abc import Callable, Iterator
import queue
import threading
import time
import weakref

import jax
import numpy as np

from anp_jax.data.input import batch_plan

_open_feeds: weakref.WeakSet['Feed'] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  """Closes all feeds: a thread in native code would take down the exit."""
  for feed in list(_open_feeds):
    feed.close()


class Feed:
  """An iterator of device batches, which a thread fills.

  Attributes:
    waited: total seconds that readers have waited.
  """

  def __init__(
    self, batches: Iterator[dict], depth: int, clock: Callable[[], float] = time.monotonic
  ):
    """Starts to read ahead.

    Args:
      batches: device batches; may block, may raise.
      depth: number of batches that may wait on the device.
      clock: monotonic time in seconds.
    """
    self._clock = clock
    self.waited = 0.0
    self._queue: queue.Queue = queue.Queue(depth)
    self._end: BaseException | None = None  # every further read raises it
    self._stopped = threading.Event()
    self._thread = threading.Thread(target=self._fill, args=(batches,), name='feed', daemon=True)
    _open_feeds.add(self)
    self._thread.start()

  def __iter__(self) -> 'Feed':
    return self

  def __next__(self) -> dict:
    """The next batch; raises what the reading thread raised."""
    if self._end is None:
      start = self._clock()
      item = self._queue.get()
      self.waited += self._clock() - start
      if not isinstance(item, BaseException):
        return item
      self._end = item
    raise self._end

  def close(self) -> None:
    """Stops the thread; batches not yet taken are dropped."""
    self._stopped.set()
    self._end = self._end or StopIteration()
    while self._thread.is_alive():
      try:
        self._queue.get_nowait()
      except queue.Empty:
        self._thread.join(0.01)

  def _fill(self, batches):
    try:
      for batch in batches:
        self._put(batch)
        if self._stopped.is_set():
          return
      self._put(StopIteration())
    except BaseException as e:  # noqa: BLE001 - handed to the reader
      self._put(e)

  def _put(self, item):
    while not self._stopped.is_set():
      try:
        return self._queue.put(item, timeout=0.1)
      except queue.Full:
        pass


def local_rows(sharding: jax.sharding.Sharding, batch_size: int) -> np.ndarray:
  """The rows of a global batch that this process holds.

  Args:
    sharding: sharding of an array whose first axis is the batch.
    batch_size: number of images in the global batch.

  Returns:
    (n,) int64, ascending, each once however many devices hold it.
  """
  pieces = sharding.addressable_devices_indices_map((batch_size,)).values()
  every = np.arange(batch_size)
  return np.unique(np.concatenate([every[piece] for piece in pieces]))


def place(batch: dict, sharding: jax.sharding.Sharding, rows: np.ndarray, batch_size: int) -> dict:
  """Host arrays of a process's rows as one global array each.

  Args:
    batch: name to (n, ...) NumPy array.
    sharding: sharding of arrays whose first axis is the batch.
    rows: (n,) rows of the global batch that `batch` holds.
    batch_size: number of images in the global batch.

  Returns:
    name to (batch_size, ...) jax.Array.
  """
  length = sharding.shard_shape((batch_size,))[0]

  def global_array(array):
    def shard(index):
      start = np.searchsorted(rows, index[0].indices(batch_size)[0])
      return array[start : start + length]

    return jax.make_array_from_callback((batch_size, *array.shape[1:]), sharding, shard)

  return {name: global_array(array) for name, array in batch.items()}


def on_device(
  batches: Iterator[dict],
  plan: batch_plan.BatchPlan,
  sharding: jax.sharding.Sharding,
  vote: Callable[[], int] = int,
) -> Iterator[dict]:
  """Host batches as device batches, each with this process's vote.

  Args:
    batches: host batches of `pipeline.batches`.
    plan: rows of the global batch that they hold.
    sharding: sharding of arrays whose first axis is the batch.
    vote: function that is called once per batch; the step reduces it over all processes.

  Yields:
    The same arrays on the device, and vote (batch_size,) int32.
  """
  for batch in batches:
    votes = np.full(len(plan.rows), vote(), np.int32)
    batch = dict(batch, vote=votes)
    yield place(batch, sharding, plan.rows, plan.device_batch_size)
