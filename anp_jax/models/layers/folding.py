"""A convolution and the batch norm after it, in evaluation one operation."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from anp_jax.models.layers import onednn_layers, windows

if TYPE_CHECKING:
  from anp_jax.models import layers


def conv_norm(
  conv: 'layers.Conv',
  norm: 'layers.BatchNorm',
  x: jax.Array,
  train: bool,
  added: jax.Array | None = None,
) -> jax.Array:
  """A convolution, then batch norm, sum and ReLU; in evaluation one call.

  With running statistics a norm multiplies and adds. oneDNN, where it computes
  the convolution, multiplies the kernel instead, while it brings that into its
  own layout, and adds, applies the ReLU and rounds before it writes a result.
  Elsewhere, and in training, it is `norm(conv(x), train, added)`.

  Args:
    conv: convolution.
    norm: batch norm after it.
    x: (batch, height, width, in).
    train: whether the batch's statistics count, not the running ones.
    added: (batch, height', width', features), added before the ReLU; or None.

  Returns:
    (batch, height', width', features).
  """
  x = x.astype(conv.dtype)
  if train or conv.is_initializing() or not _is_one_call(conv, norm, x, added):
    return norm(conv(x), train, added)
  factor, summand = norm.running_factors()
  if conv.use_bias:
    summand += conv.get_variable('params', 'bias') * factor
  kernel, factor, summand = (
    a.astype(jnp.float32) for a in (conv.get_variable('params', 'kernel'), factor, summand)
  )
  after = onednn_layers.After(factor, summand, added, norm.relu)
  return conv.convolve(x, kernel, conv.pixels, after)


def _is_one_call(conv, norm, x, added):
  shape = (conv.size, conv.size, x.shape[-1], conv.features)
  pads = windows.pads(conv.pixels, x.shape[1:3], shape[:2], conv.stride)
  kernel = jax.ShapeDtypeStruct(shape, x.dtype)
  after = onednn_layers.After(None, None, added, norm.relu)
  return (
    conv.groups == 1
    and jnp.dtype(norm.dtype) == x.dtype
    and onednn_layers.takes_convolution(x, kernel, conv.stride, pads, conv.platform)
    and onednn_layers.takes_convolve_and(x, kernel, after, conv.stride, pads)
  )
