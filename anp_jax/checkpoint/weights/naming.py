"""Names of a ResNet's tensors: ours, torchvision's (and timm's), transformers'.

Ours are paths in the variables of `models.resnet`, such as
'params/stage1_block2/conv1/kernel' and 'batch_stats/stem_norm/mean'. Published
ones count blocks from 0; their kernels are (out, in, height, width), and dense
ones (out, in).
"""

from collections.abc import Iterable
import re
from typing import Any

import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import networks

NAME = 'ResNet'
MODELS = networks.RESNETS
TORCHVISION = 'torchvision and timm'
TIMM = TORCHVISION
TRANSFORMERS = 'transformers'
# The classifier of each; another data set has another one.
CLASSIFIERS = {TORCHVISION: 'fc.', TRANSFORMERS: 'classifier.'}
PREFIXES = ('resnet.',)  # of transformers' backbone
# With these torchvision's weights and transformers' ResNets are evaluated.
FILTERS = {TORCHVISION: 'bilinear', TRANSFORMERS: 'bicubic'}
# Counts of training steps, which only a momentum of None would read.
UNUSED = 'num_batches_tracked'

LEAVES = {
  'kernel': 'weight',
  'scale': 'weight',
  'bias': 'bias',
  'mean': 'running_mean',
  'var': 'running_var',
}
_PATH = re.compile(
  r'(?:params|batch_stats)/'
  r'(?:stage(\d+)_block(\d+)/(?=shortcut|pooled|se_|conv|norm)|(?=stem|head))'
  r'(stem|head|shortcut|pooled|se|conv|norm)(?:_(conv|norm|fc))?(\d*)/(\w+)'
)
# The convolutions of a stem, and the norms after the first two of three.
_STEM_CONVS = {'': 'conv1', '1': 'conv1.0', '2': 'conv1.3', '3': 'conv1.6'}
_STEM_NORMS = {'': 'bn1', '1': 'conv1.1', '2': 'conv1.4', '3': 'bn1'}
_STEMS = {'conv1.weight', 'conv1.0.weight'}
_EMBEDDER = 'embedder.embedder'
_BLOCK = {
  TORCHVISION: re.compile(r'layer(\d+)\.(\d+)\.'),
  TRANSFORMERS: re.compile(r'(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)'),
}
_LAYER = {
  TORCHVISION: re.compile(r'layer1\.0\.conv(\d+)\.weight'),
  TRANSFORMERS: re.compile(
    r'(?:resnet\.)?encoder\.stages\.0\.layers\.0\.layer\.(\d+)\.convolution'
  ),
}
# Axes, by their number.
_KERNEL_TO_PUBLISHED = {4: (3, 2, 0, 1), 2: (1, 0)}
_KERNEL_FROM_PUBLISHED = {4: (2, 3, 1, 0), 2: (1, 0)}


def detect(names: Iterable[str]) -> str | None:
  """Returns which naming a file's tensors have, or None."""
  names = set(names)
  if names & _STEMS and 'bn1.weight' in names:
    return TORCHVISION
  if any(f'{_EMBEDDER}.convolution.weight' in name for name in names):
    return TRANSFORMERS
  return None


def published_name(name: str, naming: str, prefix: str = 'resnet.') -> str:
  """Returns the name that a tensor of ours has in a naming.

  Args:
    name: path in the variables of a `models.resnet.ResNet`.
    naming: TORCHVISION or TRANSFORMERS.
    prefix: prefix of transformers' backbone; '' in a bare ResNetModel.

  Raises:
    ValueError: if no ResNet has a tensor of that name.
  """
  match = _PATH.fullmatch(name)
  if not match or match[6] not in LEAVES:
    raise ValueError(f'{name} is not of a ResNet')
  stage, block, part, kind, number, leaf = match.groups()
  kind = kind or part
  if naming == TORCHVISION:
    module = {
      'head': 'fc',
      'stem': (_STEM_CONVS if kind == 'conv' else _STEM_NORMS)[number],
      'shortcut': f'downsample.{int(kind == "norm")}',
      'pooled': f'downsample.{1 + int(kind == "norm")}',  # after the pool
      'se': f'se.fc{number}',
      'conv': f'conv{number}',
      'norm': f'bn{number}',
    }[part]
    place = f'layer{stage}.{int(block) - 1}.' if stage else ''
  else:
    layer = 'convolution' if kind == 'conv' else 'normalization'
    module = {
      'head': 'classifier.1',
      'stem': f'{prefix}{_EMBEDDER}.{layer}',
      'shortcut': f'shortcut.{layer}',
    }.get(part) or f'layer.{int(number) - 1}.{layer}'
    place = ''
    if stage:
      place = f'{prefix}encoder.stages.{int(stage) - 1}.layers.{int(block) - 1}.'
  return f'{place}{module}.{LEAVES[leaf]}'


def published_names(names: Iterable[str], naming: str, prefix: str = 'resnet.') -> dict[str, str]:
  """Returns `published_name` by our name, of a network's tensors."""
  return {name: published_name(name, naming, prefix) for name in names}


def to_published(name: str, value: np.ndarray, naming: str = TORCHVISION) -> np.ndarray:
  """Returns a tensor of ours with its axes in the order of all namings."""
  del naming
  if name.endswith('/kernel'):
    return value.transpose(_KERNEL_TO_PUBLISHED[value.ndim])
  return value


def from_published(name: str, value: np.ndarray) -> np.ndarray:
  """Returns a published tensor, by our name, with its axes in our order."""
  if name.endswith('/kernel') and value.ndim in _KERNEL_FROM_PUBLISHED:
    return value.transpose(_KERNEL_FROM_PUBLISHED[value.ndim])
  return value


def published_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns the shape of a tensor of ours in the published order of axes."""
  if name.endswith('/kernel') and len(shape) in _KERNEL_TO_PUBLISHED:
    return tuple(shape[i] for i in _KERNEL_TO_PUBLISHED[len(shape)])
  return tuple(shape)


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
  from anp_jax.models import resnet  # heavy: it imports JAX

  stages, layers = blocks(shapes, naming)
  if naming == TORCHVISION:
    width, fields = variant(shapes)
  else:
    stem = published_name('params/stem_conv/kernel', naming)
    width = next(shape for name, shape in shapes.items() if stem.endswith(name))[0]
    fields = dict(stages=stages, bottleneck=layers == 3)
  models = [name for name, n in resnet.NETWORKS.items() if n == fields]
  if not models:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} holds a network of '
      f'{describe(shapes, naming)}: expected one of {", ".join(MODELS)}'
    )
  for key, value in (('downsample_in_first_stage', False), ('hidden_act', 'relu')):
    if saved_config.get(key, value) != value:
      raise config_lib.ConfigError(
        f'config.init.from={path!r}: its config.json has '
        f'{key}={saved_config[key]!r}, and this package has ResNets of {value!r} only'
      )
  first = saved_config.get('downsample_in_bottleneck')
  return {
    'model.name': models[0],
    'model.version': 'v1' if first and layers == 3 else 'v1.5',
    'model.width': width,
    'model.head': 'joint',
  }


def mismatch(
  config: ml_collections.ConfigDict, names: Iterable[str], naming: str, saved_config: dict
) -> str:
  """Returns why a file's network is another, whatever its tensors; ''.

  Where a bottleneck strides, no tensor tells: transformers' config does.

  Args:
    config: config of the run that begins.
    names: names of its network's tensors.
    naming: naming of the file's tensors.
    saved_config: transformers' config.json; {} without.
  """
  m = config.model
  if naming != TRANSFORMERS:
    return ''
  if any(re.search('/stem_conv1|/pooled_|/se_', name) for name in names):
    return f'has the tensors of a ResNet of transformers, which has no {m.name}'
  if saved_config.get('layer_type', 'bottleneck') != 'bottleneck':
    return ''
  version = 'v1' if saved_config.get('downsample_in_bottleneck') else 'v1.5'
  if saved_config.get('model_type') == 'resnet' and m.version != version:
    return f'holds a ResNet of version {version!r}, but config.model.version={m.version!r}'
  return ''


def architecture(config: ml_collections.ConfigDict) -> dict:
  """Returns the fields of transformers' config that say what network it is."""
  from anp_jax.models import resnet

  m = config.model
  network = resnet.NETWORKS[m.name]
  stages, bottleneck = network['stages'], network['bottleneck']
  return {
    'architectures': ['ResNetForImageClassification'],
    'model_type': 'resnet',
    'embedding_size': m.width,
    'hidden_sizes': [m.width * (4 if bottleneck else 1) * 2**i for i in range(len(stages))],
    'depths': list(stages),
    'layer_type': 'bottleneck' if bottleneck else 'basic',
    'hidden_act': 'relu',
    'downsample_in_first_stage': False,
    'downsample_in_bottleneck': m.version == 'v1',
  }


def prefix(config: ml_collections.ConfigDict) -> str:
  """Returns what transformers puts before the backbone's names."""
  del config
  return PREFIXES[0]


def is_backbone(name: str, naming: str) -> bool:
  """Returns whether a published tensor is one below the classifier."""
  if naming == TORCHVISION:
    return bool(re.match(r'(conv1|bn1|layer\d+)\.', name))
  return bool(re.match(r'(resnet\.)?(embedder|encoder)\.', name))


def blocks(names: Iterable[str], naming: str) -> tuple[tuple[int, ...], int]:
  """Returns the blocks of each stage of a ResNet, and convolutions a block."""
  names = list(names)
  layers = {match[1] for name in names if (match := _LAYER[naming].match(name))}
  return stage_blocks(names, _BLOCK[naming]), len(layers)


def stage_blocks(names: Iterable[str], pattern: re.Pattern) -> tuple[int, ...]:
  """Returns the number of blocks of each stage.

  Args:
    names: names of a network's tensors.
    pattern: expression for a block's tensors, whose groups are the numbers of the
      stage and of the block in it, from 0.
  """
  blocks = {(int(match[1]), int(match[2])) for name in names if (match := pattern.match(name))}
  # A block without any tensor counts, so that the error names them.
  counts = {stage: block + 1 for stage, block in sorted(blocks)}
  return tuple(counts[stage] for stage in sorted(counts))


def variant(shapes: dict[str, tuple[int, ...]]) -> tuple[int, dict]:
  """Returns the width of torchvision's or timm's network, and its fields.

  Args:
    shapes: shapes of the tensors by their names.

  Returns:
    Channels of the first stage, and what `models.resnet.NETWORKS` has of it.
  """
  stages, layers = blocks(shapes, TORCHVISION)
  is_deep = 'conv1.6.weight' in shapes
  stem = shapes.get('conv1.6.weight') or shapes['conv1.weight']
  fields: dict[str, Any] = dict(stages=stages, bottleneck=layers == 3)
  if is_deep:
    fields |= dict(stem='deep', shortcut='pooled')
  elif stem[-1] == 3:
    fields |= dict(stem='small', shortcut='padding')
  if 'layer1.0.se.fc1.weight' in shapes:
    fields['squeeze'] = 16
  inner = shapes.get('layer1.0.conv2.weight', ())
  if layers == 3 and len(inner) == 4 and stem[0] * inner[1]:
    groups = inner[0] // inner[1]
    group_width = 64 * inner[1] // stem[0]
    if groups > 1:
      fields['groups'] = groups
    if (groups, group_width) != (1, 64):
      fields['group_width'] = group_width
  return stem[0], fields


def describe(names: Iterable[str], naming: str) -> str:
  """Returns what ResNet a file holds, for people."""
  stages, layers = blocks(names, naming)
  return f'{", ".join(map(str, stages)) or "no"} blocks of {layers} convolutions'
