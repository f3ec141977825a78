"""The training step of devices that share the layers along the axis 'model'."""

from collections.abc import Callable, Sequence
import contextlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib, step_sums
from anp_jax.parallel.channel_split import (
  convolutions,
  kernels,
  parts,
  split as split_lib,
  split_operation,
)
from anp_jax.parallel.sync import sync_step as sync


def check(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
  """Refuses an invalid plan, and shares that do not fit the mesh.

  Raises:
    ConfigError: naming the key and the expected value.
  """
  split_lib.from_config(config)
  shares, devices = config.strategy.shares, mesh.shape[mesh_lib.MODEL]
  if config.strategy.offload_to:  # outside of the mesh: the offload pool checks them
    return
  if shares and len(shares) != devices:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {devices}, one for '
      'each device along config.mesh.model'
    )


class ChannelSplitStep(sync.SyncStep):
  """Sums over 'data'; over 'model', each device trains its own channels.

  Only the device holds its channels of a split kernel and their optimizer state, so
  neither these weights nor their gradients are sent (`kernels`). All devices of the
  axis 'model' compute everything else, and the first device's result is used:
  unlike devices round differently, and weights must stay the same everywhere.
  """

  # Of a split layer, each device takes another branch: a batch costs all together.
  join_branches = staticmethod(sum)

  def __init__(self, config: ConfigDict, specs: Any, forward_order: Sequence[str] = ()):
    """Makes the strategy; see `sync_step.SyncStep`."""
    super().__init__(config, specs, forward_order)
    self._plan = split_lib.from_config(config)
    # Features of each convolution, and of each device by the path of a split kernel.
    self._features: dict[str, int] = {}
    self._kernels: dict[str, tuple[int, ...]] = {}

  def init_fn(self, init: state_lib.Init) -> Callable:
    """(weights) -> a new state; a device holds its channels of a split kernel.

    Raises:
      ConfigError: if the plan names a layer that the network does not have.
    """

    def record(layer, convolve, x, kernel):
      self._features[layer] = kernel.shape[-1]
      return convolve(x, kernel)

    with convolutions.computed_by(record):
      jax.eval_shape(lambda: init())  # a new function: `init` has a cached trace
    split_lib.check_layers(self._plan, self._features)
    return lambda weights=(): kernels.divided(init(weights), self._kernels)

  def abstract_state(self, abstract_replica: state_lib.TrainState) -> state_lib.TrainState:
    """The abstract state of a run; split kernels are divided over 'model'."""
    mesh = mesh_lib.mesh_of(abstract_replica)
    for layer, features in self._features.items():
      counts = self._plan.counts(layer, features, mesh.shape[mesh_lib.MODEL])
      if counts is not None:
        self._kernels[f'{layer}/kernel'] = counts
    return kernels.abstract(abstract_replica, self._kernels, mesh)

  def eval_state_fn(self, abstract_replica: state_lib.TrainState) -> Callable:
    """The run's weights, with all channels on each device."""
    if not self._kernels:
      return lambda state: state
    join = self._join_fn(abstract_replica.replace(opt_state=()))
    return lambda state: join(state.replace(opt_state=()))

  def checkpoint_layout(self, abstract_replica: state_lib.TrainState) -> state_lib.CheckpointLayout:
    """Checkpoints hold whole kernels: a run may resume with another split."""
    abstract = self.abstract_state(abstract_replica)
    if not self._kernels:
      return super().checkpoint_layout(abstract_replica)
    return state_lib.CheckpointLayout(
      abstract_replica,
      self._join_fn(abstract_replica),
      jax.jit(
        lambda state: kernels.divided(state, self._kernels),
        out_shardings=jax.tree.map(lambda s: s.sharding, abstract),
      ),
    )

  def wrap_shard_step(self, shard: Callable) -> Callable:
    """One device's part of a step, from its channels of split kernels."""

    def split_step(params, stats, step, batch):
      params = kernels.surrounded(params, self._kernels)
      return shard(params, stats, step, batch)

    return split_step

  def reduce(self, gradients: Any, metrics: step_sums.Metrics) -> tuple[Any, step_sums.Metrics]:
    """Sums over 'data', and over 'model' except for gradients of split kernels.

    Args:
      gradients: pytree like the whole parameters; the gradient of a split kernel is
        zero outside of this device's channels.
      metrics: other summands; of numbers that all devices of 'model' have, the
        first device's.

    Returns:
      Sums of gradients, a device's part for a split kernel, and of metrics.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
    counts = [self._kernels.get(mesh_lib.path_name(path)) for path, _ in leaves]
    local = [
      x if n is None else split_operation.own_part(x, n)
      for n, (_, x) in zip(counts, leaves, strict=True)
    ]
    summed, metrics = super().reduce(tree.unflatten(local), jax.tree.map(_first_device, metrics))
    summed = jax.tree.leaves(summed)
    values, metrics_tree = jax.tree.flatten(metrics)
    wires = self._narrowed(summed)
    wires, values = self._complete(wires, counts, values)
    gradients = [w.astype(x.dtype) for w, x in zip(wires, summed, strict=True)]
    return tree.unflatten(gradients), metrics_tree.unflatten(values)

  def sum_scores(self, sums: Any) -> Any:
    """The sums of an evaluation, from the first device of 'model'."""
    sums = jax.tree.map(_first_device, sums)
    return lax.psum(sums, (*mesh_lib.BATCH, mesh_lib.MODEL))

  def local_vote(self, vote: jax.Array) -> jax.Array:
    """The largest vote of devices that have the same images."""
    return lax.pmax(vote, mesh_lib.MODEL)

  def convolution_context(self) -> contextlib.AbstractContextManager[None]:
    """The context in which an applied model has its convolutions split."""
    maps = parts.Parts()

    def convolve_split(layer, convolve, x, kernel):
      counts = self._kernels.get(f'{layer}/kernel')
      if counts is None:
        return convolve(x, kernel)
      return maps.convolve(convolve, x, kernel, counts)

    return convolutions.computed_by(convolve_split, maps.apply)

  def _join_fn(self, abstract_tree):
    """A part of a run's state -> that part with kernels whole on all devices."""
    return jax.jit(
      lambda tree: kernels.joined(tree, self._kernels),
      out_shardings=jax.tree.map(lambda s: s.sharding, abstract_tree),
    )

  def _complete(self, wires, counts, metrics):
    """Sums unsplit gradients and metrics over 'model'.

    Args:
      wires: gradients; local parts of split kernels' gradients.
      counts: features of each device for each gradient; None: not split.
      metrics: arrays that are summed together with the gradients.
    """
    wires = list(wires)
    unsplit = [i for i in self._backward if counts[i] is None]
    summands = [_first_device(wires[i]) for i in unsplit] + metrics
    sums = buckets.summed(summands, mesh_lib.MODEL, self._size)
    for i, total in zip(unsplit, sums, strict=False):
      wires[i] = total
    return wires, sums[len(unsplit) :]


def _first_device(x):
  """Zeros on all devices of 'model' but the first: a sum gives its value."""
  return jnp.where(lax.axis_index(mesh_lib.MODEL) == 0, x, 0)
