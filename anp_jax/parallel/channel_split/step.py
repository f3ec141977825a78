"""What the devices of the axis 'model' do inside a step."""

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax import config as config_lib
from anp_jax.parallel import buckets
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import convolutions
from anp_jax.parallel.channel_split import operation
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.parallel.sync import step as sync


def check(config, mesh) -> None:
  """Refuses a text that is no plan, and shares that do not fit the mesh.

  Raises:
    ConfigError: naming the key and what would fit.
  """
  plan_lib.from_config(config)
  shares, devices = config.strategy.shares, mesh.shape[mesh_lib.MODEL]
  if config.strategy.offload_to:  # in no mesh: the offload pool checks its own
    return
  if shares and len(shares) != devices:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {devices}, one for '
      'each device along config.mesh.model'
    )


class ChannelSplitStep(sync.SyncStep):
  """Sums over 'data'; over 'model', joins what each device alone computed.

  That is the gradient of its channels of a split kernel. Everything else is
  computed by all devices of the axis 'model', and the first device's result
  counts: unlike devices round differently, and weights must stay the same
  everywhere. With the plan 'apart' nothing is split and no gradient travels:
  devices of one kind, which round alike, each train the network by themselves.
  """

  def __init__(self, config, specs, order=()):
    """Prepares the strategy; arguments as for `SyncStep`."""
    super().__init__(config, specs, order)
    self._plan = plan_lib.from_config(config)
    self._apart = config.strategy.plan == plan_lib.APART
    # Paths of the convolutions; of split ones, the kernel's path to the
    # features of each device. Filled in as the model is traced, before its
    # gradients are summed.
    self._layers, self._kernels = set(), {}

  def reduce(self, gradients, extras):
    """Sums over data, and joins what the devices of 'model' have computed.

    Args:
      gradients: like the parameters; that of a split kernel holds this device's
        channels.
      extras: pytree of what else is summed; the first device's counts.

    Returns:
      gradients, complete (with the plan 'apart', each device's own); extras.

    Raises:
      ConfigError: if the plan names a layer that the network does not have.
    """
    plan_lib.check_layers(self._plan, self._layers)
    leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
    counts = [self._kernels.get(mesh_lib.path_name(path)) for path, _ in leaves]
    local = [
      x if n is None else operation.local_part(x, n)
      for n, (_, x) in zip(counts, leaves, strict=True)
    ]
    summed, extras = super().reduce(
      tree.unflatten(local), jax.tree.map(_first_device, extras)
    )
    summed = jax.tree.leaves(summed)
    extras, extras_tree = jax.tree.flatten(extras)
    # In the dtype and the buckets that the config names, like `SyncStep`.
    wires = [
      x if x.dtype == jnp.float64 else x.astype(self._dtype) for x in summed
    ]
    if self._apart:
      extras = self._sums(extras)
    else:
      wires, extras = self._join(wires, counts, extras)
    gradients = [w.astype(x.dtype) for w, x in zip(wires, summed, strict=True)]
    return tree.unflatten(gradients), extras_tree.unflatten(extras)

  def sum_scores(self, sums):
    """Sums an evaluation; all devices get those of the first of 'model'."""
    sums = jax.tree.map(_first_device, sums)
    return lax.psum(sums, (*mesh_lib.BATCH, mesh_lib.MODEL))

  def local_vote(self, vote):
    """The largest vote of devices that have the same images."""
    return lax.pmax(vote, mesh_lib.MODEL)

  def convolution_context(self):
    """In this context, a model that is applied has its convolutions split."""
    return convolutions.computed_by(self._convolve)

  def _convolve(self, layer, convolve, x, kernel):
    self._layers.add(layer)
    counts = self._plan.counts(
      layer, kernel.shape[-1], lax.axis_size(mesh_lib.MODEL)
    )
    if counts is None:
      return convolve(x, kernel)
    self._kernels[f'{layer}/kernel'] = counts
    return operation.split(convolve, x, kernel, counts)

  def _join(self, wires, counts, extras):
    """Completes gradients over 'model', in few and large collectives.

    Args:
      wires: gradients; of split kernels, local parts of one width.
      counts: of each gradient the features of each device; None: not split.
      extras: arrays that are summed together with the gradients.
    """
    wires = list(wires)
    unsplit = [i for i in self._backward if counts[i] is None]
    split = [i for i in self._backward if counts[i] is not None]
    sums = self._sums([_first_device(wires[i]) for i in unsplit] + extras)
    for i, total in zip(unsplit, sums, strict=False):
      wires[i] = total
    gathered = buckets.fused(
      lambda x: lax.all_gather(x, mesh_lib.MODEL),
      [wires[i].ravel() for i in split],
      self._size,
    )
    for i, parts in zip(split, gathered, strict=True):
      parts = parts.reshape(-1, *wires[i].shape)
      wires[i] = operation.join(parts, counts[i])
    return wires, sums[len(unsplit) :]

  def _sums(self, arrays):
    """Sums over 'model', in few and large collectives."""
    sums = buckets.fused(
      lambda x: lax.psum(x, mesh_lib.MODEL), [x.ravel() for x in arrays],
      self._size,
    )  # fmt: skip
    return [s.reshape(x.shape) for s, x in zip(sums, arrays, strict=True)]


def _first_device(x):
  """Zeros on all devices of 'model' but the first: a sum gives its value."""
  return jnp.where(lax.axis_index(mesh_lib.MODEL) == 0, x, 0)
