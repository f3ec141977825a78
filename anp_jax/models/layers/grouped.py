"""Grouped convolutions, as XLA computes them quickly on a CPU.

XLA's own gradient of a grouped kernel took some two hundred times as long (16
maps of 28 x 28, 256 channels in 32 groups, 3x3, on 2 cores).
"""

from collections.abc import Callable
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from anp_jax.models.layers import sums, windows

# Channels that fill a dense convolution's products.
_BLOCK = 64
# Pixels of a map times those of the result: 2x2 by 2x2.
_FEW_PAIRS = 16


def in_blocks(dense: Callable, x: jax.Array, kernel: jax.Array, groups: int) -> jax.Array:
  """A grouped convolution as dense ones of some groups each.

  A block has its groups' kernels on the diagonal and zeros elsewhere: more
  operations, of a kind that is many times as fast.

  Args:
    dense: convolution of one group, called with (x, kernel).
    x: (batch, height, width, channels).
    kernel: (height, width, channels of a group, features).
    groups: groups of channels.

  Returns:
    (batch, height', width', features).
  """
  height, width, channels, features = kernel.shape
  each = next(
    n for n in range(1, groups + 1) if groups % n == 0 and (n * channels >= _BLOCK or n == groups)
  )
  shape = (height, width, channels, groups // each, each, features // groups)
  diagonal = jnp.einsum('hwcbgf,ge->hwbgcef', kernel.reshape(shape), jnp.eye(each, dtype=x.dtype))
  blocks = diagonal.reshape(
    height, width, groups // each, each * channels, each * features // groups
  )
  parts = jnp.split(x, groups // each, -1)
  return jnp.concatenate([dense(part, blocks[:, :, i]) for i, part in enumerate(parts)], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def depthwise(x: jax.Array, kernel: jax.Array, stride: int, pads: windows.Pads) -> jax.Array:
  """A convolution of each channel by itself, by adding shifted maps.

  Sums are in float32 or wider.

  Args:
    x: (batch, height, width, channels).
    kernel: (height, width, 1, channels).
    stride: pixels, both ways.
    pads: padding of x, from `windows.pads`.

  Returns:
    (batch, height', width', channels), the dtype of x.
  """
  over = windows.Windows(kernel.shape[:2], stride, pads)
  taps = kernel.astype(_wide(x)).reshape(-1, kernel.shape[-1])
  maps = windows.slices(x, over, 0)
  total = sum(m.astype(taps.dtype) * tap for m, tap in zip(maps, taps))
  return total.astype(x.dtype)


def _depthwise_forward(x, kernel, stride, pads):
  return depthwise(x, kernel, stride, pads), (x, kernel)


def _depthwise_backward(stride, pads, saved, dy):
  x, kernel = saved
  over = windows.Windows(kernel.shape[:2], stride, pads)
  wide = _wide(x)
  taps = kernel.astype(wide)

  def term(i, j, dy):
    return dy.astype(wide) * taps[i, j, 0]

  dx = windows.gather_back(term, [dy], [0], x.shape, over).astype(x.dtype)
  return dx, _kernel_gradient(x, dy, over).reshape(kernel.shape).astype(x.dtype)


def _kernel_gradient(x, dy, over):
  """The gradient of a depthwise kernel, (places of the window, channels).

  One image after another, whose maps stay in the cache meanwhile: nine times as
  fast as all at once (16 maps of 28 x 28, 256 channels, 3x3, on 2 cores).
  """
  if has_few_pairs(x, dy):
    return gradient_by_pairs(x, dy, over)
  wide = _wide(x)

  def add(total, image):
    x, dy = image
    maps = windows.slices(x[None], over, 0)
    products = [m[0].astype(wide) * dy.astype(wide) for m in maps]
    return total + jnp.stack([p.sum((0, 1)) for p in products]), None

  zeros = jnp.zeros((over.shape[0] * over.shape[1], x.shape[-1]), wide)
  return jax.lax.scan(add, zeros, (x, dy))[0]


depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def has_few_pairs(x: jax.Array, dy: jax.Array) -> bool:
  """Whether `gradient_by_pairs`, which has these arguments, is quick."""
  return math.prod(x.shape[1:3]) * math.prod(dy.shape[1:3]) <= _FEW_PAIRS


def gradient_by_pairs(x: jax.Array, dy: jax.Array, over: windows.Windows) -> jax.Array:
  """The gradient of a depthwise kernel, from maps of a few pixels.

  Each pixel of a map meets each of the result at one place of the window, or
  at none. Of a 5x5 kernel and 32 maps of 2 x 2 pixels and 1,152 channels this
  took 0.4 ms, image after image 1.3, oneDNN 8 to 11 (2 AVX-512 cores).

  Args:
    x: (batch, height, width, channels).
    dy: (batch, height', width', channels), the gradient of the result.
    over: windows over x.

  Returns:
    (places of the window, channels), float32 or wider.
  """
  batch, *size, channels = x.shape
  pixels = math.prod(size), math.prod(dy.shape[1:3])

  def products(x, dy):
    count = x.shape[1]
    left = x.reshape(1, count, pixels[0], 1, channels).astype(_wide(x))
    right = dy.reshape(1, count, 1, pixels[1], channels).astype(left.dtype)
    return (left * right).reshape(1, count, -1)

  flat = (a.reshape(1, batch, -1) for a in (x, dy))
  pairs = sums.over_rows(products, *flat, platform='cpu')
  place = np.zeros((*over.shape, *size, *dy.shape[1:3]), bool)
  for row, column, i, j in np.ndindex(*over.shape, *dy.shape[1:3]):
    (top, _), (left, _) = over.pads
    pixel = i * over.stride + row - top, j * over.stride + column - left
    if all(0 <= p < n for p, n in zip(pixel, size)):
      place[(row, column, *pixel, i, j)] = True
  place = place.reshape(math.prod(over.shape), -1)
  return jnp.asarray(place, pairs.dtype) @ pairs.reshape(-1, channels)


def _wide(x):
  return jnp.promote_types(x.dtype, jnp.float32)
