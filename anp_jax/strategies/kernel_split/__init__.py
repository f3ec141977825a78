"""Convolutions split over unequal devices: each computes some of the channels.

After Marques, Falcao and Alexandre (arXiv 1712.02546). The mesh's axis 'model'
is that of the devices; each has the same images and weights, computes its share
of each convolution's features, and all else as well.
"""

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from anp_jax import config as config_lib
from anp_jax import mesh as mesh_lib
from anp_jax.models import layers
from anp_jax.strategies import sync
from anp_jax.strategies.kernel_split import operation
from anp_jax.strategies.kernel_split import plan as plan_lib


def check(config, mesh) -> None:
  """Refuses shares of another number of devices than the mesh has.

  Raises:
    ConfigError: naming the key and what would fit.
  """
  shares, devices = config.strategy.shares, mesh.shape[mesh_lib.MODEL]
  if shares and len(shares) != devices:
    raise config_lib.ConfigError(
      f'config.strategy.shares={tuple(shares)}: expected {devices}, one for '
      'each device along config.mesh.model'
    )


class KernelSplit(sync.Sync):
  """Sums over data and model: each device brings what it alone has computed.

  That is its channels' gradient of a split kernel; all else is computed by all
  devices of the axis 'model', and that of the first counts: unlike devices
  round differently, and weights must stay the same everywhere.
  """

  _summed = (mesh_lib.DATA, mesh_lib.MODEL)

  def __init__(self, config, specs, order=()):
    """As `sync.Sync`."""
    super().__init__(config, specs, order)
    self._plan = plan_lib.Shares(
      config.strategy.shares, config.strategy.split_layers
    )
    # Parameters of which a device has its own part: filled in as the model is
    # traced, before its gradients are summed.
    self._kernels = set()

  def reduce(self, gradients, others):
    """Sums over data and model; see `sync.Sync.reduce`."""
    first = lax.axis_index(mesh_lib.MODEL) == 0

    def own(path, x):
      is_mine = mesh_lib.path_name(path) in self._kernels
      return x if is_mine else jnp.where(first, x, 0)

    gradients = jax.tree_util.tree_map_with_path(own, gradients)
    others = jax.tree.map(lambda x: jnp.where(first, x, 0), others)
    return super().reduce(gradients, others)

  def voted(self, vote):
    """The largest of devices whose images are the same, but not the process."""
    return lax.pmax(vote, mesh_lib.MODEL)

  def convolutions(self):
    """In this context, a model that is applied has its convolutions split."""

    def intercept(following, arguments, keywords, context):
      module, method = context.module, context.method_name
      if isinstance(module, layers.Conv) and method == 'convolve':
        x, kernel, padding = arguments
        return self._split(module, lambda *a: following(*a, padding), x, kernel)
      if not isinstance(module, nn.Conv) or method != '__call__':
        return following(*arguments, **keywords)
      # A user's own network: Flax's layer has a field for what convolves.
      own = module.conv_general_dilated
      whole = own or lax.conv_general_dilated

      def convolve(x, kernel, *more, feature_group_count=1, **settings):
        def one(x, kernel):
          return whole(
            x, kernel, *more, feature_group_count=feature_group_count,
            **settings,
          )  # fmt: skip

        if feature_group_count > 1:  # a feature sees some of the channels
          return one(x, kernel)
        return self._split(module, one, x, kernel)

      object.__setattr__(module, 'conv_general_dilated', convolve)
      try:
        return following(*arguments, **keywords)
      finally:  # the layer may be called again
        object.__setattr__(module, 'conv_general_dilated', own)

    return nn.intercept_methods(intercept)

  def _split(self, module, convolve, x, kernel):
    layer = '/'.join(module.path)
    counts = self._plan.counts(
      layer, kernel.shape[-1], lax.axis_size(mesh_lib.MODEL)
    )
    if counts is None:
      return convolve(x, kernel)
    self._kernels.add(f'{layer}/kernel')
    return operation.split(convolve, x, kernel, counts)
