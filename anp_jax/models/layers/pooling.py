"""Maximum and mean over windows."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp

from anp_jax.models.layers import windows


def max_pool(
  x, window: int = 3, stride: int = 2, padding=1, platform: str = 'cpu'
):
  """Largest value of each window; of equal ones the first gets the gradient.

  Where a window has a NaN its result is NaN; who gets the gradient is open.

  Args:
    x: (batch, height, width, channels), any float dtype.
    window: pixels a side.
    stride: pixels.
    padding: of minus infinity; see `windows.pads`.
    platform: of the device it is compiled for.

  Returns:
    (batch, height', width', channels), the dtype of x.
  """
  place = _place(x, window, stride, padding)
  if platform == 'cpu':
    return _max_pool(x, x.shape, *place)
  return nn.max_pool(x, place[0], (stride, stride), place[2])


def avg_pool(
  x, window: int = 3, stride: int = 2, padding=0, platform: str = 'cpu'
):
  """Mean of each window; padding counts as zeros.

  Args and returns as `max_pool`.
  """
  place = _place(x, window, stride, padding)
  if platform == 'cpu':
    return _avg_pool(x, x.shape, *place)
  return nn.avg_pool(x, place[0], (stride, stride), place[2])


def _place(x, window, stride, padding):
  square = (window, window)
  return square, stride, windows.pads(padding, x.shape[1:3], square, stride)


# XLA's gradient of a maximum on a CPU, select-and-scatter, took 100 ms where
# the maximum of shifted slices took 12 (8x112x112x64, 2 cores). jnp.maximum's
# own gradient would share that of equal values out, where XLA's and PyTorch's
# give it to the first: hence a gradient by hand. It needs one byte a window.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _max_pool(x, shape, window, stride, around):
  del shape
  slices = windows.slices(x, window, stride, around, -jnp.inf)
  return functools.reduce(jnp.maximum, slices)


def _max_pool_forward(x, shape, window, stride, around):
  y = _max_pool(x, shape, window, stride, around)
  slices = windows.slices(x, window, stride, around, -jnp.inf)
  dtype = jnp.uint8 if len(slices) < 255 else jnp.int32
  first = jnp.zeros(y.shape, dtype)
  for place, value in reversed(list(enumerate(slices))):
    first = jnp.where(value == y, jnp.asarray(place, dtype), first)
  return y, first


def _max_pool_backward(shape, window, stride, around, first, dy):
  def part(i, j, first, dy):
    return jnp.where(first == i * window[1] + j, dy, jnp.zeros((), dy.dtype))

  arrays, nowhere = (first, dy), (math.prod(window), 0)
  dx = windows.gather_back(part, arrays, nowhere, shape, window, stride, around)
  return (dx,)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _avg_pool(x, shape, window, stride, around):
  del shape
  slices = windows.slices(x, window, stride, around, 0)
  return functools.reduce(jnp.add, slices) / math.prod(window)


def _avg_pool_forward(x, shape, window, stride, around):
  return _avg_pool(x, shape, window, stride, around), None


def _avg_pool_backward(shape, window, stride, around, saved, dy):
  del saved
  share = dy / math.prod(window)
  dx = windows.gather_back(
    lambda i, j, share: share, [share], [0], shape, window, stride, around
  )
  return (dx,)


_avg_pool.defvjp(_avg_pool_forward, _avg_pool_backward)
