"""From host batches to device arrays, ahead of the step that needs them."""

import atexit
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import queue
import threading
import time
import weakref

import jax
import numpy as np

_open_feeds: weakref.WeakSet['Feed'] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  """Closes all feeds: a thread in native code would take down the exit."""
  for feed in list(_open_feeds):
    feed.close()


class Feed:
  """An iterator of device batches, which a thread fills.

  Attributes:
    wait_seconds: total seconds that readers have waited.
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
    self.wait_seconds = 0.0
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
      self.wait_seconds += self._clock() - start
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


@dataclasses.dataclass(frozen=True)
class Placement:
  """The rows of a batch on the devices that divide it.

  Attributes:
    sharding: sharding of arrays whose first axis is the batch.
    row_counts: rows of each part of the batch.
  """

  sharding: jax.sharding.Sharding
  row_counts: Sequence[int]

  @classmethod
  def create(
    cls, sharding: jax.sharding.Sharding, batch_size: int, row_counts: Sequence[int] = ()
  ) -> 'Placement':
    """Places a batch of a size; without `row_counts` in equal parts."""
    count = parts(sharding)
    return cls(sharding, row_counts or (batch_size // count,) * count)

  @functools.cached_property
  def _begins(self):
    return np.cumsum([0, *self.row_counts])

  @property
  def most(self) -> int:
    """The rows of each device's array: the most that a part has."""
    return max(self.row_counts)

  @property
  def size(self) -> int:
    """The rows of an array on all devices."""
    return self.most * len(self.row_counts)

  def local_rows(self) -> np.ndarray:
    """The rows of the batch that this process holds.

    Returns:
      (n,) int64, ascending, each once however many devices hold it.
    """
    indices = self.sharding.addressable_devices_indices_map((self.size,)).values()
    parts = sorted({self._part(index) for index in indices})
    return np.concatenate([np.arange(*self._begins[i : i + 2]) for i in parts])

  def put(self, batch: dict, rows: np.ndarray) -> dict:
    """Host arrays of a process's rows as one global array each.

    Args:
      batch: name to (n, ...) NumPy array.
      rows: (n,) rows of the batch that it holds.

    Returns:
      name to (size, ...) jax.Array. A part with fewer rows than another ends with zeros,
      and with the weight 1, so that nothing there counts as damaged.
    """

    def global_array(name, array):
      def shard(index):
        part = self._part(index)
        start = np.searchsorted(rows, self._begins[part])
        own_rows = array[start : start + self.row_counts[part]]
        missing = self.most - len(own_rows)
        if not missing:
          return own_rows
        padding = np.full((missing, *array.shape[1:]), name == 'weight', array.dtype)
        return np.concatenate([own_rows, padding])

      return jax.make_array_from_callback((self.size, *array.shape[1:]), self.sharding, shard)

    return {name: global_array(name, array) for name, array in batch.items()}

  def _part(self, index):
    """The part of the batch at an index of the global array."""
    return index[0].indices(self.size)[0] // self.most


def parts(sharding: jax.sharding.Sharding) -> int:
  """The number of parts into which a sharding divides a batch."""
  return sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]


def on_device(
  batches: Iterator[dict], rows: np.ndarray, placement: Placement, vote: Callable[[], int] = int
) -> Iterator[dict]:
  """Host batches as device batches, each with this process's vote.

  Args:
    batches: host batches of `pipeline.batches`.
    rows: (n,) rows of the batch that they hold.
    placement: rows of each device.
    vote: function that is called once per batch; the step reduces it over all processes.

  Yields:
    The same arrays on the device, see `Placement.put`, and vote, int32.
  """
  for batch in batches:
    votes = np.full(len(rows), vote(), np.int32)
    yield placement.put(dict(batch, vote=votes), rows)
