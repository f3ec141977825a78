"""Synchronous training: every shard's gradient in every update."""

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax import mesh as mesh_lib


class Sync:
  """Explicit sums over the data axis, in a named dtype.

  Left to XLA's partitioner, gradients of a bfloat16 network would be summed in
  bfloat16 whatever the dtype of the parameters.
  """

  def __init__(self, config, specs):
    """Makes the strategy.

    Args:
      config: the run's config.
      specs: PartitionSpec of each parameter.
    """
    self._dtype = jnp.dtype(config.strategy.reduce_dtype)
    self._axes = jax.tree.map(
      _divided_axis, specs, is_leaf=lambda s: isinstance(s, mesh_lib.P)
    )

  def gather(self, params):
    """Whole parameters from this device's part of them."""

    def one(x, axis):
      if axis < 0:
        return x
      return lax.all_gather(x, mesh_lib.DATA, axis=axis, tiled=True)

    return jax.tree.map(one, params, self._axes)

  def reduce(self, gradients):
    """Sums over the data axis; of a divided parameter, this device's part."""

    def one(x, axis):
      # A float64 run is there to be exact: its sums are never narrowed.
      wire = x if x.dtype == jnp.float64 else x.astype(self._dtype)
      if lax.axis_size(mesh_lib.DATA) == 1:
        total = wire  # XLA on a CPU would copy every gradient
      elif axis < 0:
        total = lax.psum(wire, mesh_lib.DATA)
      else:
        total = lax.psum_scatter(
          wire, mesh_lib.DATA, scatter_dimension=axis, tiled=True
        )
      return total.astype(x.dtype)

    return jax.tree.map(one, gradients, self._axes)


def _divided_axis(spec):
  """Which axis of an array its spec divides over the data axis; -1: none."""
  return next((i for i, a in enumerate(spec) if a == mesh_lib.DATA), -1)
