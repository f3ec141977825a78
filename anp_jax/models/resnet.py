"""Residual networks, v1.5 and v1.

He et al. 2015 (arXiv 1512.03385). v1.5 puts a bottleneck's stride in its 3x3
convolution, as torchvision and Hugging Face transformers do; v1 in its first.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax.numpy as jnp

from anp_jax.models import layers

# depth: (blocks a stage, whether blocks are bottlenecks)
DEPTHS = {
  18: ((2, 2, 2, 2), False),
  34: ((3, 4, 6, 3), False),
  50: ((3, 4, 6, 3), True),
  101: ((3, 4, 23, 3), True),
  152: ((3, 8, 36, 3), True),
}


class Block(nn.Module):
  """One residual block.

  Attributes:
    features: channels inside; a bottleneck gives four times as many.
    conv: makes a convolution from (features, size, stride, name=...).
    norm: makes a normalisation, called (x, train).
    bottleneck: 1x1, 3x3, 1x1 instead of two 3x3.
    stride: pixels.
    version: 'v1.5' or 'v1'.
    zero_init: the last scale starts at zero (Goyal et al., arXiv 1706.02677).
  """

  features: int
  conv: Any
  norm: Any
  bottleneck: bool
  stride: int = 1
  version: str = 'v1.5'
  zero_init: bool = True

  @nn.compact
  def __call__(self, x, train: bool):
    """(batch, height, width, in) to (batch, height', width', out)."""
    if self.bottleneck:
      first, second = (
        (self.stride, 1) if self.version == 'v1' else (1, self.stride)
      )
      plan = ((1, 1, first), (1, 3, second), (4, 1, 1))
    else:
      plan = ((1, 3, self.stride), (1, 3, 1))
    y = x
    for i, (wider, size, stride) in enumerate(plan, 1):
      last = i == len(plan)
      conv = self.conv(wider * self.features, size, stride, name=f'conv{i}')
      init = nn.initializers.zeros_init if last and self.zero_init else (
        nn.initializers.ones_init)  # fmt: skip
      norm = self.norm(scale_init=init(), relu=True, name=f'norm{i}')
      # The last convolution keeps the map's size.
      added = self._shortcut(x, y.shape[1:3], train) if last else None
      y = layers.conv_norm(conv, norm, y, train, added)
    return y

  def _shortcut(self, x, size, train):
    """What is added to the last norm's result, of maps of that size."""
    features = (4 if self.bottleneck else 1) * self.features
    if x.shape[1:] == (*size, features):
      return x
    conv = self.conv(features, 1, self.stride, name='shortcut_conv')
    return layers.conv_norm(conv, self.norm(name='shortcut_norm'), x, train)


class ResNet(nn.Module):
  """Stem, four stages of blocks, mean over the map, linear classifier.

  Attributes:
    num_classes: of the logits.
    stages: blocks in each stage.
    bottleneck: kind of block.
    width: channels of the first stage.
    group, momentum, axis_name: see `layers.BatchNorm`.
    dtype: of the computation; logits come in param_dtype.
    platform: see `layers`.
  """

  num_classes: int
  stages: Sequence[int]
  bottleneck: bool
  width: int = 64
  version: str = 'v1.5'
  zero_init: bool = True
  group: int = 32
  momentum: float = 0.9
  axis_name: str | None = None
  dtype: Any = jnp.float32
  param_dtype: Any = jnp.float32
  platform: str = 'cpu'

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, 3) normalised to logits (batch, classes)."""
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    conv = functools.partial(layers.Conv, platform=self.platform, **types)
    norm = functools.partial(
      layers.BatchNorm,
      group=self.group,
      momentum=self.momentum,
      axis_name=self.axis_name,
      platform=self.platform,
      **types,
    )
    stem = conv(self.width, 7, 2, name='stem_conv')
    x = layers.conv_norm(stem, norm(relu=True, name='stem_norm'), images, train)
    x = layers.max_pool(x, platform=self.platform)
    for i, blocks in enumerate(self.stages):
      for j in range(blocks):
        x = Block(
          self.width * 2**i,
          conv,
          norm,
          self.bottleneck,
          stride=2 if i and not j else 1,
          version=self.version,
          zero_init=self.zero_init,
          name=f'stage{i + 1}_block{j + 1}',
        )(x, train)
    x = x.mean((1, 2), dtype=self.param_dtype)
    # Logits in full precision: a loss over a thousand bfloat16 logits is noise.
    return nn.Dense(
      self.num_classes,
      kernel_init=nn.initializers.normal(0.01),
      dtype=self.param_dtype,
      param_dtype=self.param_dtype,
      name='head',
    )(x)
