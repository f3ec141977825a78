"""Synchronous training: every shard's gradient in every update."""

import contextlib

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib

_MEGABYTE = 10**6


class SyncStep:
  """Explicit sums over the data axis, in a named dtype.

  Left to XLA's partitioner, gradients of a bfloat16 network would be summed in
  bfloat16 whatever the dtype of the parameters.
  """

  # Whether micro-batches, their sum and the update are separate programs.
  separate_programs = False
  # Mesh axes over which a step's sums go.
  _summed = (mesh_lib.DATA,)
  # Spec of what each group of devices has: here all devices are one group.
  per_group_spec = mesh_lib.P()

  def __init__(self, config, specs, order=()):
    """Makes the strategy.

    Args:
      config: the run's config.
      specs: PartitionSpec of each parameter.
      order: paths of the parameters, as `mesh.path_name` gives them, in the
        order in which the network uses them; others follow.
    """
    self._dtype = jnp.dtype(config.strategy.reduce_dtype)
    self._accumulate = config.accumulate
    self._size = config.strategy.bucket_megabytes * _MEGABYTE
    paths, self._tree = jax.tree_util.tree_flatten_with_path(
      specs, is_leaf=lambda s: isinstance(s, mesh_lib.P)
    )
    self._axes = [_divided_axis(spec) for _, spec in paths]
    place = {name: i for i, name in enumerate(order)}
    # The backward pass gives the last layer's gradient first.
    self._backward = sorted(
      range(len(paths)),
      key=lambda i: place.get(mesh_lib.path_name(paths[i][0]), len(place)),
      reverse=True,
    )

  def gather(self, params):
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
    """How many parts of its batch a device computes in turn."""
    return self._accumulate

  def accumulate(self, compute, batch):
    """Sums over the micro-batches that this device computes in turn.

    Args:
      compute: micro-batch -> pytree of arrays.
      batch: this device's part of the batch.

    Returns:
      The sum of what `compute` gives for each.
    """
    if self._accumulate == 1:
      return compute(batch)
    micro_batches = split(batch, self._accumulate)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, first))
    totals, _ = lax.scan(
      lambda total, micro: (jax.tree.map(jnp.add, total, compute(micro)), None),
      zeros,
      micro_batches,
    )
    return totals

  def reduce(self, gradients, metrics):
    """Sums over the data axis.

    Args:
      gradients: like the parameters; they travel in the dtype that the config
        names.
      metrics: `step_sums.Metrics` or another pytree of what else is summed, in its own
        dtype.

    Returns:
      gradients, of a divided parameter this device's part; metrics.
    """
    leaves = self._tree.flatten_up_to(gradients)
    # A float64 run is there to be exact: its sums are never narrowed.
    wires = [x if x.dtype == jnp.float64 else x.astype(self._dtype) for x in leaves]
    count = lax.axis_size(mesh_lib.DATA)
    if lax.axis_size(self._summed) > 1:
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

  def sum_scores(self, sums):
    """The sums of an evaluation over the whole batch, from a device's own."""
    return lax.psum(sums, mesh_lib.BATCH)

  def convolution_context(self):
    """The context in which a step applies a model."""
    return contextlib.nullcontext()

  def of_whole_batch(self, outputs, rows: int):
    """A network's outputs for all of a device's part of the batch.

    Args:
      outputs: of an applied model, whose gradient is that of one loss.
      rows: examples of the part.
    """
    del rows
    return outputs

  def local_vote(self, vote):
    """The vote that this device adds for its process."""
    return vote

  def init_fn(self, init):
    """(weights) -> a run's new state, from that for one network."""
    return init

  def abstract_state(self, abstract_replica):
    """A run's abstract state, from that of one network."""
    return abstract_replica

  def wrap_shard_step(self, shard):
    """One device's part of a step, from that for one network."""
    return shard

  def wrap_update(self, update, mean_values, abstract_replica):
    """(state, `step_sums.Reduced`) -> (state, values by name), from that for one network.

    Args:
      update: update of one network.
      mean_values: values (groups,) by name, and (groups,) weights of their
        examples, to the run's values by name.
      abstract_replica: abstract state of one network, with shardings.
    """
    return update

  def eval_state_fn(self, abstract_replica):
    """The run's state -> that of the one network that evaluation sees.

    Args:
      abstract_replica: abstract state of one network, with shardings.
    """
    return lambda state: state

  def checkpoint_layout(self, abstract_replica):
    """How checkpoints hold the run's state: as it is.

    Args:
      abstract_replica: abstract state of one network, with shardings.

    Returns:
      `state.CheckpointLayout`.
    """
    return state_lib.CheckpointLayout(
      self.abstract_state(abstract_replica), lambda state: state, lambda state: state
    )

  def _sum(self, x):
    return lax.psum(x, self._summed)

  def _flat(self, x):
    """What `_sum` takes of an array: all of it on one, last axis."""
    return x.ravel()

  def _shaped(self, total, x):
    """The sum (n,) of arrays like x, in its shape."""
    return total.reshape(x.shape)


def split(batch, count: int):
  """The batch's arrays (n, ...) as (count, n / count, ...)."""
  return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def _divided_axis(spec):
  """Which axis of an array its spec divides over the data axis; -1: none."""
  return next((i for i, a in enumerate(spec) if a == mesh_lib.DATA), -1)
