"""Copies of a run's state in the hosts' memory, from which an elastic run goes on.

A process that restarts in place inherits its copies as open files without a name: they
end with the last process that holds them. All processes copy the same steps. A copy
overwrites the one before: a process that is lost meanwhile takes its copies along, and
a restart waits until all is written, as it is on the device already. Where that takes
seconds, the copy before is kept, too. Where the state is divided over the processes, each
one also copies the part of one on the next host, and keeps the copy before, as another
process may be lost before it has written.

If a step's numbers are lost with process 0, a run goes on from the copy before as long
as one process has not overwritten it yet, and else from the newest checkpoint.
"""

import collections
from collections.abc import Callable
import math
import threading
import time
from typing import Any

import jax
from jax import lax
import numpy as np

from anp_jax import cluster
from anp_jax.checkpoint import memory_slot
from anp_jax.cluster import generation
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import error_lines, host_memory, memory as memory_lib

_NAMES = 'mirror', 'mirror of the step before'
SHARE = 0.01  # of the time may go into copies
# Steps after the start that are copied; the second copy is timed, as the first finds no
# memory yet. And the step at which its time, and that of a step, are known.
_COPIED, _MEASURED = (1, 4), 8
_CHUNK = 2**22  # words that processes exchange at once
_NO_COPY = 'the state is not copied to memory: {}; a checkpoint replaces it'


class HostMirror:
  """The copies of this process, and what the other processes have of a state."""

  def __init__(self, abstract_state: Any, processes: cluster.Processes, every: int):
    """Opens what this process has inherited.

    Args:
      abstract_state: saved state as jax.ShapeDtypeStruct with shardings.
      processes: processes of the run.
      every: steps between two copies; 0: as often as costs a hundredth of the time.
    """
    self._leaves, self._tree = jax.tree.flatten(abstract_state)
    self._mesh = mesh_lib.mesh_of(abstract_state)
    self._processes, self._every = processes, every
    inherited = processes.generation.descriptors
    self._slots = [memory_slot.Slot(name, inherited.get(name)) for name in _NAMES]
    # Whether a mesh divides the array over axes of the batch.
    axes = [jax.tree.leaves(tuple(leaf.sharding.spec)) for leaf in self._leaves]
    self._is_divided = [not {*mesh_lib.BATCH}.isdisjoint(names) for names in axes]
    self._pending: tuple[int, Any] | None = None  # step and copies that are not written yet
    self._thread: threading.Thread | None = None
    self._first: tuple[int, float] | None = None  # first step, and when it was made
    self._seconds = 0.0  # that the last copy took
    self._copy: Callable | None = jax.jit(self._copies)  # None: there is no memory

  def restore(self, accept: Callable[[int], bool]) -> tuple[Any, int] | None:
    """Returns the newest state whose parts the processes have together.

    All processes call it.

    Args:
      accept: whether a run can go on from a step; process 0 is asked.

    Returns:
      State and step; None if there is no such state.
    """
    contents = {slot.version: slot.read() for slot in self._slots if slot.step >= 0}
    local = [
      [version, [[piece.leaf, piece.bounds] for piece in pieces]]
      for version, pieces in contents.items()
    ]
    holdings = [
      {
        tuple(version): {(leaf, memory_slot.pairs(b)) for leaf, b in blocks}
        for version, blocks in values
      }
      for values in self._processes.gather(local)
    ]
    versions = [v for v in set().union(*holdings) if self._is_whole(v, holdings)]
    is_asked, gather = self._processes.index == 0, self._processes.gather
    candidates = [v for v in sorted(versions, reverse=True) if gather(is_asked and accept(v[0]))[0]]
    if not candidates:
      return None
    version = candidates[0]
    arrays = self._assembled(contents.get(version, []), version, holdings)
    for slot in self._slots:
      if slot.version != version:
        slot.clear()
    pairs = zip(self._leaves, arrays, strict=True)
    placed = [jax.make_array_from_callback(x.shape, x.sharding, a.__getitem__) for x, a in pairs]
    return self._tree.unflatten(placed), version[0]

  def keep_if_due(self, step: int, state: Callable[[], Any]) -> None:
    """Begins to copy the state of a step, if it is due; it is called after each step.

    A copy is written after the next step has begun: only then the numbers of its own step
    are recorded, without which a run does not go on from it.

    Args:
      step: steps made.
      state: function that returns the saved form of the state, whose buffers may be
        donated afterwards.
    """
    if self._processes.count == 1:
      return
    self._write_pending()
    if self._first is None:
      self._first = step, time.monotonic()
      if problem := _shortage(self._processes.gather(self._resources())):
        self._copy = None
        print(_NO_COPY.format(problem), flush=True)
    if not self._every:
      self._measure(step, state)
    elif step % self._every == 0:
      self.keep(step, state())

  def keep(self, step: int, state: Any) -> None:
    """Begins to copy the state of a step; see `wait`."""
    self._write_pending()
    if self._copy is None:
      return
    try:
      copies = self._copy(jax.tree.leaves(state))
    except jax.errors.JaxRuntimeError as e:
      if any(self._is_divided):  # the other processes wait for this one
        raise
      self._give_up(e)
      return
    self._pending = step, copies

  def wait(self) -> int:
    """Returns the step of the last copy, once it is whole; -1 without one."""
    self._write_pending()
    if self._thread is not None:
      self._thread.join()
    return max((slot.step for slot in self._slots), default=-1)

  def _write_pending(self):
    if self._pending is None:
      return
    if self._thread is not None:
      self._thread.join()
    self._thread = threading.Thread(target=self._write, args=self._pending, name='mirror')
    self._pending = None
    self._thread.start()

  def _measure(self, step, state):
    """Chooses the period, the same in all processes, from first copies."""
    assert self._first is not None
    start, begin = self._first
    if step - start in _COPIED:
      self.keep(step, state())
    elif step == start + _MEASURED:
      self.wait()
      step_seconds = (time.monotonic() - begin) / _MEASURED
      periods = self._processes.gather(self._seconds / SHARE / step_seconds)
      self._every = max(1, math.ceil(max(periods)))

  def _write(self, step, copies):
    try:
      jax.block_until_ready(copies)  # the step itself costs nothing
    except jax.errors.JaxRuntimeError as e:
      self._give_up(e)
      return
    if not self._slots:
      return
    start = time.monotonic()
    slot, older = sorted(self._slots, key=lambda slot: slot.step, reverse=True)
    if any(self._is_divided) or self._seconds > generation.WRITTEN_WITHIN / 2:
      slot = older  # the other one stays
    else:
      older.clear()
    try:
      slot.write((step, self._processes.generation.number), self._pieces(*copies))
    except (OSError, jax.errors.JaxRuntimeError) as e:
      self._give_up(e)
    self._seconds = time.monotonic() - start

  def _give_up(self, error):
    """Keeps no further copy, where there is no memory: a loss then costs more steps."""
    if any(self._is_divided):  # the other processes copy with this one
      self._slots = []
    else:
      self._copy = None
    print(_NO_COPY.format(error_lines.first_line(error)), flush=True)

  def _resources(self):
    """Whether each device has room for a copy, and what the host needs and has left."""
    sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in self._leaves]
    devices = self._mesh.local_devices
    # A device must hold the most that steps have taken so far, too.
    need = sum(size << divided for size, divided in zip(sizes, self._is_divided, strict=True))
    has_room = all(
      need <= limit - memory_lib.of_device(device, 'peak_bytes_in_use')
      for device in devices
      if (limit := memory_lib.of_device(device, 'bytes_limit'))
    )
    blocks = 0
    for leaf, size, divided in zip(self._leaves, sizes, self._is_divided, strict=True):
      indices = leaf.sharding.devices_indices_map(leaf.shape)
      sources = {*devices, *(map(self._next, devices) if divided else ())}
      blocks += size * len({_block(indices[device], leaf.shape) for device in sources})
    generations = 1 + any(self._is_divided)
    missing = generations * blocks - sum(slot.size for slot in self._slots)
    if devices[0].platform == 'cpu':
      missing = max(missing, 0) + need * len(devices)
    host = self._processes.hosts[self._processes.index]
    return has_room, host, max(missing, 0), host_memory.available()

  def _copies(self, leaves):
    """Fresh buffers: of this process, and of another one's divided parts."""
    shifted = [
      self._shifted(leaf, abstract.sharding.spec)
      for leaf, abstract, divided in zip(leaves, self._leaves, self._is_divided, strict=True)
      if divided
    ]
    return [leaf.copy() for leaf in leaves], shifted

  def _shifted(self, leaf, spec):
    count = mesh_lib.batch_devices(self._mesh)
    pairs = [((i + self._shift) % count, i) for i in range(count)]

    def shift(block):
      return lax.ppermute(block, mesh_lib.BATCH, pairs)

    return mesh_lib.mapped(shift, self._mesh, spec, spec)(leaf)

  @property
  def _shift(self):
    """Positions on the batch's axes from a device to the one whose part it copies.

    That is on another host, if there are several and none has more than half of the
    processes: the mesh has those of a host side by side. Else it is in another process.
    """
    sizes = collections.Counter(self._processes.hosts).values()
    processes = max(sizes) if len(sizes) > 1 else 1
    return processes * mesh_lib.batch_devices(self._mesh) // self._processes.count

  def _pieces(self, copies, shifted):
    """The blocks of this process, each once."""
    pieces: dict[tuple, memory_slot.Piece] = {}

    def add(leaf, shape, index, data):
      block = _block(index, shape)
      if (leaf, block) not in pieces:
        pieces[leaf, block] = memory_slot.Piece(leaf, block, data)

    for number, array in enumerate(copies):
      for shard in array.addressable_shards:
        add(number, array.shape, shard.index, shard.data)
    divided = [number for number, is_divided in enumerate(self._is_divided) if is_divided]
    for number, array in zip(divided, shifted, strict=True):
      indices = array.sharding.devices_indices_map(array.shape)
      for shard in array.addressable_shards:
        add(number, array.shape, indices[self._next(shard.device)], shard.data)
    return list(pieces.values())

  def _next(self, device):
    """The device whose part `_shifted` brings to a device."""
    devices = self._mesh.devices.reshape(mesh_lib.batch_devices(self._mesh), -1)
    return np.roll(devices, -self._shift, 0)[devices == device].item()

  def _is_whole(self, version, holdings):
    blocks = set().union(*(blocks.get(version, ()) for blocks in holdings))
    sizes = [0] * len(self._leaves)
    for leaf, bounds in blocks:
      sizes[leaf] += math.prod(stop - start for start, stop in bounds)
    return sizes == [math.prod(leaf.shape) for leaf in self._leaves]

  def _assembled(self, pieces, version, holdings):
    """Every array of the state, whole, from the blocks of all processes."""
    sizes = [memory_lib.of_array(leaf) for leaf in self._leaves]
    offsets = np.cumsum([0, *(4 * -(-size // 4) for size in sizes)])
    flat = np.zeros(offsets[-1] // 4, np.int32)
    arrays = [
      flat.view(np.uint8)[start : start + size].view(leaf.dtype).reshape(leaf.shape)
      for start, size, leaf in zip(offsets[:-1], sizes, self._leaves, strict=True)
    ]
    is_local = all(self._is_whole(version, [blocks]) for blocks in holdings)
    for leaf, bounds, data in pieces:
      owner = min(
        i for i, blocks in enumerate(holdings) if (leaf, bounds) in blocks.get(version, ())
      )
      if is_local or owner == self._processes.index:
        arrays[leaf][tuple(slice(*pair) for pair in bounds)] = data
    if not is_local:
      self._exchange(flat)
    return arrays

  def _exchange(self, flat):
    """Adds the words of all processes; only one has a word that is not 0."""
    processes = range(self._processes.count)
    devices = [next(d for d in jax.devices() if d.process_index == i) for i in processes]
    mesh = jax.sharding.Mesh(np.array(devices), ('process',))
    divided = jax.sharding.NamedSharding(mesh, mesh_lib.P('process'))
    replicated = mesh_lib.replicated(mesh)
    add = jax.jit(lambda words: words.sum(0, dtype=words.dtype), out_shardings=replicated)
    for start in range(0, len(flat), _CHUNK):
      words = np.zeros((1, _CHUNK), np.int32)
      part = flat[start : start + _CHUNK]
      words[0, : len(part)] = part
      summed = add(jax.make_array_from_process_local_data(divided, words))
      part[:] = np.asarray(summed.addressable_data(0))[: len(part)]


def _shortage(resources):
  """Why not all processes can keep copies; '' if they can."""
  if not all(has_room for has_room, *_ in resources):
    return 'a device has no room for it'
  for host in sorted({host for _, host, *_ in resources}):
    need = sum(missing for _, where, missing, _ in resources if where == host)
    left = min(left for _, where, _, left in resources if where == host)
    if need > left:
      return f'{need / 1e6:,.0f} MB are needed on {host}, and {left / 1e6:,.0f} MB are left'
  return ''


def _block(index, shape):
  """An index of slices as first and last excluded positions."""
  return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
