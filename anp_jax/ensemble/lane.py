"""Members of an ensemble that one program trains on one device."""

from collections.abc import Callable, Sequence
import functools
import itertools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import experiment
from anp_jax.config import strategy as strategy_lib
from anp_jax.ensemble import device_examples, member as member_lib, member_step
from anp_jax.parallel import mesh as mesh_lib

_MOST_STEPS = 64  # of one call, which takes an accelerator tens of milliseconds
_TURN = 0.5  # seconds of a call on a CPU, after which a stop is noticed


class Device:
  """What all members on one device share.

  Attributes:
    experiment: training of any of them.
  """

  def __init__(
    self,
    shared: experiment.Experiment,
    configs: Sequence[ConfigDict],
    examples: device_examples.Examples,
    together: int = 0,
  ):
    """Puts the examples on the device.

    Args:
      shared: training of any member, on a mesh of the device alone.
      configs: configs of all members of the ensemble.
      examples: training examples, on the host.
      together: most members of a program; 0: all on an accelerator, one on a CPU.
    """
    self.experiment = shared
    self._device = shared.mesh.devices.flat[0]
    self._step = member_step.MemberStep.create(shared.program, configs)
    self._examples = jax.device_put(examples, self._device)
    self._is_cpu = mesh_lib.platform(shared.mesh) == 'cpu'
    # A CPU's caches hold the state of one member, and none of its steps waits for a launch.
    self._together = together or (1 if self._is_cpu else len(configs))
    self._one = jax.jit(self._step.one, donate_argnums=0)
    batch = functools.partial(device_examples.batch, shared.config)
    self._batch = jax.jit(batch)

  def is_loop(self, members: int) -> bool:
    """Whether the steps of a call are a loop of one program, for a number of members."""
    # In a loop, XLA's convolutions would use one core of a CPU.
    return not self._is_cpu or members > 1

  def together(self, members: int) -> int:
    """The members that a program trains: as many as the device has memory for."""
    stats = self._device.memory_stats() or {}  # a CPU has none
    free = stats.get('bytes_limit', math.inf) - stats.get('bytes_in_use', 0)
    return fitting(min(self._together, members), free, self._needed_bytes)

  def _needed_bytes(self, members):
    """The bytes of a program but for the examples, which are on the device."""
    memory = self._compiled(members).memory_analysis()
    examples = sum(x.nbytes for x in self._examples)
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes - examples

  @functools.cache  # noqa: B019 - a process has few devices, each until its end
  def _compiled(self, members):
    """The compiled steps of a number of members."""
    spec = self.experiment.spec
    replicated = mesh_lib.replicated(self.experiment.mesh)

    def shaped(shape, dtype):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    state = jax.tree.map(
      lambda s: shaped((members, *s.shape), s.dtype), self.experiment.program.abstract_state
    )
    numbers = {key: shaped((members,), x.dtype) for key, x in self._step.numbers([]).items()}
    batch = members, _MOST_STEPS, spec.batch_size
    order = strategy_lib.find(spec.config).order_size(spec.config)
    draws = device_examples.Draws(
      shaped(batch, np.int32),
      shaped(batch, np.bool_),
      shaped((*batch, 2), np.int32),
      shaped(batch, np.int32),
      shaped((members, _MOST_STEPS, order), np.int32),
    )
    jitted = jax.jit(self._step.many, donate_argnums=0)
    return jitted.lower(state, numbers, self._examples, draws, shaped((), np.int32)).compile()

  def numbers(self, configs: Sequence[ConfigDict]) -> dict[str, jax.Array]:
    """The varied numbers of some members, on the device; see `MemberStep.numbers`."""
    return self._put(self._step.numbers(configs))

  def run(
    self, state: Any, numbers: dict[str, jax.Array], draws: device_examples.Draws, count: int
  ) -> tuple[Any, list[jax.Array]]:
    """Makes `count` steps of a state of several members; see `MemberStep.many`.

    Args:
      state: TrainState, with a leading axis of members where steps are a loop; it is donated.
      numbers: numbers of the members, from `numbers`.
      draws: choices (members, count, batch, ...).
      count: steps to make.

    Returns:
      The state, and the values in arrays (members, steps, values), one after another.
    """
    members = len(draws.example)
    if self.is_loop(members):
      missing = _MOST_STEPS - count
      padded = [np.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) for x in draws]
      steps = self._compiled(members)
      draws = self._put(device_examples.Draws(*padded))
      state, values = steps(state, numbers, self._examples, draws, np.int32(count))
      return state, [values[:, :count]]
    rows = []
    for i in range(count):
      chosen = device_examples.Draws(*(x[0, i] for x in draws))
      state, values = self._one(state, numbers, self._batch(self._examples, chosen))
      rows.append(values)
    return state, rows

  def _put(self, arrays):
    return jax.device_put(arrays, mesh_lib.replicated(self.experiment.mesh))


def fitting(members: int, free: float, needed: Callable[[int], float]) -> int:
  """Returns how many members fit, halving their number until they do.

  Args:
    members: most members.
    free: bytes that are free.
    needed: bytes that a number of members need; called for more than one only.
  """
  while members > 1 and math.isfinite(free) and needed(members) > free:
    members = -(-members // 2)
  return members


class Lane:
  """Members that are at the same step, and make the next ones together.

  Attributes:
    device: where they train.
    members: members, also those that ended early.
    step: steps that their state has had.
  """

  def __init__(self, device: Device, members: Sequence[member_lib.Member]):
    """Stacks the members' states, if one program trains them."""
    self.device, self.members = device, list(members)
    self.step = self._saved_step = members[0].step
    self._is_loop = device.is_loop(len(members))
    states = [member.take_state() for member in members]
    # An axis of one member would have XLA on a CPU copy what a step updates in place.
    self._state = jax.tree.map(lambda *x: jnp.stack(x), *states) if self._is_loop else states[0]
    self._numbers = device.numbers([member.config for member in members])
    self._due = self._next_due()
    self._most = _MOST_STEPS if self._is_loop else 1
    self._unread: tuple[int, list[jax.Array]] | None = None  # first step and values of a call

  @property
  def is_finished(self) -> bool:
    """Whether no member has a step left to make."""
    total = self.device.experiment.spec.total_steps
    return self.step >= total or all(member.error for member in self.members)

  def advance(self) -> None:
    """Begins to compute the next steps, and records those before; then what is due."""
    begin = time.monotonic()
    count = min(self._most, self._due - self.step)
    draws = [member.draw(self.step, count) for member in self.members]
    stacked = device_examples.Draws(*(np.stack(arrays) for arrays in zip(*draws, strict=True)))
    self._state, values = self.device.run(self._state, self._numbers, stacked, count)
    self._record()
    self._unread = self.step + 1, values
    self.step += count
    # A member that makes many steps in a row finds its state in a CPU's caches.
    if time.monotonic() - begin < _TURN / 2:
      self._most = min(2 * self._most, _MOST_STEPS)
    if self.step == self._due:
      self._record()
      self._save()
      self._due = self._next_due()

  def stop(self) -> None:
    """Saves after the steps that have begun."""
    self._record()
    if self.step > self._saved_step:
      self._save()

  def _save(self):
    """Saves the state of each member, and scores it if that is due."""
    for i, member in enumerate(self.members):
      if not member.error:
        state = jax.tree.map(lambda x, i=i: x[i], self._state) if self._is_loop else self._state
        member.save(self.step, state)
    self._saved_step = self.step

  def _next_due(self):
    """The next step after which something is saved."""
    recorder = self.members[0].recorder
    return next(step for step in itertools.count(self.step + 1) if recorder.saves_at(step))

  def _record(self):
    """Reads the values of steps that have begun, waiting for them."""
    if self._unread is None:
      return
    first, values = self._unread
    self._unread = None
    values = np.concatenate(jax.device_get(values), axis=1)
    for member, rows in zip(self.members, values, strict=True):
      member.record(first, rows)
