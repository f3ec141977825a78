"""Names of a ResNet's tensors: ours, torchvision's (and timm's), transformers'.

Ours are paths in the variables of `models.resnet`, such as
'params/stage1_block2/conv1/kernel' and 'batch_stats/stem_norm/mean'. Published
ones count blocks from 0; their kernels are (out, in, height, width), and dense
ones (out, in).
"""

from collections.abc import Iterable
import re

import numpy as np

TORCHVISION = 'torchvision and timm'
TRANSFORMERS = 'transformers'
# The classifier of each; another data set has another one.
CLASSIFIERS = {TORCHVISION: 'fc.', TRANSFORMERS: 'classifier.'}
# Counts of training steps, which only a momentum of None would read.
UNUSED = 'num_batches_tracked'

_LEAVES = {
  'kernel': 'weight', 'scale': 'weight', 'bias': 'bias',
  'mean': 'running_mean', 'var': 'running_var',
}  # fmt: skip
_PATH = re.compile(
  r'(?:params|batch_stats)/(?:stage(\d+)_block(\d+)/(?=shortcut|conv|norm)'
  r'|(?=stem|head))(stem|head|shortcut|conv|norm)(?:_(conv|norm))?(\d*)/(\w+)'
)
_EMBEDDER = 'embedder.embedder'
_BLOCK = {
  TORCHVISION: re.compile(r'layer(\d+)\.(\d+)\.'),
  TRANSFORMERS: re.compile(
    r'(?:resnet\.)?encoder\.stages\.(\d+)\.layers\.(\d+)'
  ),
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
  if 'conv1.weight' in names and 'bn1.weight' in names:
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
      'stem': 'conv1' if kind == 'conv' else 'bn1',
      'shortcut': f'downsample.{int(kind == "norm")}',
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
      place = (
        f'{prefix}encoder.stages.{int(stage) - 1}.layers.{int(block) - 1}.'
      )
  return f'{place}{module}.{_LEAVES[leaf]}'


def to_published(name: str, value: np.ndarray) -> np.ndarray:
  """Returns a tensor of ours with its axes in the published order."""
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


def describe(names: Iterable[str], naming: str) -> str:
  """Returns what ResNet a file holds, for people."""
  stages, layers = blocks(names, naming)
  return (
    f'{", ".join(map(str, stages)) or "no"} blocks of {layers} convolutions'
  )
