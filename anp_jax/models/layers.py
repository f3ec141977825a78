"""Layers: the one room where an operation's lowering depends on the platform.

Parameters and results are the same everywhere; only the arithmetic's shape
differs. `platform` is the mesh's ('cpu', 'gpu', 'tpu'), handed down by the
model, never read from JAX's default backend.
"""

import functools
from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

# He et al. 2015 (arXiv 1502.01852), over the fan-out as torchvision does.
kernel_init = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')

# The largest map, in pixels, on which gathering patches beats XLA's own CPU
# convolution: measured 246 against 1 GF/s at 2x2, 142 against 83 at 4x4, and
# slower from 16x16 on (float32, 2 AVX-512 cores).
_PATCHES_UP_TO = 64


def convolve(x, kernel, stride: int = 1, padding: int = 0, platform='cpu'):
  """Two-dimensional convolution without bias.

  Args:
    x: (batch, height, width, channels), any float dtype.
    kernel: (height, width, channels, features), the dtype of x.
    stride: pixels, both ways.
    padding: pixels of zeros on each side.
    platform: of the device it is compiled for.

  Returns:
    (batch, height', width', features), the dtype of x.
  """
  if platform == 'cpu':
    rows, columns = kernel.shape[:2]
    out = [
      (n + 2 * padding - k) // stride + 1
      for n, k in zip(x.shape[1:3], (rows, columns))
    ]
    if rows == columns == 1 and not padding:
      # XLA's weight gradient of a 1x1 convolution runs at 7-12 GF/s on a CPU,
      # the matrix product's at 45.
      return x[:, ::stride, ::stride] @ kernel[0, 0]
    if out[0] * out[1] <= _PATCHES_UP_TO:
      patches = _patches(x, rows, columns, stride, padding, out)
      return patches @ kernel.reshape(-1, kernel.shape[-1])
  return lax.conv_general_dilated(
    x,
    kernel,
    (stride, stride),
    ((padding, padding), (padding, padding)),
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


def max_pool(x, window: int = 3, stride: int = 2, padding: int = 1,
             platform='cpu'):  # fmt: skip
  """Largest value of each window.

  Args:
    x: (batch, height, width, channels), any float dtype.
    window: pixels a side.
    stride: pixels.
    padding: pixels of minus infinity on each side.
    platform: of the device it is compiled for.

  Returns:
    (batch, height', width', channels), the dtype of x.
  """
  if platform != 'cpu':
    return nn.max_pool(
      x, (window, window), (stride, stride), ((padding, padding),) * 2
    )
  # The gradient of a maximum of shifted slices took 12 ms where XLA's
  # select-and-scatter took 100 (8x112x112x64).
  out = [(n + 2 * padding - window) // stride + 1 for n in x.shape[1:3]]
  slices = _shifted(x, window, window, stride, padding, out, -jnp.inf)
  return functools.reduce(jnp.maximum, slices)


class Conv(nn.Module):
  """Convolution without bias; kernel (height, width, in, features)."""

  features: int
  size: int = 1
  stride: int = 1
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  platform: str = 'cpu'

  @nn.compact
  def __call__(self, x):
    """(batch, height, width, in) to (batch, height', width', features)."""
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', kernel_init, shape, self.param_dtype)
    return convolve(
      x.astype(self.dtype),
      kernel.astype(self.dtype),
      self.stride,
      (self.size - 1) // 2,
      self.platform,
    )


class BatchNorm(nn.Module):
  """Batch normalisation over groups of a fixed number of examples.

  Groups are contiguous in the global batch, so statistics depend on the config
  and never on the number of devices. Running statistics are the mean over
  groups; a step that runs on several shards averages them with its gradients.
  Ioffe and Szegedy 2015 (arXiv 1502.03167); groups as in Hoffer et al. 2017
  (arXiv 1705.08741).

  Attributes:
    group: examples a group; 0: all of the batch, over `axis_name` if given.
    axis_name: mesh axis over which a global group (group=0) is divided.
  """

  group: int = 32
  momentum: float = 0.9
  epsilon: float = 1e-5
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  scale_init: Any = nn.initializers.ones_init()
  axis_name: str | None = None

  @nn.compact
  def __call__(self, x, train: bool):
    """(batch, ..., channels) in and out; statistics in param_dtype.

    Raises:
      ValueError: if the batch is not a multiple of the group.
    """
    shape = (x.shape[-1],)
    scale = self.param('scale', self.scale_init, shape, self.param_dtype)
    bias = self.param(
      'bias', nn.initializers.zeros_init(), shape, self.param_dtype
    )
    running_mean = self.variable(
      'batch_stats', 'mean', jnp.zeros, shape, self.param_dtype
    )
    running_var = self.variable(
      'batch_stats', 'var', jnp.ones, shape, self.param_dtype
    )
    if not train or self.is_initializing():
      factor = scale * lax.rsqrt(running_var.value + self.epsilon)
      offset = bias - running_mean.value * factor
      return (x * factor + offset).astype(self.dtype)
    size = self.group or x.shape[0]
    if x.shape[0] % size:
      raise ValueError(
        f'a batch of {x.shape[0]} images is not a multiple of the '
        f'batch-norm group of {size}'
      )
    grouped = x.reshape(x.shape[0] // size, -1, x.shape[-1])
    axis_name = None if self.group else self.axis_name
    y, mean, var = normalise(grouped, scale, bias, self.epsilon, axis_name)
    for running, new in ((running_mean, mean), (running_var, var)):
      running.value = self.momentum * running.value + (
        1 - self.momentum
      ) * new.mean(0)
    return y.reshape(x.shape).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalise(x, scale, bias, epsilon: float, axis_name: str | None = None):
  """Normalises each group by its own mean and variance.

  The gradient is written by hand in two passes over x; autodiff makes many
  (28 ms against 4.4 for 8x112x112x64 on 2 CPU cores). No gradient flows
  through the returned statistics, which only feed running averages.

  Args:
    x: (groups, rows, channels), any float dtype.
    scale: (channels,).
    bias: (channels,).
    epsilon: added to the variance.
    axis_name: mesh axis whose devices share each group, or None.

  Returns:
    y: like x; mean and variance (biased): (groups, channels), float32 or wider.
  """
  return _normalise_forward(x, scale, bias, epsilon, axis_name)[0]


def _normalise_forward(x, scale, bias, epsilon, axis_name):
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean = _group_mean(wide, axis_name)
  # One pass: E[x^2] - E[x]^2, kept from falling below 0 by rounding.
  var = _group_mean(jnp.square(wide), axis_name) - jnp.square(mean)
  var = jnp.maximum(var, 0)
  inverse = lax.rsqrt(var + epsilon)
  factor = inverse * scale
  y = wide * factor[:, None] + (bias - mean * factor)[:, None]
  return (y.astype(x.dtype), mean, var), (x, mean, inverse, scale)


def _normalise_backward(epsilon, axis_name, saved, cotangents):
  del epsilon
  x, mean, inverse, scale = saved
  dy = cotangents[0].astype(mean.dtype)
  unit = (x.astype(mean.dtype) - mean[:, None]) * inverse[:, None]
  sum_dy = dy.sum(1)
  sum_dy_unit = (dy * unit).sum(1)
  mean_dy = _across(sum_dy / x.shape[1], axis_name)
  mean_dy_unit = _across(sum_dy_unit / x.shape[1], axis_name)
  dx = (dy - mean_dy[:, None] - unit * mean_dy_unit[:, None]) * (
    (inverse * scale)[:, None]
  )
  dscale = sum_dy_unit.sum(0).astype(scale.dtype)
  return dx.astype(x.dtype), dscale, sum_dy.sum(0).astype(scale.dtype)


normalise.defvjp(_normalise_forward, _normalise_backward)


def _group_mean(x, axis_name):
  return _across(x.mean(1), axis_name)


def _across(x, axis_name):
  return x if axis_name is None else lax.pmean(x, axis_name)


def _shifted(x, rows, columns, stride, padding, out, fill):
  """The window's positions as strided slices, each (batch, *out, channels)."""
  around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
  x = jnp.pad(x, around, constant_values=fill)
  return [
    x[
      :,
      i : i + stride * (out[0] - 1) + 1 : stride,
      j : j + stride * (out[1] - 1) + 1 : stride,
    ]
    for i in range(rows)
    for j in range(columns)
  ]


def _patches(x, rows, columns, stride, padding, out):
  slices = _shifted(x, rows, columns, stride, padding, out, 0)
  return jnp.concatenate(slices, axis=-1)
