"""Tests of feed: from host batches to the devices of a mesh."""

import threading
import time

import jax
import numpy as np
import pytest

from anp_jax.data.input import feed
from tests import builders, launching

# (devices on the data axis, devices on the model axis)
_MESHES = [(1, 1), (8, 1), (4, 2)]


class _Part:
  """The sharding as a process that holds some of the devices sees it."""

  def __init__(self, sharding, devices):
    self._sharding = sharding
    self._devices = devices

  def addressable_devices_indices_map(self, shape):
    every = self._sharding.devices_indices_map(shape)
    return {d: every[d] for d in self._devices}


def test_each_process_holds_its_own_rows(config):
  sharding = builders.batch_sharding(config, 4, 2)
  grid = sharding.mesh.devices[0]  # (4, 2)

  def rows(devices, counts=(6,) * 4):
    return feed.Placement(_Part(sharding, list(devices)), counts).local_rows().tolist()

  assert rows(grid[1]) == list(range(6, 12))
  assert rows(grid[2:].flat) == list(range(12, 24))
  # Both devices of a row of the mesh hold the same rows of the batch.
  assert rows(grid[:, 0]) == rows(grid[:, 1]) == list(range(24))
  assert rows(grid[[3, 0], 1]) == [*range(6), *range(18, 24)]
  assert rows(grid[1:3, 0], (12, 4, 2, 6)) == list(range(12, 18))


@pytest.mark.parametrize('data, model', _MESHES)
def test_each_value_lands_where_numpy_says(config, data, model):
  sharding = builders.batch_sharding(config, data, model)
  host = {
    'image': np.arange(16 * 12, dtype=np.uint8).reshape(16, 2, 2, 3),
    'label': np.arange(16, dtype=np.int32) * 7,
  }
  batch = feed.Placement.create(sharding, 16).put(host, np.arange(16))
  assert batch.keys() == host.keys()
  for name, array in batch.items():
    assert array.shape == host[name].shape
    assert array.dtype == host[name].dtype
    assert array.sharding == sharding
    np.testing.assert_array_equal(np.asarray(array), host[name])
    share = 16 // data
    for row in range(data):
      for device in sharding.mesh.devices[0, row]:
        (shard,) = [s for s in array.addressable_shards if s.device == device]
        np.testing.assert_array_equal(shard.data, host[name][row * share : (row + 1) * share])


def test_rows_with_a_gap(config, monkeypatch):
  """A process whose devices lie apart on the mesh has rows that lie apart."""
  sharding = builders.batch_sharding(config, 4)
  part = _Part(sharding, [sharding.mesh.devices[0, i, 0] for i in (1, 3)])
  placement = feed.Placement(part, (4,) * 4)
  rows = placement.local_rows()
  assert rows.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
  monkeypatch.setattr(
    jax,
    'make_array_from_callback',
    lambda shape, _, shard: [
      shard(index).tolist() for index in part.addressable_devices_indices_map(shape).values()
    ],
  )
  placed = placement.put({'label': rows * 10}, rows)
  assert placed == {'label': [[40, 50, 60, 70], [120, 130, 140, 150]]}


def test_a_device_with_fewer_rows_has_rows_that_count_as_undamaged(config):
  sharding = builders.batch_sharding(config, 2)
  host = {'label': np.arange(1, 9), 'weight': np.zeros(8, np.float32)}
  batch = feed.Placement.create(sharding, 8, (5, 3)).put(host, np.arange(8))
  assert np.asarray(batch['label']).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
  assert np.asarray(batch['weight']).tolist() == [0] * 8 + [1] * 2


def test_vote_is_read_for_every_batch(config):
  sharding = builders.batch_sharding(config, 2)
  votes = iter([0, 3, 1])
  host = [{'label': np.full(8, i)} for i in range(3)]
  placement = feed.Placement.create(sharding, 8)
  got = [*feed.on_device(iter(host), np.arange(8), placement, lambda: next(votes))]
  for i, vote in enumerate([0, 3, 1]):
    assert got[i]['vote'].dtype == np.int32
    assert got[i]['vote'].sharding == sharding
    assert np.asarray(got[i]['vote']).tolist() == [vote] * 8
    assert np.asarray(got[i]['label']).tolist() == [i] * 8
  assert 'vote' not in host[0]


def test_batches_arrive_in_order_then_end():
  stream = feed.Feed(iter([{'i': i} for i in range(20)]), 3)
  assert [b['i'] for b in stream] == list(range(20))
  for _ in range(2):  # and keeps to its end
    with pytest.raises(StopIteration):
      next(stream)


def test_error_of_the_thread_reaches_the_reader():
  def broken():
    yield {'i': 0}
    raise OSError('disk is gone')

  stream = feed.Feed(broken(), 2)
  assert next(stream) == {'i': 0}
  for _ in range(2):
    with pytest.raises(OSError, match='disk is gone'):
      next(stream)


def test_reads_ahead_by_depth_and_no_more():
  numbers = []

  def count():
    for i in range(100):
      numbers.append(i)
      yield {'i': i}

  stream = feed.Feed(count(), 3)
  launching.wait_until(lambda: len(numbers) >= 4, 10)
  time.sleep(0.2)
  assert len(numbers) == 4  # three wait, one is in hand
  stream.close()


def test_close_ends_the_thread_while_it_is_full():
  ended = threading.Event()

  def endless():
    try:
      while True:
        yield {'i': 0}
    finally:
      ended.set()

  before = set(threading.enumerate())
  stream = feed.Feed(endless(), 2)
  (thread,) = set(threading.enumerate()) - before
  next(stream)
  time.sleep(0.05)  # it is full again
  start = time.monotonic()
  stream.close()
  assert time.monotonic() - start < 5
  assert not thread.is_alive()
  assert ended.wait(5)  # the source was let go
  with pytest.raises(StopIteration):  # not a wait for ever
    next(stream)
  stream.close()  # twice does no harm


class _Clock(builders.Clock):
  """Stands still but for what a test adds; counts how often it is read."""

  reads = 0

  def __call__(self):
    self.reads += 1
    return self.now


def test_waited_is_the_time_that_the_reader_waits():
  clock, seconds = _Clock(), (0.5, 0.0, 2.0, 0.25)

  def slow():
    for i, cost in enumerate(seconds):
      # Until the reader waits for batch i: it reads the clock before and after.
      launching.wait_until(lambda i=i: clock.reads > 2 * i, 10, pause=0.001)
      clock.now += cost
      yield {'i': i}

  stream = feed.Feed(slow(), 2, clock)
  clock.now += 100  # before anybody reads
  for i, cost in enumerate(seconds):
    before = stream.wait_seconds
    assert next(stream) == {'i': i}
    assert stream.wait_seconds - before == cost
    clock.now += 8  # the reader is at work
  with pytest.raises(StopIteration):
    next(stream)
  assert stream.wait_seconds == sum(seconds)
