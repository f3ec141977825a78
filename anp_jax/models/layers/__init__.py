"""Layers: the one package where a lowering depends on the platform.

Parameters are the same everywhere, and results are to rounding; only the
arithmetic's shape differs. On a CPU gradients are by hand: reverse mode only.
`platform` is the mesh's ('cpu', 'gpu', 'tpu'), handed down by the model, never
read from JAX's default backend.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.config import errors
from anp_jax.models.layers import onednn_layers, windows
from anp_jax.models.layers.activation import gelu, relu, relu6, silu
from anp_jax.models.layers.channelwise import by_channel
from anp_jax.models.layers.convolution import add_bias, convolve
from anp_jax.models.layers.folding import conv_norm
from anp_jax.models.layers.initializers import ONES, ZEROS, Initializer
from anp_jax.models.layers.normalisation import normalise, normalise_relu
from anp_jax.models.layers.pooling import avg_pool, max_pool
from anp_jax.models.layers.squeeze import squeeze_excite

add_bias, gelu, relu, relu6, silu = map(by_channel, (add_bias, gelu, relu, relu6, silu))
avg_pool, max_pool = map(by_channel, (avg_pool, max_pool))

# He et al. 2015 (arXiv 1502.01852), over the fan-out as torchvision does.
kernel_init = Initializer('normal', 2.0, 'fan_out')


class Network(nn.Module):
  """A network, called with (images, train).

  Attributes:
    num_classes: number of logits.
    dtype: dtype of the computation; logits are in param_dtype.
    platform: platform of the mesh, as `models.target` gives it.
  """

  num_classes: int
  _: dataclasses.KW_ONLY
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  platform: str = 'cpu'

  def check_side(self, images: jax.Array, least: int, name: str) -> None:
    """Raises ConfigError for images of fewer pixels a side than the network can read."""
    side = min(images.shape[1:3])
    errors.check(side >= least, 'data.image_size', side, f'{least} or more for {name}')


class NormalisedNetwork(Network):
  """A network with batch norm, whose group, momentum and axis_name are `BatchNorm`'s."""

  _: dataclasses.KW_ONLY
  group: int = 32
  momentum: float = 0.9
  axis_name: str | None = None


def head(network: Network, kernel_init: Callable) -> nn.Dense:
  """A network's linear classifier, to be called within its compact method.

  Its logits are in param_dtype: a loss over a thousand bfloat16 logits is noise.
  """
  types = dict(dtype=network.param_dtype, param_dtype=network.param_dtype)
  return nn.Dense(
    network.num_classes, kernel_init=kernel_init, bias_init=ZEROS, name='head', **types
  )


def parameter(module: nn.Module, name: str, init: Callable, shape: Sequence[int]) -> jax.Array:
  """A parameter of a module, in its param_dtype; `init` makes it with the module.

  Flax's `param` would trace `init` once more to compare the shapes: a third of the
  time that the trace of a ResNet takes.
  """
  if module.has_variable('params', name):
    return module.get_variable('params', name)
  return module.param(name, init, shape, module.param_dtype)


def makers(network: NormalisedNetwork) -> tuple[Callable, Callable]:
  """`Conv` and `BatchNorm` with the dtypes, platform and groups of a network."""
  names = ('dtype', 'param_dtype', 'platform')
  common = {name: getattr(network, name) for name in names}
  groups = {name: getattr(network, name) for name in ('group', 'momentum', 'axis_name')}
  return functools.partial(Conv, **common), functools.partial(BatchNorm, **common, **groups)


class Conv(nn.Module):
  """Convolution; kernel (size, size, in / groups, features).

  Attributes:
    groups: groups of channels, each convolved with its share of the features
      (Xie et al. 2016, arXiv 1611.05431); as many as channels: a depthwise
      convolution.
    padding: see `windows.pads`; None: half of the window, rounded down.
    platform: platform of the mesh; see `convolution.lowering`.
  """

  features: int
  size: int = 1
  stride: int = 1
  padding: Any = None
  groups: int = 1
  use_bias: bool = False
  kernel_init: Any = kernel_init
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  platform: str = 'cpu'

  @nn.compact
  def __call__(self, x):
    """(batch, height, width, in) to (batch, height', width', features).

    Raises:
      ValueError: if channels or features are no multiples of the groups.
    """
    channels, rest = divmod(x.shape[-1], self.groups)
    if rest or self.features % self.groups:
      raise ValueError(
        f'{x.shape[-1]} channels and {self.features} features: expected '
        f'multiples of groups={self.groups}'
      )
    shape = (self.size, self.size, channels, self.features)
    kernel = parameter(self, 'kernel', self.kernel_init, shape)
    x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
    y = self.convolve(x, kernel, self.pixels)
    if not self.use_bias:
      return y
    bias = parameter(self, 'bias', ZEROS, (self.features,))
    return add_bias(y, bias.astype(self.dtype), self.platform)

  @property
  def pixels(self) -> windows.Padding:
    """The padding, as `windows.pads` takes it."""
    return (self.size - 1) // 2 if self.padding is None else self.padding

  def convolve(
    self,
    x: jax.Array,
    kernel: jax.Array,
    padding: windows.Padding,
    after: onednn_layers.After | None = None,
  ) -> jax.Array:
    """Convolves; a strategy may replace this method by `nn.intercept_methods`.

    Args:
      x: (batch, height, width, in).
      kernel: (size, size, in / groups, features), of x's dtype.
      padding: see `windows.pads`.
      after: operations that follow, with a kernel of float32; or None.
    """
    if after is None:
      return convolve(x, kernel, self.stride, padding, self.platform, self.groups)
    pads = windows.pads(padding, x.shape[1:3], kernel.shape[:2], self.stride)
    return onednn_layers.convolve_and(x, kernel, after, self.stride, pads)


@functools.partial(jax.jit, static_argnums=2, inline=True)  # traced once for each shape
def _moved(running, new, momentum):
  """A running statistic after a step whose groups have `new`, (groups, channels)."""
  return momentum * running + (1 - momentum) * new.mean(0)


class BatchNorm(nn.Module):
  """Batch normalisation over groups of a fixed number of examples.

  Groups are contiguous in the global batch, so statistics depend on the config
  and never on the number of devices. Running statistics are the mean over
  groups; a step that runs on several shards averages them with its gradients.
  Ioffe and Szegedy 2015 (arXiv 1502.03167); groups as in Hoffer et al. 2017
  (arXiv 1705.08741).

  Attributes:
    group: examples per group; 0: the whole batch, over `axis_name` if given.
    axis_name: mesh axis over which a global group (group=0) is divided.
    relu: whether a ReLU follows, after what is added.
  """

  group: int = 32
  momentum: float = 0.9
  epsilon: float = 1e-5
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  scale_init: Any = ONES
  axis_name: str | None = None
  platform: str = 'cpu'
  relu: bool = False

  @nn.compact
  def __call__(self, x, train: bool, added=None):
    """(batch, ..., channels) in and out; statistics in param_dtype.

    Args:
      x: map or vectors.
      train: whether the statistics are those of its groups, not the running ones.
      added: summand before the ReLU, like x; or None.

    Raises:
      ValueError: if the batch is not a multiple of the group.
    """
    shape = (x.shape[-1],)
    scale = parameter(self, 'scale', self.scale_init, shape)
    bias = parameter(self, 'bias', ZEROS, shape)
    running_mean = self.variable('batch_stats', 'mean', ZEROS, None, shape, self.param_dtype)
    running_var = self.variable('batch_stats', 'var', ONES, None, shape, self.param_dtype)
    if self.is_initializing():
      return x.astype(self.dtype)  # only the shape counts
    if not train:
      return by_channel(self._scaled)(x, *self.running_factors(), added)
    size = self.group or x.shape[0]
    if x.shape[0] % size:
      raise ValueError(
        f'a batch of {x.shape[0]} images is not a multiple of the batch-norm group of {size}'
      )
    y, mean, var = by_channel(self._normalised)(x, scale, bias, added)
    for running, new in ((running_mean, mean), (running_var, var)):
      running.value = _moved(running.value, new, self.momentum)
    return y

  def running_factors(self) -> tuple[jax.Array, jax.Array]:
    """The factor and the summand of x in evaluation, (channels,) each."""
    scale, bias = (self.get_variable('params', n) for n in ('scale', 'bias'))
    mean, var = (self.get_variable('batch_stats', n) for n in ('mean', 'var'))
    factor = scale * lax.rsqrt(var + self.epsilon)
    return factor, bias - mean * factor

  @nn.nowrap
  def _normalised(self, x, scale, bias, added):
    """The result, and means and variances (groups, channels)."""
    size = self.group or x.shape[0]
    grouped = x.reshape(x.shape[0] // size, -1, x.shape[-1])
    axis_name = None if self.group else self.axis_name
    if axis_name is not None and lax.axis_size(axis_name) == 1:
      axis_name = None
    relu_within = self.relu and added is None
    if axis_name is None and onednn_layers.takes_norm(grouped, scale, relu_within, self.platform):
      y, mean, var = onednn_layers.normalise(grouped, scale, bias, self.epsilon, relu_within)
    else:
      relu_within &= self.platform == 'gpu'
      function = normalise_relu if relu_within else normalise
      y, mean, var = function(grouped, scale, bias, self.epsilon, axis_name, self.platform)
    y = y.reshape(x.shape).astype(self.dtype)
    return (y if relu_within else self._activate(y, added)), mean, var

  @nn.nowrap
  def _scaled(self, x, factor, offset, added):
    return self._activate((x * factor + offset).astype(self.dtype), added)

  @nn.nowrap
  def _activate(self, y, added):
    if added is not None:
      y = added + y
    return relu(y, self.platform) if self.relu else y
