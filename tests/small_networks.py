"""Small networks of the package's families, and one of biases alone.

config.model.name='tests.small_networks:ConvNeXt', and so on. Each has what sets
its family apart: depthwise and grouped convolutions, layer norm and GRN, batch
norm, squeeze and excitation, stochastic depth and dropout.
"""

from collections.abc import Sequence

from flax import linen as nn
import jax.numpy as jnp

from anp_jax.models import convnext, efficientnet, resnet

NAMES = tuple(f'tests.small_networks:{name}' for name in ('ConvNeXt', 'EfficientNet', 'SEResNeXt'))


class ConvNeXt(convnext.ConvNeXt):
  version: int = 2
  stages: Sequence[int] = (1,)
  width: int = 4
  drop_path: float = 0.5


class EfficientNet(efficientnet.EfficientNet):
  """An MBConv that keeps its map, with a branch, after a Fused-MBConv."""

  stages: Sequence[efficientnet.Stage] = (
    efficientnet.Stage(True, 1, 3, 1, 8, 1),
    efficientnet.Stage(False, 2, 3, 1, 8, 1),
  )
  width: float = 0.01  # 8 channels, the least
  drop_path: float = 0.5
  dropout: float = 0.2
  group: int = 2


class SEResNeXt(resnet.ResNet):
  stages: Sequence[int] = (1,)
  bottleneck: bool = True
  width: int = 8
  stem: str = 'small'
  groups: int = 2
  group_width: int = 16
  squeeze: int = 16
  group: int = 2


class ResNet(resnet.ResNet):
  """A block with an identity, and one with a projection."""

  stages: Sequence[int] = (1, 1)
  bottleneck: bool = False
  width: int = 6
  stem: str = 'small'
  group: int = 2


class Biases(nn.Module):
  """Logits that are the parameters, whatever the images: 0, 1, 2, ..."""

  num_classes: int
  dtype: object = jnp.float32
  param_dtype: object = jnp.float32

  @nn.compact
  def __call__(self, images, train: bool):
    biases = self.param('bias', lambda *_: jnp.arange(self.num_classes, dtype=self.param_dtype))
    return jnp.broadcast_to(biases, (len(images), self.num_classes))
