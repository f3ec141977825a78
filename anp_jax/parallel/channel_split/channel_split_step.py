"""What the devices of the axis 'model' do inside a step."""

import contextlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import buckets, mesh as mesh_lib, state as state_lib, step_sums
from anp_jax.parallel.channel_split import (
  convolutions,
  kernels,
  parts,
  split as plan_lib,
  split_operation,
  split_rows as rows_lib,
)
from anp_jax.parallel.sync import sync_step as sync


def check(config, mesh) -> None:
  """Refuses a text that is no plan, and shares that do not fit the mesh.

  Raises:
    ConfigError: naming the key and what would fit.
  """
  plan = plan_lib.from_config(config)
  if config.strategy.offload_to and (plan.by_batch or plan.rows):
    raise config_lib.ConfigError(
      f'config.strategy.plan={str(plan)!r}: expected features of each device '
      'where config.strategy.offload_to names some'
    )
  shares, devices = config.strategy.shares, mesh.shape[mesh_lib.MODEL]
  if config.strategy.offload_to:  # in no mesh: the offload pool checks its own
    return
  if shares and len(shares) != devices:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {devices}, one for '
      'each device along config.mesh.model'
    )


class ChannelSplitStep(sync.SyncStep):
  """Sums over 'data'; over 'model', each device trains its own channels.

  Of a split kernel it has them alone, with what the optimizer keeps of them,
  and neither weights nor gradients travel (`kernels`). Everything else is
  computed by all devices of the axis 'model', and the first device's result
  counts: unlike devices round differently, and weights must stay the same
  everywhere. With the plan 'apart' nothing is split and no gradient travels:
  devices of one kind, which round alike, each train the network by themselves.
  Where the first layers are computed by batch, or all (`rows`), gradients are
  sums of all devices' shares.
  """

  def __init__(self, config, specs, order=()):
    """Prepares the strategy; arguments as for `SyncStep`."""
    super().__init__(config, specs, order)
    self._plan = plan_lib.from_config(config)
    self._apart = config.strategy.plan == plan_lib.APART
    self._row_multiple = plan_lib.row_multiple(config)
    # Features by convolution; of split ones, the kernel's path to the features
    # of each device.
    self._features, self._kernels = {}, {}

  def init_fn(self, init):
    """(weights) -> a new state; a device holds its channels of a split kernel.

    Raises:
      ConfigError: if the plan names a layer that the network does not have.
    """

    def record(layer, convolve, x, kernel):
      self._features[layer] = kernel.shape[-1]
      return convolve(x, kernel)

    with convolutions.computed_by(record):
      jax.eval_shape(lambda: init())  # not what was traced for `init` before
    plan_lib.check_layers(self._plan, self._features)
    return lambda weights=(): kernels.divided(init(weights), self._kernels)

  def abstract_state(self, abstract_replica):
    """The abstract state of a run; split kernels are divided over 'model'."""
    mesh = _mesh(abstract_replica)
    for layer, features in self._features.items():
      counts = self._plan.counts(layer, features, mesh.shape[mesh_lib.MODEL])
      if counts is not None:
        self._kernels[f'{layer}/kernel'] = counts
    return kernels.abstract(abstract_replica, self._kernels, mesh)

  def eval_state_fn(self, abstract_replica):
    """The run's weights, with all channels on each device."""

    def trees(state):
      return state.params, state.stats, state.average

    join = self._join_fn(trees(abstract_replica))

    def eval_state(state):
      params, stats, average = join(trees(state))
      return state_lib.TrainState(state.step, params, stats, (), average)

    return eval_state if self._kernels else lambda state: state

  def checkpoint_layout(self, abstract_replica):
    """Checkpoints hold whole kernels: a run may go on with another split."""
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

  def wrap_shard_step(self, shard):
    """One device's part of a step, from its own channels of split kernels."""

    def split_step(params, stats, step, batch):
      devices = lax.axis_size(mesh_lib.MODEL)
      rows = len(batch['row']) // self.micro_batches()
      self._check_rows(devices, rows)
      params = kernels.surrounded(params, self._kernels)
      return shard(params, stats, step, batch)

    return split_step

  def accumulate(self, compute, batch):
    """Sums over micro-batches, see `SyncStep`; of each, this device's rows."""
    counts = self._plan.rows

    def compute_rows(micro_batch):
      return rows_lib.computed(compute, micro_batch, counts)

    is_divided = counts and lax.axis_size(mesh_lib.MODEL) > 1
    return super().accumulate(compute_rows if is_divided else compute, batch)

  def reduce(self, gradients, metrics):
    """Sums over data; over 'model', what all devices have computed.

    Args:
      gradients: like the whole parameters; that of a split kernel holds this
        device's channels.
      metrics: `step_sums.Metrics`. The first device's are taken, but for what
        is of a device's own rows.

    Returns:
      gradients, of a split kernel this device's part (with the plan 'apart',
      all are the device's own); metrics.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
    counts = [self._kernels.get(mesh_lib.path_name(path)) for path, _ in leaves]
    local = [
      x if n is None else self._unshared(split_operation.own_part(x, n))
      for n, (_, x) in zip(counts, leaves, strict=True)
    ]
    summed, metrics = super().reduce(tree.unflatten(local), self._local_metrics(metrics))
    summed = jax.tree.leaves(summed)
    metrics, metrics_tree = jax.tree.flatten(metrics)
    # In the dtype and the buckets that the config names, like `SyncStep`.
    wires = [x if x.dtype == jnp.float64 else x.astype(self._dtype) for x in summed]
    if self._apart:
      metrics = self._sums(metrics)
    else:
      wires, metrics = self._complete(wires, counts, metrics)
    gradients = [w.astype(x.dtype) for w, x in zip(wires, summed, strict=True)]
    return tree.unflatten(gradients), metrics_tree.unflatten(metrics)

  def sum_scores(self, sums):
    """Sums an evaluation; all devices get those of the first of 'model'."""
    sums = jax.tree.map(_first_device, sums)
    return lax.psum(sums, (*mesh_lib.BATCH, mesh_lib.MODEL))

  def of_whole_batch(self, outputs, rows):
    """The outputs; their gradient is shared out if layers are by batch."""
    if not self._plan.by_batch:
      return outputs
    if len(outputs) < rows:
      raise config_lib.ConfigError(
        'config.strategy.plan: expected a layer after those by batch; '
        f"'{plan_lib.ROWS}=...' gives all layers by batch"
      )
    return rows_lib.shared(outputs)

  def local_vote(self, vote):
    """The largest vote of devices that have the same images."""
    return lax.pmax(vote, mesh_lib.MODEL)

  @contextlib.contextmanager
  def convolution_context(self):
    """In this context, a model that is applied has its convolutions split.

    Raises:
      ConfigError: if the network cannot divide its batch as planned.
    """
    maps, plan = parts.Parts(), self._plan
    rows = rows_lib.Rows(plan.by_batch, is_of_rows=bool(plan.rows))

    def convolve_split(layer, convolve, x, kernel):
      counts = self._kernels.get(f'{layer}/kernel')
      x, is_summed = rows.operand(layer, x, counts is not None)
      if counts is None:
        return convolve(x, kernel)
      return maps.convolve(convolve, x, kernel, counts, sums=not is_summed)

    with rows_lib.checked(rows), convolutions.computed_by(convolve_split, maps.apply):
      yield

  def _join_fn(self, abstract_tree):
    """A part of a run's state -> the same with kernels whole on all devices."""
    return jax.jit(
      lambda tree: kernels.joined(tree, self._kernels),
      out_shardings=jax.tree.map(lambda s: s.sharding, abstract_tree),
    )

  def _complete(self, wires, counts, metrics):
    """Gives all devices of 'model' what is not split, as the first has it.

    Args:
      wires: gradients; of split kernels, local parts.
      counts: of each gradient the features of each device; None: not split.
      metrics: arrays that are summed together with the gradients.
    """
    wires = list(wires)
    unsplit = [i for i in self._backward if counts[i] is None]
    # Each device has its share of those already, or all have the same.
    is_shared = self._plan.by_batch or self._plan.rows
    mask = (lambda x: x) if is_shared else _first_device
    sums = self._sums([mask(wires[i]) for i in unsplit] + metrics)
    for i, total in zip(unsplit, sums, strict=False):
      wires[i] = total
    return wires, sums[len(unsplit) :]

  def _check_rows(self, devices, rows):
    """Refuses a plan that does not divide a micro-batch of so many rows."""
    multiple, counts = self._row_multiple, self._plan.rows
    if self._plan.by_batch and not rows_lib.divides(devices, rows):
      raise config_lib.ConfigError(
        f'config.strategy.plan: expected {2 * devices} images in a '
        f'micro-batch, or another multiple of {devices}, which divide it, '
        f'not {rows}'
      )
    if not counts or devices == 1:
      return
    is_right = len(counts) == devices and sum(counts) == rows
    if not (is_right and multiple and all(n % multiple == 0 for n in counts)):
      raise config_lib.ConfigError(
        f'config.strategy.plan: {plan_lib.ROWS}={",".join(map(str, counts))}: '
        f'expected {devices} multiples of '
        f'{multiple or "the whole batch (config.model.norm_group=0)"}, '
        f'{rows} in all'
      )

  def _local_metrics(self, metrics: step_sums.Metrics) -> step_sums.Metrics:
    """This device's summands."""
    rows, of_rows, statistics = self._plan.rows, (metrics.weight, metrics.sums), metrics.stats
    if rows:
      share = jnp.asarray(np.array(rows) / sum(rows))
      share = share[lax.axis_index(mesh_lib.MODEL)]
      statistics = jax.tree.map(lambda x: x * share.astype(x.dtype), statistics)
    else:
      share = rows_lib.share if self._plan.by_batch else _first_device
      statistics = jax.tree.map(share, statistics)
      of_rows = jax.tree.map(_first_device, of_rows)
    counts = _first_device(metrics.damaged), _first_device(metrics.votes)
    return step_sums.Metrics(statistics, *of_rows, *counts)

  def _unshared(self, x):
    """A gradient that one device alone has, of the loss's share."""
    return x * lax.axis_size(mesh_lib.MODEL) if self._plan.by_batch else x

  def _sums(self, arrays):
    """Sums over 'model', in few and large collectives."""
    sums = buckets.fused(
      lambda x: lax.psum(x, mesh_lib.MODEL), [x.ravel() for x in arrays], self._size
    )
    return [s.reshape(x.shape) for s, x in zip(sums, arrays, strict=True)]


def _first_device(x):
  """Zeros on all devices of 'model' but the first: a sum gives its value."""
  return jnp.where(lax.axis_index(mesh_lib.MODEL) == 0, x, 0)


def _mesh(abstract_tree):
  return jax.tree.leaves(abstract_tree)[0].sharding.mesh
