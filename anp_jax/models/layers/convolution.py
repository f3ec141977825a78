"""Convolution, lowered as the platform computes it best."""

from collections.abc import Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.models.layers import grouped, onednn_layers, sums, windows

# The most pixels of a result for which gathering patches beats a CPU's own
# convolution: 181 against 2 GF/s at 2x2 (512 channels), 195 against 228 at 4x4
# (256), 220 against 253 at 7x7 (float32, 2 AVX-512 cores).
_PATCHES_UP_TO = 4
# Rows from which a product over all of them is computed in halves.
_TALL = 4096


def convolve(
  x: jax.Array,
  kernel: jax.Array,
  stride: int = 1,
  padding: windows.Padding = 0,
  platform: str = 'cpu',
  groups: int = 1,
) -> jax.Array:
  """Two-dimensional convolution without bias.

  Args:
    x: (batch, height, width, channels), any float dtype.
    kernel: (height, width, channels of a group, features), the dtype of x.
    stride: pixels, both ways.
    padding: see `windows.pads`; its value is zero.
    platform: 'cpu', 'cpu_onednn', 'gpu' or 'tpu'; see `models.target`.
    groups: groups of channels, each convolved with its share of the features.

  Returns:
    (batch, height', width', features), the dtype of x.
  """
  window = kernel.shape[:2]
  pads = windows.pads(padding, x.shape[1:3], window, stride)
  return _convolve(x, kernel, stride, pads, platform, groups)


# A network has many convolutions of few shapes: each is traced once.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _convolve(x, kernel, stride, pads, platform, groups):
  window = kernel.shape[:2]
  if onednn_layers.takes_convolution(x, kernel, stride, pads, platform, groups):
    return onednn_layers.convolve(x, kernel, stride, pads, groups)
  if groups > 1 and not platform.startswith('cpu'):
    return _library(x, kernel, stride, pads, groups)
  if groups > 1 and groups == x.shape[-1] == kernel.shape[-1]:
    return grouped.depthwise(x, kernel, stride, pads)
  if groups > 1:
    return grouped.in_blocks(
      lambda x, kernel: _convolve(x, kernel, stride, pads, platform, 1), x, kernel, groups
    )
  kind = lowering(x.shape, kernel.shape, stride, pads, platform)
  if kind == 'product':
    return _product(x[:, ::stride, ::stride], kernel[0, 0])
  if kind == 'patches':
    patches = jnp.concatenate(windows.slices(x, windows.Windows(window, stride, pads), 0), axis=-1)
    return _product(patches, kernel.reshape(-1, kernel.shape[-1]))
  if kind == 'space_to_depth':
    return _library(*_space_to_depth(x, kernel, pads), 1, ((0, 0), (0, 0)))
  if kind == 'barrier':
    return _behind_barrier(x, kernel, stride, pads)
  return _library(x, kernel, stride, pads)


def lowering(
  shape: Sequence[int], kernel_shape: Sequence[int], stride: int, pads: windows.Pads, platform: str
) -> str:
  """The name of the way in which XLA computes a convolution.

  On a CPU with oneDNN, `onednn_layers.takes_convolution` is asked first.

  | where | what | because |
  |---|---|---|
  | GPU, TPU | library | cuDNN and the matrix unit need no help |
  | the same, few channels, stride 2 | space_to_depth | 3 fill 3 of a TPU's 128 lanes; \
ResNet-50's step on an H200: 5 % less |
  | CPU, 1x1 | product | XLA's weight gradient: 7 GF/s, the product's 150 |
  | CPU, up to 2x2 results | patches | XLA's convolution: 2 GF/s, patches 180 |
  | CPU, else | barrier | XLA's own, its gradients kept apart from neighbours |

  Grouped ones on a CPU are those of `grouped`, and the library's elsewhere.

  Args:
    shape: (batch, height, width, channels).
    kernel_shape: (height, width, channels, features).
    stride: pixels, both ways.
    pads: padding, from `windows.pads`.
    platform: 'cpu', 'gpu', 'tpu'.

  Returns:
    'library', 'space_to_depth', 'product', 'patches' or 'barrier'.
  """
  window = kernel_shape[0], kernel_shape[1]
  if not platform.startswith('cpu'):
    few = stride == 2 and shape[-1] <= 4 and min(window) > 2
    return 'space_to_depth' if few else 'library'
  if window == (1, 1) and pads == ((0, 0), (0, 0)):
    return 'product'
  rows, columns = windows.size(shape[1:3], windows.Windows(window, stride, pads))
  return 'patches' if rows * columns <= _PATCHES_UP_TO else 'barrier'


def _library(x, kernel, stride, pads, groups=1):
  return lax.conv_general_dilated(
    x,
    kernel,
    (stride, stride),
    pads,
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    feature_group_count=groups,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _behind_barrier(x, kernel, stride, pads):
  return _library(x, kernel, stride, pads)


def _behind_barrier_forward(x, kernel, stride, pads):
  return _library(x, kernel, stride, pads), (x, kernel)


def _behind_barrier_backward(stride, pads, saved, dy):
  # Barriers: XLA transposes both operands of a weight gradient, and would
  # compute the normalisation before (and after) once more inside that copy,
  # pixel by pixel against the grain of memory.
  x, kernel = saved
  x, dy = lax.optimization_barrier((x, dy))
  return _gradients(x, kernel, dy, stride, pads)


_behind_barrier.defvjp(_behind_barrier_forward, _behind_barrier_backward)


def _gradients(x, kernel, dy, stride: int, pads):
  """A convolution's gradients, in the form that XLA computes quickly on a CPU.

  JAX gives them with axes in another order, and XLA brings these into the one
  that its fast path takes, but not within a branch or a loop: there the same
  gradients took twenty-five times as long. So they are in that order here, and
  barriers keep XLA from turning it back.

  Args:
    x: (batch, height, width, channels).
    kernel: (height, width, channels, features).
    dy: (batch, height', width', features).
    stride: pixels, both ways.
    pads: padding of x, ((top, bottom), (left, right)).

  Returns:
    Those of x and of the kernel.
  """
  spans = [(n - 1) * stride + 1 for n in dy.shape[1:3]]
  sides = list(zip(x.shape[1:3], kernel.shape[:2], spans, pads, strict=True))
  names = ('NHWC', 'HWIO', 'NHWC')
  flipped = lax.rev(kernel, (0, 1)).transpose(0, 1, 3, 2)
  dx = lax.conv_general_dilated(
    dy,
    lax.optimization_barrier(flipped),
    (1, 1),
    [(k - 1 - low, n + low - span) for n, k, span, (low, _) in sides],
    lhs_dilation=(stride, stride),
    dimension_numbers=names,
  )
  turned = x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3)
  dw = lax.conv_general_dilated(
    *lax.optimization_barrier(turned),
    (1, 1),
    [(low, span - n + k - low - 1) for n, k, span, (low, _) in sides],
    rhs_dilation=(stride, stride),
    dimension_numbers=names,
  )
  return dx, dw.transpose(1, 2, 0, 3)


@jax.custom_vjp
def _product(x, kernel):
  """The product of x (..., channels) and kernel (channels, features)."""
  return x @ kernel


def _product_forward(x, kernel):
  return _product(x, kernel), (x, kernel)


def _product_backward(saved, dy):
  x, kernel = saved
  x, dy = lax.optimization_barrier((x, dy))
  dx = dy @ kernel.T
  # The product over all pixels copies its left operand transposed: the one
  # with fewer channels goes there. JAX would always take dy.
  x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
  if x.shape[1] <= dy.shape[1]:
    return dx, _tall_product(x, dy)
  return dx, _tall_product(dy, x).T


def _tall_product(x, y):
  """The product of x (rows, m) transposed and y (rows, n)."""
  if len(x) < _TALL or len(x) % 2:
    return x.T @ y
  # As two halves, one for each of two cores: XLA divides a product by its
  # result, which is small here (156 against 200 GF/s at 25,088 rows, 64 x 256).
  x, y = (a.reshape(2, -1, a.shape[-1]) for a in (x, y))
  return jnp.einsum('prm,prn->pmn', x, y).sum(0)


_product.defvjp(_product_forward, _product_backward)


def _space_to_depth(x, kernel, pads):
  """Space to depth: a stride of 2 becomes four times the channels.

  The same function of the same parameters: the kernel gets a row and a column
  of zeros at its end, then both are cut into squares of 2x2 pixels. As in
  MLPerf's ResNet for TPUs (Kumar et al. 2019, arXiv 1909.09756).
  """
  height, width, channels, features = kernel.shape
  out = windows.size(x.shape[1:3], windows.Windows((height, width), 2, pads))
  rows, columns = -(-height // 2), -(-width // 2)
  edges = ((0, 2 * rows - height), (0, 2 * columns - width), (0, 0), (0, 0))
  kernel = jnp.pad(kernel, edges).reshape(rows, 2, columns, 2, channels, -1)
  kernel = kernel.transpose(0, 2, 1, 3, 4, 5)
  # As much of the map as the windows see, and pixels for the zeros to meet;
  # a negative edge cuts what no window sees.
  rows, columns = (n + k - 1 for n, k in zip(out, (rows, columns)))
  edges = [
    (before, 2 * n - size - before, 0)
    for (before, _), n, size in zip(pads, (rows, columns), x.shape[1:3])
  ]
  zero = jnp.zeros((), x.dtype)
  x = lax.pad(x, zero, ((0, 0, 0), *edges, (0, 0, 0)))
  x = x.reshape(-1, rows, 2, columns, 2, channels).transpose(0, 1, 3, 2, 4, 5)
  return (
    x.reshape(*x.shape[:3], 4 * channels),
    kernel.reshape(*kernel.shape[:2], 4 * channels, features),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias(y: jax.Array, bias: jax.Array, platform: str = 'cpu') -> jax.Array:
  """Adds a bias (features,) to a map (batch, height, width, features)."""
  del platform
  return y + bias


def _add_bias_forward(y, bias, _):
  return y + bias, None


def _add_bias_backward(platform, _, dy):
  wide = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))
  rows = wide.reshape(1, -1, dy.shape[-1])
  dbias = sums.over_rows(lambda x: x, rows, platform=platform)[0]
  return dy, dbias.astype(dy.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)
