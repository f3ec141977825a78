"""Gradients of depthwise kernels, where oneDNN's own are slow."""

import itertools

import jax
import jax.numpy as jnp

from anp_jax.models.layers import grouped, windows
from anp_jax.system import onednn

# The widest depthwise kernel for whose gradient oneDNN has a quick form, of
# maps with channels last.
_QUICK_COLUMNS = 3


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
  return _gradient_by_columns(x, kernel, dy, stride, pads)


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
