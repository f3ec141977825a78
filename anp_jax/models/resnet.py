"""Residual networks, v1.5 and v1, their variants, and those for CIFAR.

He et al. 2015 (arXiv 1512.03385). v1.5 puts a bottleneck's stride in its 3x3
convolution, as torchvision and Hugging Face transformers do; v1 in its first.
"""

from collections.abc import Sequence
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


def _variant(depth, **fields):
  stages, bottleneck = DEPTHS[depth]
  return dict(stages=stages, bottleneck=bottleneck, **fields)


_D = dict(stem='deep', shortcut='pooled')
_32X4D = dict(groups=32, group_width=4)
_32X8D = dict(groups=32, group_width=8)
# The fields of each network; names are torchvision's and timm's.
NETWORKS = {
  **{f'resnet{depth}': _variant(depth) for depth in DEPTHS},
  # He et al. 2018, "bag of tricks" (arXiv 1812.01187), figure 2.
  **{f'resnet{depth}d': _variant(depth, **_D) for depth in DEPTHS},
  # Hu et al. 2017 (arXiv 1709.01507).
  **{f'seresnet{depth}': _variant(depth, squeeze=16) for depth in DEPTHS},
  # Xie et al. 2016 (arXiv 1611.05431).
  'resnext50_32x4d': _variant(50, **_32X4D),
  'resnext101_32x4d': _variant(101, **_32X4D),
  'resnext101_32x8d': _variant(101, **_32X8D),
  'resnext101_64x4d': _variant(101, groups=64, group_width=4),
  'seresnext50_32x4d': _variant(50, squeeze=16, **_32X4D),
  'seresnext101_32x4d': _variant(101, squeeze=16, **_32X4D),
  'seresnext101_32x8d': _variant(101, squeeze=16, **_32X8D),
  # Zagoruyko and Komodakis 2016 (arXiv 1605.07146).
  'wide_resnet50_2': _variant(50, group_width=128),
  'wide_resnet101_2': _variant(101, group_width=128),
  # He et al. 2015, section 4.2; of width 16 with 0.27, 0.46 and 0.85 M
  # parameters.
  **{
    f'resnet{6 * blocks + 2}': dict(
      stages=(blocks,) * 3, bottleneck=False, stem='small', shortcut='padding'
    )
    for blocks in (3, 5, 9)
  },
}
_BASE_WIDTH = 64  # of the first stage, that group_width refers to


def least_width(fields: dict) -> int:
  """The least width at which a group of the first stage, and a deep stem's half, has a channel."""
  least = -(-_BASE_WIDTH // fields.get('group_width', _BASE_WIDTH))
  return max(least, 2) if fields.get('stem') == 'deep' else least


class Block(nn.Module):
  """One residual block.

  Attributes:
    features: channels inside; a bottleneck gives four times as many.
    conv: constructor of a convolution, (features, size, stride, name=...).
    norm: constructor of a normalisation, (name=...).
    bottleneck: whether it is 1x1, 3x3, 1x1 instead of two 3x3.
    stride: pixels.
    version: 'v1.5' or 'v1'.
    shortcut: past a block that changes the map's shape: 'projection' (the
      paper's option B), a 1x1 convolution; 'padding' (option A), every other
      pixel, between channels of zeros; 'pooled', a mean over 2x2 pixels and a
      1x1 convolution.
    zero_init: whether the last scale starts at zero (Goyal et al., arXiv
      1706.02677).
    groups: groups of a bottleneck's 3x3 convolution.
    group_width: channels per group of that convolution, in a stage of 64 features.
    squeeze: ratio of squeeze and excitation; 0: none.
    platform: see `layers`.
  """

  features: int
  conv: Any
  norm: Any
  bottleneck: bool
  stride: int = 1
  version: str = 'v1.5'
  shortcut: str = 'projection'
  zero_init: bool = True
  groups: int = 1
  group_width: int = _BASE_WIDTH
  squeeze: int = 0
  platform: str = 'cpu'

  @nn.compact
  def __call__(self, x, train: bool):
    """(batch, height, width, in) to (batch, height', width', out)."""
    y, plan = x, self._plan()
    for i, (features, size, stride, groups) in enumerate(plan, 1):
      last = i == len(plan)
      conv = self.conv(features, size, stride, groups=groups, name=f'conv{i}')
      init = layers.ZEROS if last and self.zero_init else layers.ONES
      is_gated = last and self.squeeze
      norm = self.norm(scale_init=init, relu=not is_gated, name=f'norm{i}')
      # The last convolution keeps the map's size.
      added = self._shortcut(x, y.shape[1:3], train) if last else None
      if is_gated:
        y = self._gated(layers.conv_norm(conv, norm, y, train))
        return layers.relu(y + added, self.platform)
      y = layers.conv_norm(conv, norm, y, train, added)
    return y

  def _plan(self):
    """Features, size, stride and groups of each convolution."""
    if not self.bottleneck:
      return (self.features, 3, self.stride, 1), (self.features, 3, 1, 1)
    first, second = (self.stride, 1) if self.version == 'v1' else (1, self.stride)
    width = self.features * self.group_width // _BASE_WIDTH
    inner = width * self.groups
    return ((inner, 1, first, 1), (inner, 3, second, self.groups), (4 * self.features, 1, 1, 1))

  def _gated(self, y):
    """Multiplies each channel by a number from the means of all."""
    channels = y.shape[-1]
    # A multiple of 8, as timm has it.
    squeezed = max(8, (channels // self.squeeze + 4) // 8 * 8)
    return layers.squeeze_excite(y, self.conv, squeezed, nn.relu)

  def _shortcut(self, x, size, train):
    """The summand of the last norm's result, for maps of that size."""
    features = (4 if self.bottleneck else 1) * self.features
    if x.shape[1:] == (*size, features):
      return x
    if self.shortcut == 'padding':
      zeros = features - x.shape[-1]
      before = zeros // 2
      x = x[:, :: self.stride, :: self.stride]
      return jnp.pad(x, [(0, 0)] * 3 + [(before, zeros - before)])
    if self.shortcut == 'pooled':
      x = self._pooled(x) if self.stride > 1 else x
      conv = self.conv(features, name='pooled_conv')
      return layers.conv_norm(conv, self.norm(name='pooled_norm'), x, train)
    conv = self.conv(features, 1, self.stride, name='shortcut_conv')
    return layers.conv_norm(conv, self.norm(name='shortcut_norm'), x, train)

  def _pooled(self, x):
    """Means over 2x2 pixels, or over as many as there are at an odd edge."""
    edges = [(0, side % 2) for side in x.shape[1:3]]
    x = jnp.pad(x, ((0, 0), *edges, (0, 0)), 'edge')
    return layers.avg_pool(x, 2, 2, platform=self.platform)


class ResNet(layers.NormalisedNetwork):
  """Stem, stages of blocks, mean over the map, linear classifier.

  Attributes:
    stages: blocks in each stage.
    bottleneck: kind of block.
    width: channels of the first stage.
    stem: 'large', 7x7 and a pool, each of stride 2; 'deep', three of 3x3 in
      place of the 7x7; 'small', 3x3.
    shortcut, groups, group_width, squeeze: see `Block`.
  """

  stages: Sequence[int]
  bottleneck: bool
  width: int = 64
  version: str = 'v1.5'
  stem: str = 'large'
  shortcut: str = 'projection'
  groups: int = 1
  group_width: int = _BASE_WIDTH
  squeeze: int = 0
  zero_init: bool = True

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, 3) normalised to logits (batch, classes)."""
    conv, norm = layers.makers(self)
    x = images
    for name, features, size, stride in self._stem():
      stem = conv(features, size, stride, name=f'stem_conv{name}')
      stem_norm = norm(relu=True, name=f'stem_norm{name}')
      x = layers.conv_norm(stem, stem_norm, x, train)
    if self.stem != 'small':
      x = layers.max_pool(x, platform=self.platform)
    names = 'version', 'shortcut', 'zero_init', 'groups', 'group_width', 'squeeze', 'platform'
    fields = {name: getattr(self, name) for name in names}
    for i, blocks in enumerate(self.stages):
      for j in range(blocks):
        stride, name = 2 if i and not j else 1, f'stage{i + 1}_block{j + 1}'
        block = Block(
          self.width * 2**i, conv, norm, self.bottleneck, stride=stride, name=name, **fields
        )
        x = block(x, train)
    x = x.mean((1, 2), dtype=self.param_dtype)
    return layers.head(self, layers.Initializer('normal', 0.01))(x)

  def _stem(self):
    """Name suffix, features, size and stride of each convolution of the stem."""
    if self.stem == 'deep':
      half = self.width // 2
      return (1, half, 3, 2), (2, half, 3, 1), (3, self.width, 3, 1)
    if self.stem == 'small':
      return (('', self.width, 3, 1),)
    return (('', self.width, 7, 2),)
