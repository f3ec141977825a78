"""The networks, images and goals of the benchmark of the training step."""

from collections.abc import Mapping
import dataclasses

from scripts.bench import _common

# Of all contestants, ours too.
RATE, MOMENTUM, DECAY = 1e-3, 0.9, 5e-4
# Of the peers' pixels, and ResNets' blocks a stage.
MEAN = (123.68, 116.78, 103.94)
STD = (58.4, 57.1, 57.4)
BLOCKS = {'resnet18': (2, 2, 2, 2), 'resnet50': (3, 4, 6, 3)}


@dataclasses.dataclass(frozen=True)
class Case:
  """What is trained.

  Attributes:
    model: as config.model.name.
    side: pixels a side of the images.
    batch: images a step.
    norm_group: as config.model.norm_group, ours alone; peers have no groups.
    augment: as config.data.augment, ours alone.
    goals: contestant, or 'torch' for the faster of PyTorch's, to how many times
      as fast as that ours is to be.
  """

  model: str
  side: int
  batch: int
  dtype: str = 'float32'
  classes: int = 1000
  norm_group: int = 0
  augment: str = 'crop'
  goals: Mapping[str, float] = dataclasses.field(default_factory=dict)


CASES = {
  'resnet50_64': Case('resnet50', 64, 32, goals={'flax': 3.5, 'torch': 1.1}),
  'resnet50_224': Case('resnet50', 224, 8, goals={'flax': 3.5, 'torch': 1.05}),
  'resnet50_64_bfloat16': Case('resnet50', 64, 32, 'bfloat16', goals={'torch': 1.0}),
  'resnet50_224_bfloat16': Case(
    'resnet50', 224, 8, 'bfloat16', goals={'flax': 3.5, 'torch': 1.0, 'float32': 1.7}
  ),
  # As configs/resnet_anp.py:demo, of 60 pairs.
  'resnet18_demo': Case('resnet18', 48, 64, classes=60, norm_group=32, goals={'xla': 1.3}),
  'lenet': Case('lenet', 28, 64, classes=10, goals={'torch': 1.05}),
  'cifar10_full': Case('cifar10_full', 32, 100, classes=10, goals={'torch': 1.05}),
  **{
    f'{name}_gpu': Case(name, 224, 256, 'bfloat16', goals={'torch': 1.0})
    for name in ('resnet50', 'convnext_tiny', 'efficientnet_b0')
  },
  **{
    f'{name}_64': Case(name, 64, 32, goals={'torch': 1.0})
    for name in (
      'resnet50d seresnet50 resnext50_32x4d wide_resnet50_2 convnext_tiny '
      'convnext_small convnext_base convnextv2_atto convnextv2_tiny efficientnet_b0 '
      'efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnetv2_s'
    ).split()
  },
  'tiny': Case('lenet', 16, 4, classes=10),  # for tests
}


def config(case: Case, cache: str = '', cpu_library: str = 'auto'):
  """The config of a run that trains a case.

  Args:
    case: what is trained.
    cache: folder of the persistent compilation cache; '': as by default.
    cpu_library: as config.model.cpu_library.
  """
  keys = _common.synthetic(case.model, case.side, case.batch) | {
    'data.augment': case.augment,
    'data.synthetic_classes': str(case.classes),
    'model.cpu_library': cpu_library,
    'model.dtype': case.dtype,
    'model.norm_group': str(case.norm_group),
    'optimizer.learning_rate': str(RATE),
    'optimizer.momentum': str(MOMENTUM),
    'optimizer.name': 'momentum',
    'optimizer.weight_decay': str(DECAY),
    'schedule.name': 'constant',
  }
  if cache:
    keys['compile_cache.dir'] = cache
  return _common.load(keys)
