"""A step of several compiled programs, with the face of one."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from anp_jax import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class InTurns:
  """(state, batch) -> (state, values): part after part, their sum, the update.

  What is compiled for a part knows nothing of how many there are. Nor is it in
  a loop of XLA's, where on a CPU gradients of other convolutions than those of
  `layers` take several times as long.

  Attributes:
    count: parts that a device computes one after another.
    part: jitted (params, stats, step, batch, turn) -> totals of each device's
      part, with a leading axis of devices.
    add: jitted (stats, rows, *totals) -> what the update needs; rows are the
      batch's weights and votes.
    update: jitted (state, that) -> (state, values).
    mesh: of the run.
  """

  count: int
  part: Callable
  add: Callable
  update: Callable
  mesh: jax.sharding.Mesh

  def __call__(self, state, batch):
    """Runs them."""
    turn = self._turns
    parts = [
      self.part(state.params, state.stats, state.step, batch, turn[i])
      for i in range(self.count)
    ]
    reduced = self.add(state.stats, _rows(batch), *parts)
    return self.update(state, reduced)

  @functools.cached_property
  def _turns(self):
    replicated = mesh_lib.replicated(self.mesh)
    return [jax.device_put(np.int32(i), replicated) for i in range(self.count)]

  def lower(self, state, batch) -> 'Lowered':
    """As of a jitted function."""

    def between(lowered, sharding):
      return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        lowered.out_info,
      )

    replicated = mesh_lib.replicated(self.mesh)
    turn = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    part = self.part.lower(state.params, state.stats, state.step, batch, turn)
    one = between(part, mesh_lib.batch_sharding(self.mesh))
    add = self.add.lower(state.stats, _rows(batch), *[one] * self.count)
    update = self.update.lower(state, between(add, replicated))
    return Lowered(self, part, add, update)


def _rows(batch):
  return {name: batch[name] for name in ('weight', 'vote')}


@dataclasses.dataclass(frozen=True)
class Lowered:
  """As jax.stages.Lowered, of which it has three."""

  of: InTurns
  part: Any
  add: Any
  update: Any

  def as_text(self) -> str:
    """Of the sum, which has all that is sent, and of a part: all products."""
    return self.add.as_text() + self.part.as_text()

  def compile(self) -> 'Compiled':
    """Compiles each."""
    return Compiled(
      dataclasses.replace(
        self.of,
        part=self.part.compile(),
        add=self.add.compile(),
        update=self.update.compile(),
      )
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
  """As jax.stages.Compiled, of which it has three."""

  of: InTurns

  def __call__(self, state, batch):
    """Runs them."""
    return self.of(state, batch)

  def as_text(self) -> str:
    """Of the sum, which has all that is sent."""
    return self.of.add.as_text()

  def memory_analysis(self):
    """Of a part, which needs the most beside its arguments."""
    return self.of.part.memory_analysis()
