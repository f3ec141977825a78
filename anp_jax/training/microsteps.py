"""A step of several compiled programs, called like one."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class _Sequential:
  """A function of a batch that each device computes shard after shard.

  The program of a shard does not depend on how many there are. Nor is it in a
  loop of XLA's, where on a CPU gradients of other convolutions than those of
  `layers` take several times as long.

  Attributes:
    count: logical shards that a device computes one after another.
    shard: jitted (..., batch, index) -> totals of each device's shard, with a
      leading axis of devices.
    add: jitted (..., *totals) -> the totals of the whole batch.
    mesh: of the run.
  """

  count: int
  shard: Callable
  add: Callable
  mesh: jax.sharding.Mesh

  @functools.cached_property
  def _indices(self):
    replicated = mesh_lib.replicated(self.mesh)
    return [jax.device_put(np.int32(i), replicated) for i in range(self.count)]

  def _indices_with(self, batch):
    """The shards' indices for a batch; without devices where it is traced.

    A step is traced to count its operations, also for devices that are not of
    this machine.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(batch)):
      return [np.int32(i) for i in range(self.count)]
    return self._indices

  def _lower(self, *arguments):
    """The lowered program of a shard, and the abstract totals of one."""
    replicated = mesh_lib.replicated(self.mesh)
    index = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    shard = self.shard.lower(*arguments, index)
    return shard, _abstract(shard, mesh_lib.batch_sharding(self.mesh))


@dataclasses.dataclass(frozen=True)
class SequentialScores(_Sequential):
  """(params, stats, batch) -> scores: shard after shard, then their sum."""

  def __call__(self, params, stats, batch):
    """Runs the programs."""
    shards = [self.shard(params, stats, batch, i) for i in self._indices_with(batch)]
    return self.add(*shards)

  def lower(self, params, stats, batch) -> 'Lowered':
    """Lowers the programs, with the interface of a jitted function."""
    shard, totals = self._lower(params, stats, batch)
    add = self.add.lower(*[totals] * self.count)
    return Lowered(self, {'shard': shard, 'add': add})


@dataclasses.dataclass(frozen=True)
class SequentialSteps(_Sequential):
  """(state, batch) -> (state, values): shards, their sum, the update.

  Attributes:
    count: see `_Sequential`.
    shard: jitted (params, stats, step, batch, index) -> totals.
    add: jitted (stats, rows, *totals) -> what the update needs; rows are the
      batch's weights and votes.
    mesh: see `_Sequential`.
    update: jitted (state, that) -> (state, values).
  """

  update: Callable

  def __call__(self, state, batch):
    """Runs the programs."""
    shards = [
      self.shard(state.params, state.stats, state.step, batch, i) for i in self._indices_with(batch)
    ]
    reduced = self.add(state.stats, _rows(batch), *shards)
    return self.update(state, reduced)

  def lower(self, state, batch) -> 'Lowered':
    """Lowers the programs, with the interface of a jitted function."""
    shard, totals = self._lower(state.params, state.stats, state.step, batch)
    add = self.add.lower(state.stats, _rows(batch), *[totals] * self.count)
    reduced = _abstract(add, mesh_lib.replicated(self.mesh))
    update = self.update.lower(state, reduced)
    return Lowered(self, {'shard': shard, 'add': add, 'update': update})


@dataclasses.dataclass(frozen=True)
class Lowered:
  """The lowered programs of one step, called like jax.stages.Lowered.

  Attributes:
    sequence: what they were lowered from.
    programs: jax.stages.Lowered by field of the sequence.
  """

  sequence: _Sequential
  programs: dict[str, Any]

  def as_text(self) -> str:
    """The text of the sum, with all that is sent, and of a shard's products."""
    return self.programs['add'].as_text() + self.programs['shard'].as_text()

  def compile(self) -> 'Compiled':
    """Compiles each program."""
    compiled = {name: p.compile() for name, p in self.programs.items()}
    return Compiled(dataclasses.replace(self.sequence, **compiled))


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The compiled programs of one step, called like jax.stages.Compiled.

  Attributes:
    sequence: with compiled programs as its fields.
  """

  sequence: _Sequential

  def __call__(self, *arguments):
    """Runs the programs."""
    return self.sequence(*arguments)

  def as_text(self) -> str:
    """The text of the sum, with all that is sent."""
    return self.sequence.add.as_text()

  def memory_analysis(self):
    """The memory of a shard's program, which needs the most temporaries."""
    return self.sequence.shard.memory_analysis()


def micro_batch(batch, index, count: int):
  """Part `index` of the `count` equal parts of a device's batch."""
  return jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(x, index * (len(x) // count), len(x) // count), batch
  )


def with_axis(tree):
  """The arrays of a tree with a leading axis, which divides over devices."""
  return jax.tree.map(lambda x: x[None], tree)


def weighted_sums(values: dict, weight) -> dict:
  """Sums of (n,) values times (n,) weights by name, and `weight`, their sum.

  A row of weight 0 counts for nothing even where its value is not finite.
  """
  sums = {k: jnp.where(weight > 0, v * weight, 0).sum() for k, v in values.items()}
  return sums | {'weight': weight.sum()}


def _abstract(lowered, sharding):
  """The results of a lowered program, as abstract arrays of one sharding."""
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), lowered.out_info
  )


def _rows(batch):
  return {name: batch[name] for name in ('weight', 'vote')}
