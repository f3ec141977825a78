"""Synchronous training: every shard's gradient in every update."""

from collections.abc import Callable, Sequence
import contextlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib, step_sums


class SyncStep:
  """Explicit sums over the data axis, in the dtype that the config names.

  XLA's partitioner would sum gradients of a bfloat16 network in bfloat16, whatever
  the dtype of the parameters.
  """

  # Operations of a conditional in a step, from those of its branches.
  join_branches: Callable = staticmethod(max)
  # Whether micro-batches, their sum and the update are separate programs.
  separate_programs = False
  # Spec of results that each group of devices has: here all devices are one group.
  per_group_spec = mesh_lib.P()

  def __init__(self, config: ConfigDict, specs: Any, forward_order: Sequence[str] = ()):
    """Makes the strategy.

    Args:
      config: config of the run.
      specs: PartitionSpec of each parameter.
      forward_order: paths of the parameters, from `mesh.path_name`, in the order
        in which the network uses them; parameters that are not named follow.
    """
    self._config = config
    self._dtype = jnp.dtype(config.strategy.reduce_dtype)
    self._size = config.strategy.bucket_megabytes * 10**6  # bytes
    paths, self._tree = jax.tree_util.tree_flatten_with_path(specs)
    self._axes = [_divided_axis(spec) for _, spec in paths]
    place = {name: i for i, name in enumerate(forward_order)}
    # The backward pass gives the last layer's gradient first.
    self._backward = sorted(
      range(len(paths)),
      key=lambda i: place.get(mesh_lib.path_name(paths[i][0]), len(place)),
      reverse=True,
    )

  def gather(self, params: Any) -> Any:
    """Whole parameters from this device's part of them."""
    leaves = self._tree.flatten_up_to(params)
    divided = [i for i in self._backward if self._axes[i] >= 0]
    gathered = buckets.fused(
      lambda x: lax.all_gather(x, mesh_lib.DATA),
      [jnp.moveaxis(leaves[i], self._axes[i], 0).ravel() for i in divided],
      self._size,
    )
    for i, leaf in zip(divided, gathered, strict=True):
      first = jnp.moveaxis(leaves[i], self._axes[i], 0)
      leaf = leaf.reshape(-1, *first.shape[1:])
      leaves[i] = jnp.moveaxis(leaf, 0, self._axes[i])
    return self._tree.unflatten(leaves)

  def micro_batches(self) -> int:
    """The most parts of its batch that a device computes in turn."""
    return self._config.accumulate

  def parts(self) -> int:
    """The number of parts of the whole batch, over which statistics are averaged."""
    return lax.axis_size(mesh_lib.DATA) * self._config.accumulate

  def accumulate(self, compute: Callable[[Any], Any], batch: Any) -> Any:
    """The sum of compute(micro-batch) over the parts of this device's batch.

    Args:
      compute: micro-batch -> pytree of arrays, whose shapes do not depend on the rows.
        Devices with different numbers of rows run different programs, so it has no
        collective over the data axis.
      batch: pytree of arrays (rows, ...), of the most rows that a device has.
    """
    counts = self._row_counts(lax.axis_size(mesh_lib.DATA))
    if not counts:
      return self._accumulate(compute, batch)
    sizes = sorted(set(counts))
    programs = [
      lambda batch, n=n: self._accumulate(compute, jax.tree.map(lambda x: x[:n], batch))
      for n in sizes
    ]
    choice = jnp.asarray([sizes.index(n) for n in counts])[lax.axis_index(mesh_lib.DATA)]
    return lax.switch(choice, programs, batch)

  def _accumulate(self, compute, batch):
    if self._config.accumulate == 1:
      return compute(batch)
    micro_batches = split(batch, self._config.accumulate)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, first))
    totals, _ = lax.scan(
      lambda total, micro: (jax.tree.map(jnp.add, total, compute(micro)), None),
      zeros,
      micro_batches,
    )
    return totals

  def weighted(self, metrics: step_sums.Metrics) -> step_sums.Metrics:
    """Metrics whose statistics, means over a device's rows, are weighted for the batch's mean."""
    counts = np.array(self._row_counts(lax.axis_size(mesh_lib.DATA)))
    if not counts.size:
      return metrics
    weight = jnp.asarray(counts / counts.mean())[lax.axis_index(mesh_lib.DATA)]
    return metrics._replace(stats=jax.tree.map(lambda x: x * weight.astype(x.dtype), metrics.stats))

  def reduce(self, gradients: Any, metrics: step_sums.Metrics) -> tuple[Any, step_sums.Metrics]:
    """Sums over the data axis.

    Args:
      gradients: pytree like the parameters; sent in the dtype that the config names.
      metrics: other summands, sent in their own dtypes.

    Returns:
      Sums of gradients (a device's part for a divided parameter) and of metrics.
    """
    leaves = self._tree.flatten_up_to(gradients)
    wires = self._narrowed(leaves)
    count = lax.axis_size(mesh_lib.DATA)
    if count > 1:
      undivided = [i for i in self._backward if self._axes[i] < 0]
      rest, tree = jax.tree.flatten(metrics)
      sums = buckets.fused(
        self._sum, [self._flat(x) for x in ([wires[i] for i in undivided] + rest)], self._size
      )
      for i, total in zip(undivided, sums, strict=False):
        wires[i] = self._shaped(total, wires[i])
      metrics = tree.unflatten(
        self._shaped(total, x) for total, x in zip(sums[len(undivided) :], rest, strict=True)
      )
      divided = [i for i in self._backward if self._axes[i] >= 0]
      firsts = [jnp.moveaxis(wires[i], self._axes[i], 0) for i in divided]
      parts = buckets.fused(
        lambda x: lax.psum_scatter(x, mesh_lib.DATA),
        [x.reshape(count, -1) for x in firsts],
        self._size,
      )
      for i, first, part in zip(divided, firsts, parts, strict=True):
        part = part.reshape(-1, *first.shape[1:])
        wires[i] = jnp.moveaxis(part, 0, self._axes[i])
    totals = [w.astype(x.dtype) for w, x in zip(wires, leaves, strict=True)]
    return self._tree.unflatten(totals), metrics

  def for_evaluation(self) -> 'SyncStep':
    """The strategy of steps without a gradient, whose batches divide equally."""
    return self

  def sum_scores(self, sums: Any) -> Any:
    """The sums of an evaluation over the whole batch, from one device's sums."""
    return lax.psum(sums, mesh_lib.BATCH)

  def convolution_context(self) -> contextlib.AbstractContextManager[None]:
    """The context in which a step applies a model."""
    return contextlib.nullcontext()

  def local_vote(self, vote: jax.Array) -> jax.Array:
    """The vote that this device adds for its process."""
    return vote

  def init_fn(self, init: state_lib.Init) -> Callable:
    """(weights) -> new state of the run, from `init` of one network."""
    return init

  def abstract_state(self, abstract_replica: state_lib.TrainState) -> state_lib.TrainState:
    """The run's abstract state, from that of one network."""
    return abstract_replica

  def optimizer(self, create: Callable, config: ConfigDict, schedule: Callable) -> Any:
    """The optimizer of a run.

    Args:
      create: config -> optax chain.
      config: config of the run, in which numbers may be traced.
      schedule: step to learning rate.
    """
    return create(config)

  def step(self, gradient: Callable, update: Callable, optimizer: Any) -> Callable:
    """The step of the run, (state, batch) -> (state, values).

    Args:
      gradient: (params, stats, step, batch) -> `step_sums.Reduced`.
      update: (state, reduced) -> (state, values), with the `optimizer`.
      optimizer: what `optimizer` has returned.
    """

    def train_step(state, batch):  # the name of the program, in profiles too
      return update(state, gradient(state.params, state.stats, state.step, batch))

    return train_step

  def wrap_shard_step(self, shard: Callable) -> Callable:
    """One device's part of the run's step, from that of one network."""
    return shard

  def wrap_update(self, update: Callable, mean_values: Callable, abstract_replica: Any) -> Callable:
    """The run's update: (state, `step_sums.Reduced`) -> (state, values by name).

    Args:
      update: update of one network.
      mean_values: (groups,) values by name and (groups,) weights to the run's
        values by name.
      abstract_replica: abstract state of one network, with shardings.
    """
    return update

  def eval_state_fn(self, abstract_replica: state_lib.TrainState) -> Callable:
    """The run's state -> the state of one network, which is evaluated."""
    return lambda state: state

  def checkpoint_layout(self, abstract_replica: state_lib.TrainState) -> state_lib.CheckpointLayout:
    """The layout of checkpoints: that of the run."""
    return state_lib.CheckpointLayout(
      self.abstract_state(abstract_replica), lambda state: state, lambda state: state
    )

  def _row_counts(self, devices):
    """The rows of each device of the data axis; (): equal parts."""
    config = self._config
    return strategy_lib.find(config).row_counts(config, config.batch_size, devices)

  def _narrowed(self, arrays):
    """Gradients in the dtype in which they are sent; float64 runs stay exact."""
    return [x if x.dtype == jnp.float64 else x.astype(self._dtype) for x in arrays]

  def _sum(self, x):
    return lax.psum(x, mesh_lib.DATA)

  def _flat(self, x):
    """The array in the shape (..., n) that `_sum` adds."""
    return x.ravel()

  def _shaped(self, total, x):
    """The sum (n,) of arrays like x, in their shape."""
    return total.reshape(x.shape)


def split(batch: Any, count: int) -> Any:
  """The batch's arrays (n, ...) as (count, n / count, ...)."""
  return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def _divided_axis(spec):
  """The axis of an array that its spec divides over the data axis; -1: none."""
  return next((i for i, a in enumerate(spec) if a == mesh_lib.DATA), -1)
