"""Names of an EfficientNet's tensors: ours, timm's, transformers'.

Ours are paths in the variables of `models.efficientnet`, such as
'params/stage2_block1/depthwise_conv/kernel'. timm counts stages and blocks from
0, and names a block's layers by their order; transformers counts all blocks
together. Tensors do not tell how a network pads and with what epsilon it
normalises: transformers' all do as those of `tf_` names, timm's config.json has
the name.
"""

from collections.abc import Iterable
import re
from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming as naming_lib
from anp_jax.config import networks

NAME = 'EfficientNet'
MODELS = networks.EFFICIENTNETS
TIMM, TRANSFORMERS = 'timm', naming_lib.TRANSFORMERS
CLASSIFIERS = {TIMM: 'classifier.', TRANSFORMERS: 'classifier.'}
PREFIXES = ('efficientnet.',)  # of transformers' backbone
# Filters of processors that name none.
FILTERS = {TIMM: 'bicubic', TRANSFORMERS: 'bicubic'}
FIRST_CONVOLUTION = 'conv_stem'  # timm's
# Axes are in the order of a ResNet's.
to_published = naming_lib.to_published
from_published = naming_lib.from_published

_TENSORFLOW = 'tf_'  # before a name
_PATH = re.compile(
  r'(?:params|batch_stats)/(?:stage(\d+)_block(\d+)/)?'
  r'(?:(\w+)_(conv|norm|fc1|fc2)|(head))/(\w+)'
)
_OUTER = {
  TIMM: {
    'stem_conv': FIRST_CONVOLUTION,
    'stem_norm': 'bn1',
    'head_conv': 'conv_head',
    'head_norm': 'bn2',
  },
  TRANSFORMERS: {
    'stem_conv': 'embeddings.convolution',
    'stem_norm': 'embeddings.batchnorm',
    'head_conv': 'encoder.top_conv',
    'head_norm': 'encoder.top_bn',
  },
}
# timm's convolutions of a block, by ours, in order.
_CONVOLUTIONS = {
  ('expand', 'depthwise', 'project'): ('conv_pw', 'conv_dw', 'conv_pwl'),
  ('depthwise', 'project'): ('conv_dw', 'conv_pw'),
  ('expand', 'project'): ('conv_exp', 'conv_pwl'),
  ('project',): ('conv',),
}
_PARTS = ('expand', 'depthwise', 'project')
_GATES = {'fc1': 'se.conv_reduce', 'fc2': 'se.conv_expand'}
_INNER = {
  'expand_conv': 'expansion.expand_conv',
  'expand_norm': 'expansion.expand_bn',
  'depthwise_conv': 'depthwise_conv.depthwise_conv',
  'depthwise_norm': 'depthwise_conv.depthwise_norm',
  'se_fc1': 'squeeze_excite.reduce',
  'se_fc2': 'squeeze_excite.expand',
  'project_conv': 'projection.project_conv',
  'project_norm': 'projection.project_bn',
}
_BLOCK = {
  TIMM: re.compile(r'blocks\.(\d+\.\d+)\.'),
  TRANSFORMERS: re.compile(r'(?:efficientnet\.)?encoder\.blocks\.(\d+)\.'),
}


def detect(names: Iterable[str]) -> str | None:
  """Returns which naming a file's tensors have, or None."""
  names = set(names)
  if {'conv_stem.weight', 'conv_head.weight', 'bn2.weight'} <= names:
    return TIMM
  # Without the prefix in a bare EfficientNetModel.
  if any(name.endswith('encoder.top_conv.weight') for name in names):
    return TRANSFORMERS
  return None


def published_names(names: Iterable[str], naming: str, prefix: str = PREFIXES[0]) -> dict[str, str]:
  """Returns the name in a naming by our name, of a network's tensors.

  Args:
    names: paths in the variables of a `models.efficientnet.EfficientNet`; how a
      layer is called depends on the other ones.
    naming: TIMM or TRANSFORMERS.
    prefix: prefix of transformers' backbone; '' in a bare model.
  """
  paths = {}
  for name in names:
    match = _PATH.fullmatch(name)
    assert match, name
    paths[name] = match.groups()
  blocks: dict[tuple, set] = {}  # the parts of each
  for stage, block, part, *_ in paths.values():
    if stage:
      blocks.setdefault((int(stage), int(block)), set()).add(part)
  places = sorted(blocks)
  result = {}
  for name, (stage, block, part, kind, head, leaf) in paths.items():
    if head:
      module = 'classifier'
    elif not stage:
      module = _OUTER[naming][f'{part}_{kind}']
    elif naming == TRANSFORMERS:
      number = places.index((int(stage), int(block)))
      module = f'encoder.blocks.{number}.{_INNER[f"{part}_{kind}"]}'
    else:
      layer = _timm_layer(blocks[int(stage), int(block)], part, kind)
      module = f'blocks.{int(stage) - 1}.{int(block) - 1}.{layer}'
    start = prefix if naming == TRANSFORMERS and not head else ''
    result[name] = f'{start}{module}.{naming_lib.LEAVES[leaf]}'
  return result


def _timm_layer(parts, part, kind):
  """The name within a block that has such parts."""
  if part == 'se':
    return _GATES[kind]
  order = tuple(p for p in _PARTS if p in parts)
  place = order.index(part)
  return f'bn{place + 1}' if kind == 'norm' else _CONVOLUTIONS[order][place]


def is_backbone(name: str, naming: str) -> bool:
  """Returns whether a published tensor is one below the classifier."""
  return not name.startswith(CLASSIFIERS[naming])


def describe(names: Iterable[str], naming: str) -> str:
  """Returns what EfficientNet a file holds, for people."""
  return f'{_blocks(names, naming)} blocks'


def network(path: str, shapes: dict, naming: str, saved_config: dict) -> dict:
  """Values of the config for a file's network.

  Args:
    path: path of the file.
    shapes: shapes of its tensors by name.
    naming: naming of its tensors.
    saved_config: transformers' or timm's config.json; {} without.

  Raises:
    ConfigError: if it is none of MODELS.
  """
  from anp_jax.models import efficientnet  # heavy: it imports JAX

  suffix = _OUTER[naming]['head_conv'] + '.weight'
  head = next(shape for name, shape in shapes.items() if name.endswith(suffix))
  size = _blocks(shapes, naming), head[0]
  is_tensorflow = naming == TRANSFORMERS or str(saved_config.get('architecture')).startswith(
    _TENSORFLOW
  )
  for name in MODELS:
    has_prefix = name.startswith(_TENSORFLOW)
    if has_prefix == is_tensorflow and efficientnet.size(name) == size:
      if problem := _difference(name, naming, saved_config):
        raise config_lib.ConfigError(f'config.init.from={path!r} {problem}')
      return {'model.name': name, 'model.head': 'joint'}
  raise config_lib.ConfigError(
    f'config.init.from={path!r} holds a network of '
    f'{describe(shapes, naming)} with {head[0]} channels at last: expected '
    f'one of {", ".join(MODELS)}'
  )


def mismatch(
  config: ml_collections.ConfigDict, names: Iterable[str], naming: str, saved_config: dict
) -> str:
  """Returns why a file's network is another, whatever its tensors; ''.

  Args:
    config: config of the run that begins.
    names: names of its network's tensors.
    naming: naming of the file's tensors.
    saved_config: transformers' or timm's config.json; {} without.
  """
  del names
  name = config.model.name
  if naming == TIMM:
    other = str(saved_config.get('architecture', name))
    is_same = other.startswith(_TENSORFLOW) == name.startswith(_TENSORFLOW)
    return '' if is_same else _another(other, name)
  if not name.startswith(_TENSORFLOW):
    return _another('a tf_efficientnet, as all of transformers', name)
  return _difference(name, naming, saved_config)


def _another(other, name):
  return f'has the padding and epsilon of {other}, but config.model.name={name!r}'


def _difference(name, naming, saved_config):
  """Why a network of transformers is not ours; '' if it is."""
  if naming == TIMM or not saved_config:
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


def depthwise_padding(name: str, side: int) -> list[int]:
  """Returns the blocks that pad both sides alike, as transformers lists them.

  They have stride 2 and a map with an odd number of pixels per side.

  Args:
    name: one of MODELS.
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
  if not name.startswith(_TENSORFLOW):
    return f'transformers has the padding and epsilon of tf_efficientnet_b0 to _b4, not of {name}'
  if name == 'tf_efficientnetv2_s':
    return f'transformers has no {name}'
  if side % 2:
    return (
      f'transformers pads images of an odd number of pixels '
      f'(config.data.image_size={side}) otherwise'
    )
  return ''


def architecture(config: ml_collections.ConfigDict) -> dict:
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
    'hidden_dim': efficientnet.size(name)[1],
    'batch_norm_eps': fields['epsilon'],
    'dropout_rate': config.model.dropout,
    'drop_connect_rate': config.model.drop_path,
  }


def prefix(config: ml_collections.ConfigDict) -> str:
  """Returns what transformers puts before the backbone's names."""
  del config
  return PREFIXES[0]


def _blocks(names, naming):
  """How many blocks a network has."""
  matches = (_BLOCK[naming].match(name) for name in names)
  return len({match[1] for match in matches if match})
