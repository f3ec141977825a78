"""Copies of a state in memory: whole, torn, divided over devices and processes."""

import json
import os
import threading
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.checkpoint import host_mirror, memory_slot
from anp_jax.cluster import generation
from anp_jax.parallel import mesh as mesh_lib
from tests import builders

P = mesh_lib.P


class _Processes:
  """One of several processes, whose words the test knows."""

  index = 0

  def __init__(self, count=1, descriptors=(), values=(), hosts=('',)):
    self.count, self.hosts = count, hosts
    self.generation = generation.FIRST._replace(descriptors=dict(descriptors))
    self.values = list(values)

  def gather(self, value):
    return [json.loads(json.dumps(value)), *self.values]


@pytest.fixture(autouse=True)
def descriptors(monkeypatch):
  """What the next program would inherit, by name."""
  files = {}
  monkeypatch.setattr(generation, '_descriptors', files)
  yield files
  for descriptor in files.values():
    os.close(descriptor)


def _mesh(devices):
  devices = np.array(jax.devices()[:devices]).reshape(1, devices, 1)
  return jax.sharding.Mesh(devices, ('group', 'data', 'model'))


def _state(devices, divided=False):
  """A state and its shapes over some devices: two weights and a step."""
  mesh = _mesh(devices)
  rng = np.random.default_rng(0)
  arrays = {
    'kernel': (rng.normal(size=(16, 3)).astype(np.float32), P('data') if divided else P()),
    'half': (np.asarray(rng.normal(size=(5,)), jnp.bfloat16), P()),
    'step': (np.int32(7), P()),
  }
  state = {
    name: jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))
    for name, (value, spec) in arrays.items()
  }
  return state, builders.abstract(state), {name: value for name, (value, _) in arrays.items()}


def _kept(devices=1, divided=False, steps=(7,)):
  state, abstract, values = _state(devices, divided)
  mirror = host_mirror.HostMirror(abstract, _Processes(), every=1)
  for step in steps:
    mirror.keep(step, state)
    mirror.wait()
  return mirror, abstract, values


def _steps(mirror):
  """The steps of a mirror's copies, the newest first."""
  return sorted((slot.step for slot in mirror._slots if slot.step >= 0), reverse=True)


def _assert_equal(state, values):
  for name, value in values.items():
    np.testing.assert_array_equal(np.asarray(state[name]), value, name)


@pytest.mark.parametrize('divided', [False, True])
@pytest.mark.parametrize('devices', [1, 2, 4, 8])
def test_a_state_is_restored_by_the_next_program(descriptors, devices, divided):
  _, abstract, values = _kept(devices, divided)
  again = host_mirror.HostMirror(abstract, _Processes(descriptors=descriptors), every=1)
  assert _steps(again) == [7]
  state, step = again.restore(lambda step: True)
  assert step == 7
  _assert_equal(state, values)
  assert state['kernel'].sharding == abstract['kernel'].sharding


def test_on_other_devices(descriptors):
  _kept(4, divided=True)
  _, abstract, values = _state(2, divided=True)
  again = host_mirror.HostMirror(abstract, _Processes(descriptors=descriptors), every=1)
  _assert_equal(again.restore(lambda step: True)[0], values)


def test_a_copy_is_whole_where_the_system_writes_parts(descriptors, monkeypatch):
  write = os.pwrite
  monkeypatch.setattr(os, 'pwrite', lambda file, data, start: write(file, data[:100], start))
  _, abstract, values = _kept()
  again = host_mirror.HostMirror(abstract, _Processes(descriptors=descriptors), every=1)
  _assert_equal(again.restore(lambda step: True)[0], values)


def test_a_copy_is_written_when_the_numbers_of_its_step_are_recorded():
  """The loop records those of a step after it has begun the next one."""
  state, abstract, _ = _state(1)
  mirror = host_mirror.HostMirror(abstract, _Processes(count=2), every=2)
  newest = []
  for step in range(1, 7):
    mirror.keep_if_due(step, lambda: state)
    if mirror._thread is not None:
      mirror._thread.join()
    newest.append(_steps(mirror))
  assert newest == [[], [], [2], [2], [4], [4]]


@pytest.mark.parametrize('divided, steps', [(False, [9]), (True, [9, 8])])
def test_the_newest_is_kept_and_of_a_divided_state_the_one_before(divided, steps):
  mirror, *_ = _kept(2, divided, steps=(7, 8, 9))
  assert _steps(mirror) == steps


def test_memory_holds_one_state(descriptors):
  _, abstract, _ = _kept(2, steps=(7, 8, 9))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
  stored = sum(os.fstat(descriptor).st_size for descriptor in descriptors.values())
  # Besides it, a table of some hundred bytes.
  assert size < stored < size + 1000


@pytest.mark.parametrize('divided, count, states', [(False, 64, 1), (True, 128, 2)])
def test_memory_never_holds_more(descriptors, monkeypatch, divided, count, states):
  """Each block of a device is gone once it is written, and with it its copy on the host."""
  mesh = _mesh(2)
  sharding = jax.sharding.NamedSharding(mesh, P('data') if divided else P())
  state = jax.device_put([np.full(2**14, i, np.float32) for i in range(64)], sharding)
  abstract = builders.abstract(state)
  mirror = host_mirror.HostMirror(abstract, _Processes(), every=1)
  pieces, make_pieces, crc32 = [], mirror._pieces, memory_slot.zlib.crc32
  stored, waiting = [], []

  def keep_pieces(*copies):
    pieces[:] = make_pieces(*copies)
    return pieces

  def look(data):
    stored.append(sum(512 * os.fstat(d).st_blocks for d in descriptors.values()))
    waiting.append(sum(not piece.data.is_deleted() for piece in pieces))
    return crc32(data)

  monkeypatch.setattr(mirror, '_pieces', keep_pieces)
  monkeypatch.setattr(memory_slot.zlib, 'crc32', look)
  for step in (7, 8, 9):
    mirror.keep(step, state)
    mirror.wait()
  assert waiting == 3 * [*range(count, 0, -1)]
  size = 64 * 2**14 * 4
  assert states * size <= max(stored) <= 1.1 * states * size
  again = host_mirror.HostMirror(abstract, _Processes(descriptors=descriptors), every=1)
  tracemalloc.start()
  assert again.restore(lambda step: True)[1] == 9
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert size <= peak <= 1.1 * size  # without what is stored


@pytest.mark.parametrize(
  'divided, need',
  [
    # A whole state in the host's memory, and one that each of two devices of a CPU copies; of
    # a state whose kernel is divided two, and half of the kernel of another for each device.
    (False, 3 * (16 * 3 * 4 + 5 * 2 + 4)),
    (True, 4 * (5 * 2 + 4) + 4 * 16 * 3 * 4),
  ],
)
@pytest.mark.parametrize('room, is_kept', [(0, True), (-1, False)])
def test_too_little_memory_of_a_host_is_known_at_the_first_step(
  monkeypatch, capsys, divided, need, room, is_kept
):
  """Two processes are on this one's host, and one with less memory on another."""
  state, abstract, _ = _state(2, divided)
  other_processes = [[True, 'node1', 10**9, 10**12], [True, 'node2', 5, 5]]
  monkeypatch.setattr(host_mirror.host_memory, 'available', lambda: 10**9 + need + room)
  processes = _Processes(3, values=other_processes, hosts=('node1', 'node1', 'node2'))
  host_mirror.HostMirror(abstract, processes, 1000).keep_if_due(1, lambda: state)
  want = (
    ''
    if is_kept
    else (
      'the state is not copied to memory: 1,000 MB are needed on node1, and 1,000 MB are left; '
      'a checkpoint replaces it\n'
    )
  )
  assert capsys.readouterr().out == want


def test_a_restart_waits_until_a_copy_is_whole(descriptors, monkeypatch):
  """It is not made again after that, and the next program reads it."""
  state, abstract, values = _state(2)
  mirror = host_mirror.HostMirror(abstract, _Processes(), every=1)
  is_writing, goes_on, crc32 = threading.Event(), threading.Event(), memory_slot.zlib.crc32
  mirror.keep(7, state)
  mirror.wait()

  def crawl(data):
    is_writing.set()
    assert goes_on.wait(60)
    return crc32(data)

  monkeypatch.setattr(memory_slot.zlib, 'crc32', crawl)
  steps = []

  def execute(*_):
    again = host_mirror.HostMirror(abstract, _Processes(descriptors=descriptors), every=1)
    steps.extend(_steps(again))

  monkeypatch.setattr(generation.os, 'execve', execute)
  monkeypatch.setattr(generation.signal, 'pthread_sigmask', lambda *_: None)
  mirror.keep(8, state)
  mirror._write_pending()
  assert is_writing.wait(60)
  restart = threading.Thread(target=generation.restart, args=[generation.FIRST])
  restart.start()
  restart.join(0.3)
  assert restart.is_alive() and not steps
  goes_on.set()
  restart.join(60)
  assert steps == [8]
  monkeypatch.setattr(generation, 'WRITTEN_WITHIN', 0.1)
  goes_on.clear()
  is_writing.clear()
  mirror.keep(9, state)  # one that hangs holds no restart up, which has the one before
  mirror._write_pending()
  assert is_writing.wait(60)
  generation.restart(generation.FIRST)
  goes_on.set()
  assert mirror.wait() == 9 and steps == [8, 8]


def test_a_copy_that_takes_long_leaves_the_one_before(monkeypatch):
  """A restart does not wait for its end."""
  monkeypatch.setattr(generation, 'WRITTEN_WITHIN', 0.0)
  mirror, *_ = _kept(2, steps=(7, 8, 9))
  assert _steps(mirror) == [9, 8]


def test_a_copy_that_fails_holds_no_restart_up(monkeypatch, capsys):
  state, abstract, _ = _state(2)
  mirror = host_mirror.HostMirror(abstract, _Processes(), every=1)

  def fail(*_):
    raise jax.errors.JaxRuntimeError('INTERNAL: the device is lost')

  monkeypatch.setattr(memory_slot.zlib, 'crc32', fail)  # between the header and the table
  mirror.keep(7, state)
  assert mirror.wait() == -1
  assert 'the device is lost' in capsys.readouterr().out
  assert generation.writing.acquire(timeout=60)
  generation.writing.release()


def test_without_memory_nothing_is_copied(monkeypatch, capsys):
  monkeypatch.setattr(memory_slot.host_memory, 'available', lambda: 1)
  mirror, *_ = _kept(2, steps=(7, 8))
  assert _steps(mirror) == []
  text = capsys.readouterr().out
  assert text.count('the state is not copied to memory: ') == 1
  assert text.endswith(' MB are needed, and 0 MB are left; a checkpoint replaces it\n')


def test_a_process_without_memory_copies_with_the_others(monkeypatch, capsys):
  """A divided state is shifted between processes: a collective of all of them."""
  monkeypatch.setattr(memory_slot.host_memory, 'available', lambda: 1)
  state, abstract, _ = _state(2, divided=True)
  mirror = host_mirror.HostMirror(abstract, _Processes(), every=1)
  copies, copy = [], mirror._copy
  mirror._copy = lambda leaves: copies.append(copy(leaves)) or copies[-1]
  for step in (7, 8):
    mirror.keep(step, state)
    mirror.wait()
  assert len(copies) == 2 and _steps(mirror) == []
  assert capsys.readouterr().out.count('the state is not copied to memory: ') == 1


@pytest.mark.parametrize('divided', [False, True])
@pytest.mark.parametrize('room, is_kept', [(0, True), (-1, False)])
def test_devices_without_room_beside_the_step_copy_nothing(
  monkeypatch, capsys, divided, room, is_kept
):
  state, abstract, _ = _state(2, divided)
  # Of two devices: a kernel of 16 x 3 float32 each, or a half of it and that of the next
  # process, then 5 bfloat16 and a step.
  need = 16 * 3 * 4 + 5 * 2 + 4
  numbers = {'bytes_limit': 10_000, 'peak_bytes_in_use': 10_000 - need - room}
  monkeypatch.setattr(host_mirror.memory_lib, 'of_device', lambda _, field: numbers[field])
  mirror = host_mirror.HostMirror(abstract, _Processes(count=2), every=1)
  for step in (1, 2):
    mirror.keep_if_due(step, lambda: state)
  assert mirror.wait() == (2 if is_kept else -1)
  assert ('a device has no room for it' in capsys.readouterr().out) == (not is_kept)


@pytest.mark.parametrize('hosts', ['a a a a', 'a b b a', 'a a b c', 'a a a b', 'a b a b a b b a'])
def test_all_parts_survive_the_loss_of_a_host(hosts):
  """Or that of one process, where there is one host, or one has more than half of them."""
  hosts = hosts.split()
  count = len(hosts)
  state, abstract, values = _state(count, divided=True)
  mirror = host_mirror.HostMirror(abstract, _Processes(count, hosts=hosts), every=1)
  (copies,) = mirror._copy(jax.tree.leaves(state))[1]
  indices = copies.sharding.devices_indices_map(copies.shape)
  parts = []  # by position in the mesh, its own and the one that it copies
  for position, shard in enumerate(copies.addressable_shards):
    index = indices[mirror._next(shard.device)]
    np.testing.assert_array_equal(shard.data, values['kernel'][index])
    parts.append({position, index[0].start * count // 16})
  places = sorted(hosts, key=hosts.index)  # `mesh.create` has those of a host side by side
  if max(map(places.count, places)) > count / 2:
    places = range(count)
  for lost in set(places):
    left = [two for two, place in zip(parts, places, strict=True) if place != lost]
    assert set().union(*left) == {*range(count)}


@pytest.mark.parametrize('where', [0, 20])
def test_a_torn_or_changed_copy_is_none(descriptors, where):
  """In the header, which a write clears first, or in a value."""
  _, abstract, _ = _kept()
  (descriptor,) = (d for d in descriptors.values() if os.fstat(d).st_size)
  os.pwrite(descriptor, bytes(16), where)
  again = host_mirror.HostMirror(abstract, _Processes(descriptors=descriptors), every=1)
  assert again.restore(lambda step: True) is None


def test_a_step_from_which_the_run_cannot_go_on_is_passed_over(descriptors):
  mirror, *_ = _kept(2, divided=True, steps=(7, 8))
  assert mirror.restore(lambda step: step < 8)[1] == 7


def test_without_a_part_there_is_no_state():
  state, abstract, _ = _state(2, divided=True)
  half = [[[0, [[0, 8], [0, 3]]], [1, [[0, 5]]]]]
  mirror = host_mirror.HostMirror(abstract, _Processes(2, values=[[[[7, 0], half[0]]]]), every=1)
  assert mirror.restore(lambda step: True) is None


def test_a_copy_costs_a_hundredth_of_the_time(monkeypatch):
  """Its period is that of the slowest process, whatever it is here."""
  state, abstract, _ = _state(1)
  processes = _Processes(2, values=[[True, 'node2', 0, 1e9]])
  mirror = host_mirror.HostMirror(abstract, processes, every=0)
  for step in range(1, 10):
    mirror.keep_if_due(step, lambda: state)
    processes.values = [999999.5]
  assert mirror._every == 10**6
  assert _steps(mirror) == [5]
  mirror.keep_if_due(10**6 - 1, lambda: state)
  mirror.keep_if_due(10**6, lambda: state)
  mirror.wait()
  assert _steps(mirror) == [10**6]
