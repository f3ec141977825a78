"""Maximum and mean over windows."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from anp_jax.models.layers import onednn_layers, windows


def max_pool(
  x: jax.Array,
  window: int = 3,
  stride: int = 2,
  padding: windows.Padding = 1,
  platform: str = 'cpu',
) -> jax.Array:
  """Largest value of each window; the first of equal ones gets the gradient.

  Where a window has a NaN its result is NaN, and the gradient may go anywhere.

  Args:
    x: (batch, height, width, channels), any float dtype.
    window: pixels a side.
    stride: pixels.
    padding: see `windows.pads`; its value is minus infinity.
    platform: platform of the device that computes.

  Returns:
    (batch, height', width', channels), the dtype of x.
  """
  over = _windows(x, window, stride, padding)
  if platform != 'tpu':
    return _max_pool(x, x.shape, over)
  return nn.max_pool(x, over.shape, (stride, stride), over.pads)


def avg_pool(
  x: jax.Array,
  window: int = 3,
  stride: int = 2,
  padding: windows.Padding = 0,
  platform: str = 'cpu',
) -> jax.Array:
  """Mean of each window; padding counts as zeros.

  Arguments and result are those of `max_pool`.
  """
  over = _windows(x, window, stride, padding)
  if onednn_layers.takes_mean_pool(x, over, platform):
    return onednn_layers.mean_pool(x, x.shape, over)
  if platform.startswith('cpu'):
    return _avg_pool(x, x.shape, over)
  return nn.avg_pool(x, over.shape, (stride, stride), over.pads)


def _windows(x, window, stride, padding):
  square = (window, window)
  pads = windows.pads(padding, x.shape[1:3], square, stride)
  return windows.Windows(square, stride, pads)


# XLA's gradient of a maximum on a CPU, select-and-scatter, took 100 ms where
# the maximum of shifted slices took 12 (8x112x112x64, 2 cores). jnp.maximum's
# own gradient would share that of equal values out, where XLA's and PyTorch's
# give it to the first: hence a gradient by hand. It needs one byte a window.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_pool(x, _, over):
  slices = windows.slices(x, over, -jnp.inf)
  return functools.reduce(jnp.maximum, slices)


def _max_pool_forward(x, shape, over):
  y = _max_pool(x, shape, over)
  slices = windows.slices(x, over, -jnp.inf)
  dtype = jnp.uint8 if len(slices) < 255 else jnp.int32
  first = jnp.zeros(y.shape, dtype)
  for place, value in reversed(list(enumerate(slices))):
    first = jnp.where(value == y, jnp.asarray(place, dtype), first)
  return y, first


def _max_pool_backward(shape, over, first, dy):
  def term(i, j, first, dy):
    is_first = first == i * over.shape[1] + j
    return jnp.where(is_first, dy, jnp.zeros((), dy.dtype))

  fills = (math.prod(over.shape), 0)  # a place that is none sends nothing
  return (windows.gather_back(term, (first, dy), fills, shape, over),)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _avg_pool(x, _, over):
  slices = windows.slices(x, over, 0)
  return functools.reduce(jnp.add, slices) / math.prod(over.shape)


def _avg_pool_forward(x, shape, over):
  return _avg_pool(x, shape, over), None


def _avg_pool_backward(shape, over, _, dy):
  share = dy / math.prod(over.shape)
  dx = windows.gather_back(lambda i, j, share: share, [share], [0], shape, over)
  return (dx,)


_avg_pool.defvjp(_avg_pool_forward, _avg_pool_backward)
