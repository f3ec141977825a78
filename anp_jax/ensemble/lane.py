"""Members of an ensemble that one program trains on one device."""

from collections.abc import Sequence
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import experiment
from anp_jax.ensemble import device_examples, member as member_lib, member_step
from anp_jax.parallel import mesh as mesh_lib

_MOST_STEPS = 64  # of one call on an accelerator, which takes them tens of milliseconds


class Device:
  """What all members on one device share.

  Attributes:
    experiment: training of any of them.
  """

  def __init__(self, shared: experiment.Experiment, configs: Sequence[ConfigDict]):
    """Puts the examples on the device.

    Args:
      shared: training of any member, on a mesh of the device alone.
      configs: configs of all members of the ensemble.
    """
    self.experiment = shared
    self._device = shared.mesh.devices.flat[0]
    self._step = member_step.MemberStep.create(shared.program, configs)
    self._examples = device_examples.load(shared.config, shared.source, self._device)
    is_cpu = mesh_lib.platform(shared.mesh) == 'cpu'
    # A CPU's caches hold the state of one member, and none of its steps waits for a launch.
    self.steps = 1 if is_cpu else _MOST_STEPS
    self._together = shared.config.ensemble.together or (1 if is_cpu else len(configs))

  def together(self, members: int) -> int:
    """The members that a program trains: as many as the device has memory for."""
    count = min(self._together, members)
    stats = self._device.memory_stats() or {}
    limit = stats.get('bytes_limit', 0) - stats.get('bytes_in_use', 0)
    while count > 1 and limit > 0 and self._needed_bytes(count) > limit:
      count = -(-count // 2)
    return count

  def _needed_bytes(self, members):
    memory = self._compiled(members).memory_analysis()
    shared = sum(x.nbytes for x in self._examples)
    return memory.temp_size_in_bytes + 2 * memory.argument_size_in_bytes - 2 * shared

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
    batch = members, self.steps, spec.batch_size
    draws = device_examples.Draws(
      shaped(batch, np.int32), shaped(batch, np.bool_), shaped((*batch, 2), np.int32)
    )
    examples = jax.tree.map(lambda x: shaped(x.shape, x.dtype), self._examples)
    jitted = jax.jit(self._step.members_steps, donate_argnums=0)
    return jitted.lower(state, numbers, examples, draws, shaped((), np.int32)).compile()

  def run(
    self, state: Any, configs: Sequence[ConfigDict], draws: device_examples.Draws, count: int
  ) -> tuple[Any, jax.Array]:
    """Makes `count` steps of a state of several members; see `MemberStep.members_steps`."""
    numbers = self._step.numbers(configs)
    arrays = jax.device_put(
      (numbers, draws, np.int32(count)), mesh_lib.replicated(self.experiment.mesh)
    )
    numbers, draws, count = arrays
    return self._compiled(len(configs))(state, numbers, self._examples, draws, count)


class Lane:
  """Members that are at the same step, and make the next ones together.

  Attributes:
    device: where they train.
    members: members, also those that ended early.
    step: steps that their state has had.
  """

  def __init__(self, device: Device, members: Sequence[member_lib.Member]):
    """Stacks the members' states."""
    self.device, self.members = device, list(members)
    self.step = members[0].step
    self._state = jax.tree.map(
      lambda *x: jnp.stack(x), *[member.take_state() for member in members]
    )
    self._configs = [member.config for member in members]
    self._unread: tuple[int, jax.Array] | None = None  # first step and values of a call

  @property
  def is_finished(self) -> bool:
    """Whether no member has a step left to make."""
    total = self.device.experiment.spec.total_steps
    return self.step >= total or all(member.error for member in self.members)

  def advance(self) -> None:
    """Begins to compute the next steps, and records those before; then what is due."""
    due = self._next_due()
    count = min(self.device.steps, due - self.step)
    draws = [member.drawing.steps(self.step, count) for member in self.members]
    missing = self.device.steps - count
    stacked = [np.stack(arrays) for arrays in zip(*draws, strict=True)]
    padded = [np.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) for x in stacked]
    self._state, values = self.device.run(
      self._state, self._configs, device_examples.Draws(*padded), count
    )
    self._record()
    self._unread = self.step + 1, values[:, :count]
    self.step += count
    if self.step == due:
      self._record()
      self.save()

  def save(self) -> None:
    """Saves the state of each member, and scores it if that is due."""
    for i, member in enumerate(self.members):
      if not member.error:
        member.save(self.step, jax.tree.map(lambda x, i=i: x[i], self._state))

  def stop(self) -> None:
    """Saves after the steps that have begun."""
    self._record()
    self.save()

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
    for member, rows in zip(self.members, jax.device_get(values), strict=True):
      member.record(first, rows)
