"""Gradients of depthwise kernels, where oneDNN's own are slow."""

import itertools
import math

import jax
import jax.numpy as jnp

from anp_jax.models.layers import grouped, sums, windows
from anp_jax.system import onednn

# The widest depthwise kernel for whose gradient oneDNN has a quick form, of
# maps with channels last.
_QUICK_COLUMNS = 3
# Pixels of a result up to which that gradient is computed by image.
_SMALL_MAP = 16


def kernel_gradient(
  x: jax.Array, kernel: jax.Array, dy: jax.Array, stride: int, pads: windows.Pads
) -> jax.Array | None:
  """The gradient of a depthwise kernel where oneDNN's own is slow.

  Args:
    x: (batch, height, width, channels), float32 or bfloat16.
    kernel: (height, width, 1, channels), likewise.
    dy: (batch, height', width', channels), the gradient of the result.
    stride: pixels, both ways.
    pads: padding of x, ((top, bottom), (left, right)).

  Returns:
    Like kernel; None where oneDNN's own is quick.
  """
  if grouped.has_few_pairs(x, dy):
    over = windows.Windows(kernel.shape[:2], stride, pads)
    dkernel = grouped.gradient_by_pairs(x, dy, over)
    return dkernel.reshape(kernel.shape).astype(kernel.dtype)
  if kernel.shape[1] <= _QUICK_COLUMNS:
    return None
  is_small = math.prod(dy.shape[1:3]) <= _SMALL_MAP
  if is_small and onednn.takes(_image_spec(x, kernel, dy, stride)):
    return _gradient_by_image(x, kernel, dy, stride, pads)
  return _gradient_by_columns(x, kernel, dy, stride, pads)


def _image_spec(x, kernel, dy, stride):
  """The spec of a forward pass over one image that has the channels of all images."""
  channels = x.shape[0] * x.shape[-1]
  spans = [(n - 1) * stride + 1 for n in dy.shape[1:3]]
  sides = [span + k - 1 for span, k in zip(spans, kernel.shape)]
  image, window = (
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in ((1, *sides, channels), (*spans, 1, channels))
  )
  no_pads = (0, 0), (0, 0)
  return onednn.convolution_of('forward', image, window, 1, no_pads, channels)


def _gradient_by_image(x, kernel, dy, stride, pads):
  """The gradient of a depthwise kernel from small maps, by a forward pass.

  Each image's share of it is the depthwise convolution of its map by dy, spread
  over the stride: images are more channels of one image. For a 7x7 kernel and 32
  maps of 4 x 4 pixels and 384 channels this takes 1.4 ms, by columns 5.9 ms (2
  cores with AVX-512).
  """
  spec = _image_spec(x, kernel, dy, stride)
  zero = _zero_after(dy).astype(jnp.float32)

  def placed(maps, shape, *edges):
    maps = maps.astype(jnp.float32)  # shares are added before they are rounded
    maps = jax.lax.pad(maps, zero, ((0, 0, 0), *edges, (0, 0, 0)))
    return maps.transpose(1, 2, 0, 3).reshape(shape)

  sides = [
    (low, (n - 1) * stride + k - size - low, 0)
    for n, k, size, (low, _) in zip(dy.shape[1:3], kernel.shape[:2], x.shape[1:3], pads)
  ]
  image = placed(x, spec.image, *sides)
  window = placed(dy, spec.kernel, *[(0, 0, stride - 1)] * 2)
  result = jax.ShapeDtypeStruct(spec.result, jnp.float32)
  shares = onednn.call(spec, result, image, window)
  shares = shares.reshape(-1, x.shape[0], x.shape[-1])
  total = sums.over_rows(lambda x: x, shares, platform='cpu')
  return total.reshape(kernel.shape).astype(kernel.dtype)


def _gradient_by_columns(x, kernel, dy, stride, pads):
  """The gradient of a wide depthwise kernel, some of its columns at a time.

  oneDNN 3.2 computes it for all columns at once channel by channel: 12.7 ms for
  7x7, 0.25 for three of its columns (4 maps of 28 x 28, 96 channels, one AVX-512
  core).
  """
  columns = kernel.shape[1]
  blocks = -(-columns // _QUICK_COLUMNS)
  edges = [round(i * columns / blocks) for i in range(blocks + 1)]
  zero = _zero_after(dy)
  parts = []
  for first, end in itertools.pairwise(edges):
    part = jax.ShapeDtypeStruct((kernel.shape[0], end - first, *kernel.shape[2:]), kernel.dtype)
    left = pads[1][0] - first
    span = (dy.shape[2] - 1) * stride + end - first
    sides = left, span - x.shape[2] - left
    maps = x
    if not all(0 <= side <= (end - first) // 2 for side in sides):
      # A negative edge cuts pixels that meet none of these columns.
      still = (0, 0, 0)
      maps = jax.lax.pad(x, zero, (still, still, (*sides, 0), still))
      sides = 0, 0
    arguments = maps, part, stride, (pads[0], sides), x.shape[-1]
    spec = onednn.convolution_of('backward_weights', *arguments)
    parts.append(onednn.call(spec, part, maps, dy))
  return jnp.concatenate(parts, 1)


def _zero_after(dy):
  """0, known once a gradient is.

  Padded with a constant, maps would be padded in the forward pass, and kept as
  they are and padded: XLA has no reason to wait, and drops barriers before it
  orders a program.
  """
  return jnp.minimum(jnp.abs(dy[0, 0, 0, 0]), 0)
