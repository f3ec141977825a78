"""Layers: the one package where a lowering depends on the platform.

Parameters are the same everywhere, and results are to rounding; only the
arithmetic's shape differs. On a CPU gradients are by hand: reverse mode only.
`platform` is the mesh's ('cpu', 'gpu', 'tpu'), handed down by the model, never
read from JAX's default backend.
"""

from typing import Any

from flax import linen as nn
from jax import lax
import jax.numpy as jnp

from anp_jax.models.layers import onednn
from anp_jax.models.layers.activation import relu
from anp_jax.models.layers.convolution import add_bias
from anp_jax.models.layers.convolution import convolve
from anp_jax.models.layers.normalisation import normalise
from anp_jax.models.layers.pooling import avg_pool
from anp_jax.models.layers.pooling import max_pool

__all__ = [
  'BatchNorm', 'Conv', 'add_bias', 'avg_pool', 'convolve', 'max_pool',
  'normalise', 'relu',
]  # fmt: skip

# He et al. 2015 (arXiv 1502.01852), over the fan-out as torchvision does.
kernel_init = nn.initializers.variance_scaling(2.0, 'fan_out', 'normal')


class Conv(nn.Module):
  """Convolution; kernel (size, size, in, features).

  Attributes:
    padding: see `windows.pads`; None: half of the window, rounded down.
    platform: of the mesh's devices; see `convolution.lowering`.
  """

  features: int
  size: int = 1
  stride: int = 1
  padding: Any = None
  use_bias: bool = False
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  platform: str = 'cpu'

  @nn.compact
  def __call__(self, x):
    """(batch, height, width, in) to (batch, height', width', features)."""
    shape = (self.size, self.size, x.shape[-1], self.features)
    kernel = self.param('kernel', kernel_init, shape, self.param_dtype)
    padding = (self.size - 1) // 2 if self.padding is None else self.padding
    y = self.convolve(x.astype(self.dtype), kernel.astype(self.dtype), padding)
    if not self.use_bias:
      return y
    bias = self.param(
      'bias', nn.initializers.zeros_init(), (self.features,), self.param_dtype
    )
    return add_bias(y, bias.astype(self.dtype), self.platform)

  def convolve(self, x, kernel, padding):
    """Convolves; a strategy may replace this by `nn.intercept_methods`."""
    return convolve(x, kernel, self.stride, padding, self.platform)


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
    relu: whether a ReLU follows.
  """

  group: int = 32
  momentum: float = 0.9
  epsilon: float = 1e-5
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  scale_init: Any = nn.initializers.ones_init()
  axis_name: str | None = None
  platform: str = 'cpu'
  relu: bool = False

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
      return self._activate((x * factor + offset).astype(self.dtype))
    size = self.group or x.shape[0]
    if x.shape[0] % size:
      raise ValueError(
        f'a batch of {x.shape[0]} images is not a multiple of the '
        f'batch-norm group of {size}'
      )
    grouped = x.reshape(x.shape[0] // size, -1, x.shape[-1])
    axis_name = None if self.group else self.axis_name
    if axis_name is not None and lax.axis_size(axis_name) == 1:
      axis_name = None
    fused = axis_name is None and onednn.takes_norm(
      grouped, scale, self.relu, self.platform
    )
    if fused:
      y, mean, var = onednn.normalise(
        grouped, scale, bias, self.epsilon, self.relu
      )
    else:
      y, mean, var = normalise(
        grouped, scale, bias, self.epsilon, axis_name, self.platform
      )
    for running, new in ((running_mean, mean), (running_var, var)):
      running.value = self.momentum * running.value + (
        1 - self.momentum
      ) * new.mean(0)
    y = y.reshape(x.shape).astype(self.dtype)
    return y if fused else self._activate(y)

  def _activate(self, y):
    return relu(y, self.platform) if self.relu else y
