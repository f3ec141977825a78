"""Names of a ResNet's tensors: ours, torchvision's (and timm's), transformers'.

Ours are paths in the variables of `models.resnet`, such as
'params/stage1_block2/conv1/kernel' and 'batch_stats/stem_norm/mean'. Published
ones count blocks from 0; their kernels are (out, in, height, width), and dense
ones (out, in).
"""

from collections.abc import Iterable
import re

import numpy as np

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

_LEAVES = {
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
    prefix: of transformers' backbone: '' in a bare ResNetModel.

  Raises:
    ValueError: if no ResNet has a tensor of that name.
  """
  match = _PATH.fullmatch(name)
  if not match or match[6] not in _LEAVES:
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
  return f'{place}{module}.{_LEAVES[leaf]}'


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


def mismatch(config, names, naming: str, saved_config: dict) -> str:
  """Returns why a file's network is another, whatever its tensors; ''.

  Where a bottleneck strides, no tensor tells: transformers' config does.

  Args:
    config: of the run that begins.
    names: of its network's tensors.
    naming: of the file's tensors.
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


def prefix(config) -> str:
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
  counts, layers = {}, set()
  for name in names:
    if match := _BLOCK[naming].match(name):
      stage, block = int(match[1]), int(match[2])
      counts[stage] = max(counts.get(stage, 0), block + 1)
    if match := _LAYER[naming].match(name):
      layers.add(match[1])
  return tuple(counts[stage] for stage in sorted(counts)), len(layers)


def variant(shapes: dict[str, tuple[int, ...]]) -> tuple[int, dict]:
  """Returns the width of torchvision's or timm's network, and its fields.

  Args:
    shapes: of the tensors by their names.

  Returns:
    Channels of the first stage, and what `models.resnet.NETWORKS` has of it.
  """
  stages, layers = blocks(shapes, TORCHVISION)
  is_deep = 'conv1.6.weight' in shapes
  stem = shapes.get('conv1.6.weight') or shapes['conv1.weight']
  fields = dict(stages=stages, bottleneck=layers == 3)
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
