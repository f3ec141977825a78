"""A user's own network: config.model.name='tests.user_network:SmallNet'."""

from typing import Any

from flax import linen as nn
import jax.numpy as jnp

from anp_jax.models import layers


class SmallNet(nn.Module):
  """Two convolutions, one with batch norm, dropout and a classifier."""

  num_classes: int
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  axis_name: str | None = None
  drop: float = 0.5
  norm: bool = True

  @nn.compact
  def __call__(self, images, train: bool):
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    x = nn.Conv(6, (3, 3), 2, name='conv1', **types)(images)
    if self.norm:
      x = nn.BatchNorm(not train, momentum=0.9, axis_name=self.axis_name, name='norm', **types)(x)
    x = nn.relu(x)
    x = nn.relu(nn.Conv(8, (3, 3), 2, name='conv2', **types)(x))
    x = nn.Dropout(self.drop, deterministic=not train)(x.mean((1, 2)))
    return nn.Dense(self.num_classes, name='head', **types)(x)


class PlainNet(SmallNet):
  """Without dropout and batch norm: what it gives depends on no grouping."""

  drop: float = 0.0
  norm: bool = False


class WithoutDropout(SmallNet):
  """What it gives is a function of the batch."""

  drop: float = 0.0


class WithOurLayers(nn.Module):
  """A strided convolution with batch norm, another with a bias."""

  num_classes: int
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images, train: bool):
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    x = layers.Conv(7, 3, 2, name='conv1', **types)(images)
    x = layers.BatchNorm(group=2, name='norm', **types)(x, train)
    x = layers.Conv(10, 3, use_bias=True, name='conv2', **types)(nn.relu(x))
    return nn.Dense(self.num_classes, name='head', **types)(x.mean((1, 2)))


class WithCounter(nn.Module):
  """A classifier that counts its training steps."""

  num_classes: int

  @nn.compact
  def __call__(self, images, train: bool):
    count = self.variable('batch_stats', 'count', lambda: jnp.zeros((), jnp.int32))
    if train:
      count.value += 1
    return nn.Dense(self.num_classes, name='head')(images.mean((1, 2)))


class WithLayersUsedTwice(nn.Module):
  """Convolutions that share weights, and one in two groups of channels."""

  num_classes: int
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images, train: bool):
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    x = nn.Conv(6, (3, 3), 2, name='first', **types)(images)
    for conv in (
      nn.Conv(6, (3, 3), name='plain', **types),
      layers.Conv(6, 3, name='ours', **types),
      nn.Conv(6, (3, 3), feature_group_count=2, name='grouped', **types),
    ):
      x = conv(nn.relu(conv(x)))
    return nn.Dense(self.num_classes, name='head', **types)(x.mean((1, 2)))


class WithMadeKernels(nn.Module):
  """A convolution whose kernel is made of two parameters, and a plain one."""

  num_classes: int
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images, train: bool):
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    conv = nn.Conv(6, (3, 3), 2, name='made', **types)
    x = nn.WeightNorm(conv, variable_filter={'kernel'}, **types)(images)
    x = layers.Conv(5, 3, name='plain', **types)(nn.relu(x))
    return nn.Dense(self.num_classes, name='head', **types)(x.mean((1, 2)))
