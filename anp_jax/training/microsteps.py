"""A step of several compiled programs, called like one."""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib, state as state_lib


@dataclasses.dataclass(frozen=True)
class _Sequential:
  """A function of a batch that each device computes shard after shard.

  The program of a shard does not depend on the number of shards. It is not in an
  XLA loop, where on a CPU gradients of convolutions other than those of `layers`
  take several times as long.

  Attributes:
    count: logical shards that a device computes one after another.
    shard: jitted (..., batch, index) -> totals of each device's shard, with a
      leading axis of devices.
    add: jitted (..., *totals) -> the totals of the whole batch.
    mesh: mesh of the run.
  """

  count: int
  shard: Any
  add: Any
  mesh: jax.sharding.Mesh

  @functools.cached_property
  def _indices(self):
    replicated = mesh_lib.replicated(self.mesh)
    return [jax.device_put(np.int32(i), replicated) for i in range(self.count)]

  def _indices_with(self, batch):
    """The shards' indices on the device, or on the host if the batch is traced.

    A step is traced to count its operations, also for devices of other machines.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(batch)):
      return [np.int32(i) for i in range(self.count)]
    return self._indices

  def as_text(self) -> str:
    """The text of the compiled sum, with all communication."""
    return self.add.as_text()

  def memory_analysis(self) -> Any:
    """The memory of a compiled shard, which needs the most temporaries."""
    return self.shard.memory_analysis()

  def _lower(self, *arguments):
    """The lowered program of a shard, and the abstract totals of one."""
    replicated = mesh_lib.replicated(self.mesh)
    index = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    shard = self.shard.lower(*arguments, index)
    return shard, _abstract(shard, mesh_lib.batch_sharding(self.mesh))


@dataclasses.dataclass(frozen=True)
class SequentialScores(_Sequential):
  """(params, stats, batch) -> scores: shard after shard, then their sum."""

  def __call__(self, params: Any, stats: Any, batch: dict) -> Any:
    """Runs the programs."""
    shards = [self.shard(params, stats, batch, i) for i in self._indices_with(batch)]
    return self.add(*shards)

  def lower(self, params: Any, stats: Any, batch: dict) -> 'Lowered':
    """Lowers the programs, with the interface of a jitted function."""
    shard, totals = self._lower(params, stats, batch)
    add = self.add.lower(*[totals] * self.count)
    return Lowered(self, {'shard': shard, 'add': add})


@dataclasses.dataclass(frozen=True)
class SequentialSteps(_Sequential):
  """(state, batch) -> (state, values): shards, their sum, the update.

  Attributes:
    shard: jitted (params, stats, step, batch, index) -> totals.
    add: jitted (stats, rows, *totals) -> `step_sums.Reduced`; rows are the batch's
      weights and votes.
    update: jitted (state, reduced) -> (state, values).
  """

  update: Any

  def __call__(self, state: state_lib.TrainState, batch: dict) -> Any:
    """Runs the programs."""
    shards = [
      self.shard(state.params, state.stats, state.step, batch, i) for i in self._indices_with(batch)
    ]
    reduced = self.add(state.stats, _rows(batch), *shards)
    return self.update(state, reduced)

  def lower(self, state: state_lib.TrainState, batch: dict) -> 'Lowered':
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
    sequence: jitted programs.
    programs: jax.stages.Lowered by field of the sequence.
  """

  sequence: SequentialScores | SequentialSteps
  programs: dict[str, Any]

  def as_text(self) -> str:
    """The text of the sum, with all communication, and of a shard's products."""
    return self.programs['add'].as_text() + self.programs['shard'].as_text()

  def compile(self) -> SequentialScores | SequentialSteps:
    """The sequence of the compiled programs, with the interface of jax.stages.Compiled."""
    compiled = {name: p.compile() for name, p in self.programs.items()}
    return dataclasses.replace(self.sequence, **compiled)


def micro_batch(batch: Any, index: jax.Array | int, count: int) -> Any:
  """Part `index` of the `count` equal parts of a device's batch."""
  return jax.tree.map(
    lambda x: lax.dynamic_slice_in_dim(x, index * (len(x) // count), len(x) // count), batch
  )


def with_axis(tree: Any) -> Any:
  """The arrays of a tree with a leading axis, which divides over devices."""
  return jax.tree.map(lambda x: x[None], tree)


def weighted_sums(values: dict, weight: jax.Array) -> dict:
  """Sums of (n,) values times (n,) weights by name, and `weight`, their sum.

  A row of weight 0 is ignored even if its value is not finite.
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
