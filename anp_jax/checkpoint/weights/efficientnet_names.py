"""EfficientNets: their published names, and what network a file holds.

transformers and efficientnet_pytorch count all blocks together; timm names a block's layers by
their order. Tensors do not tell how a network pads and with what epsilon it normalises: those of
transformers and efficientnet_pytorch all do as those of `tf_` names, timm's config.json has the
name.
"""

from collections.abc import Iterable
import re
from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming
from anp_jax.config import networks

_TENSORFLOW = 'tf_'  # before a name
# Kinds of blocks in timm, by whether they expand and convolve depthwise.
_KINDS = {
  (True, True): 'inverted',
  (False, True): 'separable',
  (True, False): 'fused',
  (False, False): 'plain',
}
_BLOCK = re.compile(r'/stage(\d+)_block(\d+)/(.*)')


class EfficientNet(naming.Family):
  """The family of `models.efficientnet`."""

  name = 'EfficientNet'
  models = networks.EFFICIENTNETS
  signature = ('stem_conv', 'head_conv', 'head_norm')

  def published_names(self, paths: Iterable[str], kind: str, prefix: str = '') -> dict[str, str]:
    """Returns the published names: a layer's depends on the other layers too."""
    paths = list(paths)
    layers: dict[tuple[int, int], str] = {}  # of each block
    for match in filter(None, map(_BLOCK.search, paths)):
      place = int(match[1]), int(match[2])
      layers[place] = layers.get(place, '') + match[3]
    numbers = {place: i for i, place in enumerate(sorted(layers), 1)}

    def row(match):
      place = int(match[1]), int(match[2])
      if kind != naming.TIMM:
        return f'/block{numbers[place]}/{match[3]}'
      if match[3].startswith('se_'):
        return match[0]
      parts = 'expand_conv' in layers[place], 'depthwise_conv' in layers[place]
      return f'/stage{match[1]}_block{match[2]}/{_KINDS[parts]}/{match[3]}'

    return {path: self.namings[kind].published(_BLOCK.sub(row, path), prefix) for path in paths}

  def network(self, path: str, shapes: dict, kind: str, saved_config: dict) -> dict:
    """Returns the values of the config; see `naming.Family`."""
    from anp_jax.models import efficientnet  # heavy: it imports JAX

    suffix = self.namings[kind].published('params/head_conv/kernel')
    head = next(shape for name, shape in shapes.items() if name.endswith(suffix))
    is_gated = any(module.endswith('se_fc1') for module in self.namings[kind].modules(shapes))
    size = sum(self.blocks(shapes, kind)), head[1], head[0], is_gated
    is_tensorflow = kind != naming.TIMM or _is_tensorflow(saved_config.get('architecture'))
    for name in self.models:
      if _is_tensorflow(name) == is_tensorflow and efficientnet.size(name) == size:
        if problem := _difference(name, kind, saved_config):
          raise config_lib.ConfigError(f'config.init.from={path!r} {problem}')
        return {'model.name': name, 'model.head': 'joint'}
    raise config_lib.ConfigError(
      f'config.init.from={path!r} holds a network of '
      f'{self.describe(shapes, kind)} with {head[0]} channels at last: expected '
      f'one of {", ".join(self.models)}'
    )

  def mismatch(
    self, config: ml_collections.ConfigDict, paths: Iterable[str], kind: str, saved_config: dict
  ) -> str:
    """Returns why it is another, see `naming.Family`; no tensor tells how it pads."""
    del paths
    name = config.model.name
    other = f'a tf_efficientnet, as all of {kind}'
    if kind == naming.TIMM:
      other = str(saved_config.get('architecture', name))
    if (kind != naming.TIMM or _is_tensorflow(other)) != _is_tensorflow(name):
      return f'has the padding and epsilon of {other}, but config.model.name={name!r}'
    return _difference(name, kind, saved_config)

  def architecture(self, config: ml_collections.ConfigDict) -> dict:
    """Returns the fields of transformers' config that say what network it is."""
    from anp_jax.models import efficientnet

    name, side = config.model.name, config.data.image_size
    fields: Any = efficientnet.NETWORKS[name]
    return {
      'architectures': ['EfficientNetForImageClassification'],
      'model_type': 'efficientnet',
      'image_size': side,
      'width_coefficient': fields['width'],
      'depth_coefficient': fields['depth'],
      'depthwise_padding': depthwise_padding(name, side),
      'hidden_dim': efficientnet.size(name)[2],
      'batch_norm_eps': fields['epsilon'],
      'dropout_rate': config.model.dropout,
      'drop_connect_rate': config.model.drop_path,
    }


def depthwise_padding(name: str, side: int) -> list[int]:
  """Returns the blocks that pad both sides alike, as transformers lists them.

  They have stride 2 and a map with an odd number of pixels per side.

  Args:
    name: name of an EfficientNet.
    side: pixels per side of the images.
  """
  from anp_jax.models import efficientnet

  result, side = [], -(-side // 2)
  for block, stride in enumerate(efficientnet.strides(name)):
    if stride == 2 and side % 2:
      result.append(block)
    side = -(-side // stride)
  return result


def refusal(config: ml_collections.ConfigDict) -> str:
  """Returns why transformers has no such network; '' if it has."""
  name, side = config.model.name, config.data.image_size
  if not _is_tensorflow(name):
    return f'transformers has the padding and epsilon of tf_efficientnet_b0 to _b4, not of {name}'
  if name == 'tf_efficientnetv2_s' or '_lite' in name:
    return f'transformers has no {name}'
  if side % 2:
    return (
      f'transformers pads images of an odd number of pixels '
      f'(config.data.image_size={side}) otherwise'
    )
  return ''


def _is_tensorflow(name):
  """Whether a network of that name pads and normalises as TensorFlow's."""
  return str(name).startswith(_TENSORFLOW)


def _difference(name, kind, saved_config):
  """Why a network of transformers is not ours; '' if it is."""
  if kind != naming.TRANSFORMERS or not saved_config:
    return ''
  side = saved_config.get('image_size', 600)
  for key, default, values in (
    ('hidden_act', 'swish', ('swish', 'silu')),
    ('pooling_type', 'mean', ('mean',)),
    ('batch_norm_eps', 1e-3, (1e-3,)),
    ('depthwise_padding', [], (depthwise_padding(name, side),)),
  ):
    value = saved_config.get(key, default)
    if value not in values:
      return f'is of {key}={value!r} in its config.json, and {name} of {values[0]!r}'
  return ''
