"""Names of a ConvNeXt's tensors: ours, timm's, transformers'.

Ours are paths in the variables of `models.convnext`, such as
'params/stage1_block2/expand/kernel'. The published ones count stages and blocks
from 0; their 1x1 convolutions may be (out, in), as dense layers are.
"""

from collections.abc import Iterable
import re

import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming as naming_lib
from anp_jax.config import networks

NAME = 'ConvNeXt'
MODELS = networks.CONVNEXTS
TIMM, TRANSFORMERS = 'timm', naming_lib.TRANSFORMERS
CLASSIFIERS = {TIMM: 'head.fc.', TRANSFORMERS: 'classifier.'}
PREFIXES = ('convnext.', 'convnextv2.')  # of transformers' backbone
# Filters of processors that name none.
FILTERS = {TIMM: 'bicubic', TRANSFORMERS: 'bicubic'}

_STEM = re.compile(r'(stem|head)(?:_(conv|norm))?')
_STAGE = re.compile(r'stage(\d+)_(conv|norm|block)(\d*)(?:/(\w+))?')
_OUTER = {
  TIMM: {'stem_conv': 'stem.0', 'stem_norm': 'stem.1', 'head_norm': 'head.norm', 'head': 'head.fc'},
  TRANSFORMERS: {
    'stem_conv': 'embeddings.patch_embeddings',
    'stem_norm': 'embeddings.layernorm',
    'head_norm': 'layernorm',
    'head': 'classifier',
  },
}
_INNER = {
  TIMM: {
    'depthwise': 'conv_dw',
    'norm': 'norm',
    'expand': 'mlp.fc1',
    'grn': 'mlp.grn',
    'project': 'mlp.fc2',
  },
  TRANSFORMERS: {
    'depthwise': 'dwconv',
    'norm': 'layernorm',
    'expand': 'pwconv1',
    'grn': 'grn',
    'project': 'pwconv2',
  },
}
_LAYER_SCALE = {TIMM: 'gamma', TRANSFORMERS: 'layer_scale_parameter'}
_PLACES = {
  TIMM: ('stages', 'downsample', 'blocks'),
  TRANSFORMERS: ('encoder.stages', 'downsampling_layer', 'layers'),
}
_BLOCK = re.compile(r'(?:\w+\.)?(?:encoder\.)?stages\.(\d+)\.(?:blocks|layers)\.(\d+)\.')


def detect(names: Iterable[str]) -> str | None:
  """Returns which naming a file's tensors have, or None."""
  names = set(names)
  if 'stages.0.blocks.0.conv_dw.weight' in names:
    return TIMM
  if any(name.endswith('embeddings.patch_embeddings.weight') for name in names):
    return TRANSFORMERS if any('dwconv' in name for name in names) else None
  return None


def published_names(names: Iterable[str], naming: str, prefix: str = '') -> dict[str, str]:
  """Returns the name in a naming by our name, of a network's tensors.

  Args:
    names: paths in the variables of a `models.convnext.ConvNeXt`.
    naming: TIMM or TRANSFORMERS.
    prefix: prefix of transformers' backbone; '' in a bare model.
  """
  return {name: _published_name(name, naming, prefix) for name in names}


def _published_name(name, naming, prefix):
  module, _, leaf = name.removeprefix('params/').rpartition('/')
  prefix = '' if naming == TIMM or module == 'head' else prefix
  if _STEM.fullmatch(module):
    return f'{prefix}{_OUTER[naming][module]}.{naming_lib.LEAVES[leaf]}'
  stage, kind, block, inner = _STAGE.fullmatch(module).groups()
  stages, between, blocks = _PLACES[naming]
  place = f'{prefix}{stages}.{int(stage) - 1}'
  if kind != 'block':
    return f'{place}.{between}.{int(kind == "conv")}.{naming_lib.LEAVES[leaf]}'
  place = f'{place}.{blocks}.{int(block) - 1}'
  if leaf == 'layer_scale':
    return f'{place}.{_LAYER_SCALE[naming]}'
  return f'{place}.{_INNER[naming][inner]}.{naming_lib.LEAVES[leaf]}'


def to_published(name: str, value: np.ndarray, naming: str) -> np.ndarray:
  """Returns a tensor of ours in the published order and number of axes."""
  if '/grn/' in name and naming == TRANSFORMERS:
    return value[None, None, None]
  value = naming_lib.to_published(name, value)
  if name.endswith(('/expand/kernel', '/project/kernel')):
    return value[:, :, 0, 0]
  return value


def from_published(name: str, value: np.ndarray) -> np.ndarray:
  """Returns a published tensor, by our name, as ours."""
  if '/grn/' in name:
    return value.reshape(-1)
  if name.endswith(('/expand/kernel', '/project/kernel')) and value.ndim == 2:
    value = value[:, :, None, None]
  return naming_lib.from_published(name, value)


def is_backbone(name: str, naming: str) -> bool:
  """Returns whether a published tensor is one below the classifier."""
  if naming == TIMM:
    return bool(re.match(r'(stem|stages|head\.norm)\.', name))
  return not name.startswith(CLASSIFIERS[naming])


def describe(names: Iterable[str], naming: str) -> str:
  """Returns what ConvNeXt a file holds, for people."""
  del naming
  version, stages = _blocks(names)
  blocks = ', '.join(map(str, stages)) or 'no'
  return f'{blocks} blocks of ConvNeXt V{version}'


def network(path: str, shapes: dict, naming: str, saved_config: dict) -> dict:
  """Values of the config for a file's network.

  Args:
    path: path of the file.
    shapes: shapes of its tensors by name.
    naming: naming of its tensors.
    saved_config: transformers' config.json; {} without.

  Raises:
    ConfigError: if it is none of MODELS.
  """
  from anp_jax.models import convnext  # heavy: it imports JAX

  suffix = _OUTER[naming]['stem_conv'] + '.weight'
  stem = next(shape for name, shape in shapes.items() if name.endswith(suffix))
  size = (*_blocks(shapes), stem[0])
  activation = saved_config.get('hidden_act', 'gelu')
  for name, row in convnext.SIZES.items():
    if row == size and activation == 'gelu' and stem[2:] == (4, 4):
      return {'model.name': name, 'model.head': 'joint'}
  raise config_lib.ConfigError(
    f'config.init.from={path!r} holds a network of '
    f'{describe(shapes, naming)} with {stem[0]} channels, {activation} and '
    f'patches of {stem[2]}: expected one of {", ".join(MODELS)}'
  )


def mismatch(
  config: ml_collections.ConfigDict, names: Iterable[str], naming: str, saved_config: dict
) -> str:
  """Returns '': the tensors tell all."""
  del config, names, naming, saved_config
  return ''


def architecture(config: ml_collections.ConfigDict) -> dict:
  """Returns the fields of transformers' config that say what network it is."""
  from anp_jax.models import convnext

  version, stages, width = convnext.SIZES[config.model.name]
  suffix = 'V2' if version == 2 else ''
  return {
    'architectures': [f'ConvNext{suffix}ForImageClassification'],
    'model_type': f'convnext{suffix.lower()}',
    'patch_size': 4,
    'num_stages': len(stages),
    'hidden_sizes': [width * 2**i for i in range(len(stages))],
    'depths': list(stages),
    'hidden_act': 'gelu',
    'layer_norm_eps': convnext.EPSILON,
    'image_size': config.data.image_size,
  }


def prefix(config: ml_collections.ConfigDict) -> str:
  """Returns what transformers puts before the backbone's names."""
  return PREFIXES[config.model.name.startswith('convnextv2')]


def _blocks(names):
  """Version, and the blocks of each stage."""
  names = list(names)
  version = 2 if any('.grn.' in name for name in names) else 1
  return version, naming_lib.stage_blocks(names, _BLOCK)
