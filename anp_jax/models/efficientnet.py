"""EfficientNet, EfficientNet-Lite and EfficientNetV2-S.

Tan and Le 2019 (arXiv 1905.11946) and 2021 (arXiv 2104.00298). Names are
timm's: those with `tf_` pad and normalise as the authors' TensorFlow and
Hugging Face transformers do, the others as PyTorch. Lite is the authors'
variant for small devices (github.com/tensorflow/tpu, efficientnet/lite, 2020).
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax

from anp_jax.models import layers
from anp_jax.models.layers import example_randomness


class Stage(NamedTuple):
  """A row of the papers' tables.

  Attributes:
    fused: whether blocks are Fused-MBConv, which expand by the convolution of
      `size` and have no squeeze and excitation; else MBConv, which expand by
      1x1 and convolve depthwise.
    expansion: channels inside a block over those of its input.
    size: pixels of the convolution's window.
    stride: stride of the first block.
    features: channels of the result.
    blocks: number of blocks in a network of depth 1.
  """

  fused: bool
  expansion: int
  size: int
  stride: int
  features: int
  blocks: int


# Table 1 of the first paper. A row's stride is that of its own first block; the
# table has the resolution before it.
V1 = (
  Stage(False, 1, 3, 1, 16, 1),
  Stage(False, 6, 3, 2, 24, 2),
  Stage(False, 6, 5, 2, 40, 2),
  Stage(False, 6, 3, 2, 80, 3),
  Stage(False, 6, 5, 1, 112, 3),
  Stage(False, 6, 5, 2, 192, 4),
  Stage(False, 6, 3, 1, 320, 1),
)
# Table 4 of the second.
V2_S = (
  Stage(True, 1, 3, 1, 24, 2),
  Stage(True, 4, 3, 2, 48, 4),
  Stage(True, 4, 3, 2, 64, 4),
  Stage(False, 4, 3, 2, 128, 6),
  Stage(False, 6, 3, 1, 160, 9),
  Stage(False, 6, 3, 2, 256, 15),
)
_PYTORCH: dict[str, dict[str, Any]] = {
  'efficientnet_b0': dict(width=1.0, depth=1.0),
  'efficientnet_b1': dict(width=1.0, depth=1.1),
  'efficientnet_b2': dict(width=1.1, depth=1.2),
  'efficientnet_b3': dict(width=1.2, depth=1.4),
  'efficientnet_b4': dict(width=1.4, depth=1.8),
  'efficientnetv2_s': dict(stages=V2_S, stem=24),
}
_TENSORFLOW: dict[str, Any] = dict(padding='SAME', epsilon=1e-3)
_LITE = {
  'tf_efficientnet_lite0': dict(width=1.0, depth=1.0),
  'tf_efficientnet_lite1': dict(width=1.0, depth=1.1),
  'tf_efficientnet_lite2': dict(width=1.1, depth=1.2),
}
# The fields of each network.
NETWORKS: dict[str, dict[str, Any]] = {
  **_PYTORCH,
  **{f'tf_{name}': {**n, **_TENSORFLOW} for name, n in _PYTORCH.items()},
  **{name: {**n, **_TENSORFLOW, 'lite': True} for name, n in _LITE.items()},
}
_HEAD = 1280  # channels before the classifier
_SQUEEZE = 4  # channels of a block's input over those that gate


def rounded(channels: float) -> int:
  """The nearest multiple of 8 that is not below 0.9 of the channels."""
  multiple = max(8, int(channels + 4) // 8 * 8)
  return multiple if multiple >= 0.9 * channels else multiple + 8


def strides(name: str) -> list[int]:
  """Strides of a network's blocks, by its name."""
  module = EfficientNet(0, **NETWORKS[name])
  return [1 if j else stage.stride for stage in module.stages for j in range(module.blocks(stage))]


def size(name: str) -> tuple[int, int, int, bool]:
  """A network's blocks, channels before and behind its last convolution, and whether it gates."""
  module = EfficientNet(0, **NETWORKS[name])
  last = rounded(module.stages[-1].features * module.width)
  return len(strides(name)), last, module.end(_HEAD), not module.lite


class Block(nn.Module):
  """MBConv or Fused-MBConv: expands, convolves, gates and projects.

  Attributes:
    stage: row of the table; its `blocks` are not read.
    conv: constructor of a convolution, (features, size, stride, name=...).
    norm: constructor of a normalisation, (name=...).
    activation: activation, of an array.
    gate: whether MBConv has squeeze and excitation.
  """

  stage: Stage
  conv: Any
  norm: Any
  activation: Callable[[jax.Array], jax.Array]
  gate: bool

  @nn.compact
  def __call__(self, x, train: bool, factor):
    """(batch, height, width, in) to (batch, height', width', features).

    Args:
      x: map.
      train: whether batch norm takes its groups' statistics.
      factor: (batch, 1, 1, 1), factor of the branch in each example; None: 1.
    """
    stage, channels = self.stage, x.shape[-1]
    inner = stage.expansion * channels
    window = stage.size, stage.stride
    y = x
    if stage.expansion > 1:
      shape = window if stage.fused else (1, 1)
      y = self.activation(self._convolved('expand', y, train, inner, *shape))
    if not stage.fused:
      y = self._convolved(
        'depthwise',
        y,
        train,
        inner,
        *window,
        groups=inner,
        kernel_init=layers.Initializer('normal', 2.0, 'fan_in'),  # a channel's: of size x size
      )
      y = self.activation(y)
      if self.gate:
        y = layers.squeeze_excite(y, self.conv, channels // _SQUEEZE, self.activation)
    if stage.fused and stage.expansion == 1:
      y = self._convolved('project', y, train, stage.features, *window)
      y = self.activation(y)
    else:
      y = self._convolved('project', y, train, stage.features, 1, 1)
    if stage.stride > 1 or channels != stage.features:
      return y
    return x + (y if factor is None else factor * y)

  def _convolved(self, name, x, train, *shape, **fields):
    conv = self.conv(*shape, name=f'{name}_conv', **fields)
    return layers.conv_norm(conv, self.norm(name=f'{name}_norm'), x, train)


class EfficientNet(layers.NormalisedNetwork):
  """Stem, stages of blocks, 1x1, mean over the map, dropout, classifier.

  Attributes:
    stages: the paper's table.
    width: factor of all channels, which are `rounded`.
    depth: factor of each stage's blocks, rounded up.
    stem: channels of the first convolution, before `width`.
    padding: padding of all convolutions, see `layers.Conv`.
    lite: whether it is EfficientNet-Lite: ReLU6 in place of SiLU, no squeeze and
      excitation, and neither `width` for the first and the last convolution nor
      `depth` for the first and the last stage.
    epsilon: see `layers.BatchNorm`.
    drop_path: rate of stochastic depth; a block's is this rate times the share
      of all blocks that lie before it, as in the authors' code and timm.
    dropout: probability that a number before the classifier is set to zero.
  """

  stages: Sequence[Stage] = V1
  width: float = 1.0
  depth: float = 1.0
  stem: int = 32
  padding: str | None = None
  lite: bool = False
  epsilon: float = 1e-5
  drop_path: float = 0.0
  dropout: float = 0.0

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, 3) normalised to logits (batch, classes)."""
    conv, norm = layers.makers(self)
    conv = functools.partial(conv, padding=self.padding)
    norm = functools.partial(norm, epsilon=self.epsilon)
    count = sum(map(self.blocks, self.stages))
    rates = [self.drop_path * i / count for i in range(count)]
    factors = iter(example_randomness.branch_factors(self, rates, train))

    activation = layers.relu6 if self.lite else layers.silu

    def convolved(name, x, *shape):
      layer = conv(*shape, name=f'{name}_conv')
      return activation(layers.conv_norm(layer, norm(name=f'{name}_norm'), x, train))

    x = convolved('stem', images, self.end(self.stem), 3, 2)
    for i, stage in enumerate(self.stages, 1):
      blocks = self.blocks(stage)
      stage = stage._replace(features=rounded(stage.features * self.width))
      for j in range(1, blocks + 1):
        block = Block(stage, conv, norm, activation, not self.lite, name=f'stage{i}_block{j}')
        x = block(x, train, next(factors))
        stage = stage._replace(stride=1)
    x = convolved('head', x, self.end(_HEAD))
    x = x.mean((1, 2), dtype=self.param_dtype)
    if train and self.dropout:
      x = example_randomness.dropout(self, x, self.dropout)
    return layers.head(self, layers.Initializer('uniform', 1 / 3, 'fan_out'))(x)

  def blocks(self, stage: Stage) -> int:
    """The number of blocks of one of `stages`."""
    is_fixed = self.lite and stage in (self.stages[0], self.stages[-1])
    return stage.blocks if is_fixed else math.ceil(stage.blocks * self.depth)

  def end(self, channels: int) -> int:
    """The channels of the first or the last convolution, of those of width 1."""
    return channels if self.lite else rounded(channels * self.width)
