"""Convolutions split over unequal devices: each computes some of the channels.

After Marques, Falcao and Alexandre (arXiv 1712.02546). The mesh's axis 'model'
is that of the devices; each has the same images and weights, computes its share
of each convolution's features, and all else as well.
"""

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax import config as config_lib
from anp_jax.parallel import buckets
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import sync
from anp_jax.parallel.channel_split import convolutions
from anp_jax.parallel.channel_split import operation
from anp_jax.parallel.channel_split import plan as plan_lib


def check(config, mesh) -> None:
  """Refuses what is no plan, and shares of other devices than the mesh has.

  Raises:
    ConfigError: naming the key and what would fit.
  """
  plan_lib.from_config(config)
  shares, devices = config.strategy.shares, mesh.shape[mesh_lib.MODEL]
  if config.strategy.helpers:  # in no mesh: the offload pool checks its own
    return
  if shares and len(shares) != devices:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {devices}, one for '
      'each device along config.mesh.model'
    )


class ChannelSplit(sync.Sync):
  """Sums over data; over model each device brings what it alone has computed.

  That is its channels' gradient of a split kernel; all else is computed by all
  devices of the axis 'model', and that of the first counts: unlike devices
  round differently, and weights must stay the same everywhere. With the plan
  'apart' nothing is split and nothing travels: devices of one kind, which round
  alike, each train the network by themselves.
  """

  def __init__(self, config, specs, order=()):
    """As `sync.Sync`."""
    super().__init__(config, specs, order)
    self._plan = plan_lib.from_config(config)
    self._apart = config.strategy.plan == plan_lib.APART
    # Convolutions, and of split ones the kernel with each device's features:
    # filled in as the model is traced, before its gradients are summed.
    self._seen, self._kernels = set(), {}

  def reduce(self, gradients, others):
    """Sums over data, and joins what the devices of 'model' have computed.

    Of a split kernel a device has its own channels' gradient, which is the
    whole one of these; all else is that of the first. With the plan 'apart'
    each device has its own gradients of everything.

    Raises:
      ConfigError: if the plan names a layer that the network does not have.
    """
    plan_lib.check_layers(self._plan, self._seen)
    kernels = self._kernels
    first = lax.axis_index(mesh_lib.MODEL) == 0
    paths, tree = jax.tree_util.tree_flatten_with_path(gradients)
    places = [kernels.get(mesh_lib.path_name(path)) for path, _ in paths]
    found = [
      x if counts is None else operation.part(x, counts)
      for counts, (_, x) in zip(places, paths, strict=True)
    ]
    others = jax.tree.map(lambda x: jnp.where(first, x, 0), others)
    summed, others = super().reduce(tree.unflatten(found), others)
    found = jax.tree.leaves(summed)
    rest, others_tree = jax.tree.flatten(others)
    # As `Sync` sends them: in the dtype and the buckets that the config names.
    wires = [
      x if x.dtype == jnp.float64 else x.astype(self._dtype) for x in found
    ]
    if self._apart:
      totals = self._totals(rest)
    else:
      whole = [i for i in self._backward if places[i] is None]
      split = [i for i in self._backward if places[i] is not None]
      totals = self._totals(
        [jnp.where(first, wires[i], 0) for i in whole] + rest
      )
      for i, total in zip(whole, totals, strict=False):
        wires[i] = total
      totals = totals[len(whole) :]
      parts = buckets.fused(
        lambda x: lax.all_gather(x, mesh_lib.MODEL),
        [wires[i].ravel() for i in split],
        self._size,
      )
      for i, part in zip(split, parts, strict=True):
        wires[i] = operation.joined(
          part.reshape(-1, *wires[i].shape), places[i]
        )
    gradients = [w.astype(x.dtype) for w, x in zip(wires, found, strict=True)]
    return tree.unflatten(gradients), others_tree.unflatten(totals)

  def scores(self, sums):
    """Those of the first device of 'model': all must read the same."""
    first = lax.axis_index(mesh_lib.MODEL) == 0
    sums = jax.tree.map(lambda x: jnp.where(first, x, 0), sums)
    return lax.psum(sums, (*mesh_lib.BATCH, mesh_lib.MODEL))

  def voted(self, vote):
    """The largest of devices whose images are the same, but not the process."""
    return lax.pmax(vote, mesh_lib.MODEL)

  def convolutions(self):
    """In this context, a model that is applied has its convolutions split."""
    return convolutions.computed_by(self._convolve)

  def _convolve(self, layer, convolve, x, kernel):
    self._seen.add(layer)
    counts = self._plan.counts(
      layer, kernel.shape[-1], lax.axis_size(mesh_lib.MODEL)
    )
    if counts is None:
      return convolve(x, kernel)
    self._kernels[f'{layer}/kernel'] = counts
    return operation.split(convolve, x, kernel, counts)

  def _totals(self, arrays):
    """Sums over 'model', few and large."""
    totals = buckets.fused(
      lambda x: lax.psum(x, mesh_lib.MODEL), [x.ravel() for x in arrays],
      self._size,
    )  # fmt: skip
    return [t.reshape(x.shape) for t, x in zip(totals, arrays, strict=True)]
