"""ConvNeXt, V1 and V2.

Liu et al. 2022 (arXiv 2201.03545) and Woo et al. 2023 (arXiv 2301.00808). V2
normalises each channel's response over the map (GRN) in place of scaling each
branch's result.
"""

from collections.abc import Sequence
import functools
from typing import Any

from flax import linen as nn
import jax.numpy as jnp

from anp_jax.models import layers
from anp_jax.models.layers import example_randomness

# timm's name: (version, blocks of each stage, channels of the first); each
# stage has twice the channels of the one before.
SIZES = {
  'convnext_tiny': (1, (3, 3, 9, 3), 96),
  'convnext_small': (1, (3, 3, 27, 3), 96),
  'convnext_base': (1, (3, 3, 27, 3), 128),
  'convnextv2_atto': (2, (2, 2, 6, 2), 40),
  'convnextv2_femto': (2, (2, 2, 6, 2), 48),
  'convnextv2_pico': (2, (2, 2, 6, 2), 64),
  'convnextv2_nano': (2, (2, 2, 8, 2), 80),
  'convnextv2_tiny': (2, (3, 3, 9, 3), 96),
  'convnextv2_base': (2, (3, 3, 27, 3), 128),
}
EPSILON = 1e-6
_LAYER_SCALE = 1e-6  # at the start
_init = layers.Initializer('truncated_normal', 0.02)


class ResponseNorm(nn.Module):
  """Global response normalisation, and the map itself added.

  A channel is multiplied by its norm over the map, divided by the mean of all
  channels' norms; scale and bias begin at zero.
  """

  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    """(batch, height, width, channels) in and out."""
    shape = (x.shape[-1],)
    scale = layers.parameter(self, 'scale', layers.ZEROS, shape)
    bias = layers.parameter(self, 'bias', layers.ZEROS, shape)
    wide = x.astype(self.param_dtype)
    squares = jnp.square(wide).sum((1, 2), keepdims=True)
    # At 0 a root's gradient is infinite.
    positive = squares > 0
    norms = jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
    relative = norms / (norms.mean(-1, keepdims=True) + EPSILON)
    return (wide * (1 + scale * relative) + bias).astype(x.dtype)


class Block(nn.Module):
  """Depthwise 7x7, norm, 1x1 to four times the channels, GELU, 1x1 back.

  Attributes:
    version: 1: the branch is scaled by channel; 2: GRN after the GELU.
    conv: constructor of a convolution, (features, size, name=...).
    norm: constructor of a layer norm, (name=...).
    param_dtype: dtype of the parameters.
  """

  version: int
  conv: Any
  norm: Any
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, factor):
    """(batch, height, width, channels) in and out.

    Args:
      x: map.
      factor: (batch, 1, 1, 1), factor of the branch in each example; None: 1.
    """
    channels = x.shape[-1]
    y = self.conv(channels, 7, groups=channels, name='depthwise')(x)
    y = self.norm(name='norm')(y)
    y = layers.gelu(self.conv(4 * channels, name='expand')(y))
    if self.version == 2:
      y = ResponseNorm(self.param_dtype, name='grn')(y)
    y = self.conv(channels, name='project')(y)
    if self.version == 1:
      start = layers.Initializer('constant', _LAYER_SCALE)
      scale = layers.parameter(self, 'layer_scale', start, (channels,))
      y *= scale.astype(y.dtype)
    return x + (y if factor is None else factor * y)


class ConvNeXt(layers.Network):
  """Patches of 4x4, four stages of blocks, mean over the map, classifier.

  Attributes:
    version: 1 or 2.
    stages: blocks in each stage.
    width: channels of the first stage.
    drop_path: probability with which an example skips the last block; that of
      the blocks before rises to it linearly from 0.
  """

  version: int = 1
  stages: Sequence[int] = (3, 3, 9, 3)
  width: int = 96
  drop_path: float = 0.0

  @nn.compact
  def __call__(self, images, train: bool):
    """(batch, height, width, 3) normalised to logits (batch, classes).

    Raises:
      ConfigError: for images of fewer pixels a side than its strides together, 32.
    """
    self.check_side(images, 4 * 2 ** (len(self.stages) - 1), 'ConvNeXt')
    types = dict(dtype=self.dtype, param_dtype=self.param_dtype)
    conv = functools.partial(
      layers.Conv, use_bias=True, kernel_init=_init, platform=self.platform, **types
    )
    starts = dict(scale_init=layers.ONES, bias_init=layers.ZEROS)
    norm = functools.partial(nn.LayerNorm, EPSILON, **starts, **types)
    count = sum(self.stages)
    rates = [self.drop_path * i / max(1, count - 1) for i in range(count)]
    factors = iter(example_randomness.branch_factors(self, rates, train))
    x = conv(self.width, 4, 4, padding=0, name='stem_conv')(images)
    x = norm(name='stem_norm')(x)
    for i, blocks in enumerate(self.stages, 1):
      if i > 1:
        x = norm(name=f'stage{i}_norm')(x)
        features = 2 * x.shape[-1]
        x = conv(features, 2, 2, padding=0, name=f'stage{i}_conv')(x)
      for j in range(1, blocks + 1):
        block = Block(self.version, conv, norm, self.param_dtype, name=f'stage{i}_block{j}')
        x = block(x, next(factors))
    x = x.mean((1, 2), dtype=self.param_dtype)
    norm = functools.partial(norm, dtype=self.param_dtype)
    return layers.head(self, _init)(norm(name='head_norm')(x))
