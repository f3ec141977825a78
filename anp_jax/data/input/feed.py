"""From host batches to device arrays, ahead of the step that needs them."""

import atexit
from collections.abc import Callable
from collections.abc import Iterator
import itertools
import queue
import threading
import time
import weakref

import jax
import numpy as np

from anp_jax.data import index_shuffle

_open = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
  """At exit, a thread inside native code would take the process down."""
  for feed in list(_open):
    feed.close()


class Feed:
  """An iterator of device batches, filled by a thread of its own.

  Attributes:
    waited: seconds the reader has spent waiting, in all.
  """

  def __init__(
    self, batches: Iterator[dict], depth: int,
    clock: Callable[[], float] = time.monotonic,
  ):  # fmt: skip
    """Starts to read ahead.

    Args:
      batches: of device arrays; may block, may raise.
      depth: batches that may wait on the device.
      clock: returns seconds that never run backwards.
    """
    self._clock = clock
    self.waited = 0.0
    self._queue = queue.Queue(depth)
    self._end = None  # what every further read raises
    self._stopped = threading.Event()
    self._thread = threading.Thread(
      target=self._fill, args=(batches,), name='feed', daemon=True
    )
    _open.add(self)
    self._thread.start()

  def __iter__(self):
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
  """This process's rows of a global batch.

  Args:
    sharding: of an array whose first axis is the batch.
    batch_size: images of the global batch.

  Returns:
    (n,) int64, ascending, each once however many devices hold it.
  """
  pieces = sharding.addressable_devices_indices_map((batch_size,)).values()
  every = np.arange(batch_size)
  return np.unique(np.concatenate([every[piece] for piece in pieces]))


def place(batch: dict, sharding, rows: np.ndarray, batch_size: int) -> dict:
  """Host arrays of a process's rows as one global array each.

  Args:
    batch: name to (n, ...) NumPy array.
    sharding: of the first axis over the mesh.
    rows: (n,) rows of the global batch that `batch` holds.
    batch_size: images of the global batch.

  Returns:
    name to (batch_size, ...) jax.Array.
  """
  where = sharding.addressable_devices_indices_map((batch_size,))
  starts = {
    device: np.searchsorted(rows, range(batch_size)[piece[0]].start)
    for device, piece in where.items()
  }
  share = sharding.shard_shape((batch_size,))[0]

  def one(array):
    parts = [
      jax.device_put(array[start : start + share], device)
      for device, start in starts.items()
    ]
    shape = (batch_size, *array.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)

  return {name: one(array) for name, array in batch.items()}


def on_device(
  batches: Iterator[dict],
  sharding,
  rows: np.ndarray,
  batch_size: int,
  vote: Callable[[], int] = int,
) -> Iterator[dict]:
  """Host batches as device batches, each with this process's vote.

  Args:
    batches: host batches of `pipeline.batches`.
    sharding: of the first axis over the mesh.
    rows: (n,) rows of the global batch that they hold.
    batch_size: images of the global batch.
    vote: read once a batch; the step reduces it over all processes.

  Yields:
    The same arrays on the device, and vote (batch_size,) int32.
  """
  for batch in batches:
    votes = np.full(len(rows), vote(), np.int32)
    yield place(dict(batch, vote=votes), sharding, rows, batch_size)


def synthetic(
  config, classes: int, sharding, batch_size: int, start: int,
  steps: int | None, size: int, vote: Callable[[], int] = int,
  where: Callable | None = None,
) -> Iterator[dict]:  # fmt: skip
  """Random batches made on the device, a pure function of the seed.

  Of training, also of the step and the row. Of evaluation, of the position in
  the split: its examples are the same in batches of any size.

  Args:
    config: the run's config.
    classes: labels are below it.
    sharding: of the first axis over the mesh.
    batch_size: images of the global batch.
    start: first step.
    steps: number of batches; None: endless.
    size: examples of the split; rows past it have weight 0 where steps is set.
    vote: as in `on_device`.
    where: count of a batch -> (its step, its rows of the global batch), of
      which `batch_size` is a part then.

  Yields:
    Batches like those of `on_device`.
  """
  side = config.data.image_size
  rows = local_rows(sharding, batch_size)

  @jax.jit
  def make(word, rows):
    keys = jax.vmap(lambda row: jax.random.fold_in(word, row))(rows)

    def one(key):
      image, label = jax.random.split(key)
      return (
        jax.random.bits(image, (side, side, 3), np.uint8),
        jax.random.randint(label, (), 0, classes),
      )

    return jax.vmap(one)(keys)

  def joined(parts):
    shape = (batch_size, *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)

  for count in itertools.count(start):
    if count == steps:
      return
    step, shown = where(count) if where else (count, rows)
    is_training = steps is None
    drawn = shown if is_training else step * batch_size + rows
    seeds = np.array([config.seed, step * is_training, is_training], np.uint64)
    word = index_shuffle.mix(
      index_shuffle.mix(index_shuffle.mix(seeds[:1]) + seeds[1]) + seeds[2]
    )
    weight = np.ones(len(rows), np.float32)
    if not is_training:
      weight = (drawn < size).astype(np.float32)
    host = {
      'weight': weight,
      'row': shown.astype(np.int32),
      'drawn': drawn.astype(np.int32),
      'vote': np.full(len(rows), vote(), np.int32),
    }
    batch = place(host, sharding, rows, batch_size)
    # Device by device: a program over all processes, started by this thread,
    # would meet those of the main thread in another order on each of them.
    parts = [
      make(jax.device_put(word.view(np.uint32), part.device), part.data)
      for part in batch.pop('drawn').addressable_shards
    ]
    images, labels = zip(*parts)
    yield batch | {'image': joined(images), 'label': joined(labels)}
