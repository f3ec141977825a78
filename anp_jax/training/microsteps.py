"""A step of several compiled programs, with the face of one."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from anp_jax.parallel import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class _Sequential:
  """A function of a batch that each device computes part after part.

  What is compiled for a part knows nothing of how many there are. Nor is it in
  a loop of XLA's, where on a CPU gradients of other convolutions than those of
  `layers` take several times as long.

  Attributes:
    count: parts that a device computes one after another.
    part: jitted (..., batch, turn) -> totals of each device's part, with a
      leading axis of devices.
    add: jitted (..., *totals) -> the totals of the whole batch.
    mesh: of the run.
  """

  count: int
  part: Callable
  add: Callable
  mesh: jax.sharding.Mesh

  @functools.cached_property
  def _turns(self):
    replicated = mesh_lib.replicated(self.mesh)
    # Also where the step is first called to be traced, as for its operations.
    with jax.ensure_compile_time_eval():
      return [
        jax.device_put(np.int32(i), replicated) for i in range(self.count)
      ]

  def _lower(self, *arguments):
    """The lowered program of a part, and the abstract totals of one."""
    replicated = mesh_lib.replicated(self.mesh)
    turn = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    part = self.part.lower(*arguments, turn)
    return part, _abstract(part, mesh_lib.batch_sharding(self.mesh))


@dataclasses.dataclass(frozen=True)
class Scoring(_Sequential):
  """(params, stats, batch) -> scores: part after part, then their sum."""

  def __call__(self, params, stats, batch):
    """Runs the programs."""
    parts = [self.part(params, stats, batch, turn) for turn in self._turns]
    return self.add(*parts)

  def lower(self, params, stats, batch) -> 'Lowered':
    """Lowers the programs, with the interface of a jitted function."""
    part, totals = self._lower(params, stats, batch)
    add = self.add.lower(*[totals] * self.count)
    return Lowered(self, {'part': part, 'add': add})


@dataclasses.dataclass(frozen=True)
class InTurns(_Sequential):
  """(state, batch) -> (state, values): part after part, their sum, the update.

  Attributes:
    count: see `_Sequential`.
    part: jitted (params, stats, step, batch, turn) -> totals.
    add: jitted (stats, rows, *totals) -> what the update needs; rows are the
      batch's weights and votes.
    mesh: see `_Sequential`.
    update: jitted (state, that) -> (state, values).
  """

  update: Callable

  def __call__(self, state, batch):
    """Runs them."""
    parts = [
      self.part(state.params, state.stats, state.step, batch, turn)
      for turn in self._turns
    ]
    reduced = self.add(state.stats, _rows(batch), *parts)
    return self.update(state, reduced)

  def lower(self, state, batch) -> 'Lowered':
    """As of a jitted function."""
    part, totals = self._lower(state.params, state.stats, state.step, batch)
    add = self.add.lower(state.stats, _rows(batch), *[totals] * self.count)
    reduced = _abstract(add, mesh_lib.replicated(self.mesh))
    update = self.update.lower(state, reduced)
    return Lowered(self, {'part': part, 'add': add, 'update': update})


def _abstract(lowered, sharding):
  """The results of a lowered program, as abstract arrays of one sharding."""
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
    lowered.out_info,
  )


def _rows(batch):
  return {name: batch[name] for name in ('weight', 'vote')}


@dataclasses.dataclass(frozen=True)
class Lowered:
  """The lowered programs of one step, with the face of jax.stages.Lowered."""

  of: _Sequential
  programs: dict[str, Any]

  def as_text(self) -> str:
    """Of the sum, which has all that is sent, and of a part: all products."""
    return self.programs['add'].as_text() + self.programs['part'].as_text()

  def compile(self) -> 'Compiled':
    """Compiles each."""
    compiled = {name: p.compile() for name, p in self.programs.items()}
    return Compiled(dataclasses.replace(self.of, **compiled))


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The compiled programs of one step, as jax.stages.Compiled is one."""

  of: _Sequential

  def __call__(self, *arguments):
    """Runs them."""
    return self.of(*arguments)

  def as_text(self) -> str:
    """Of the sum, which has all that is sent."""
    return self.of.add.as_text()

  def memory_analysis(self):
    """Of a part, which needs the most beside its arguments."""
    return self.of.part.memory_analysis()
