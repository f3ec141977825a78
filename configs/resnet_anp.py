"""ResNets that name Adjective-Noun Pairs.

  python main.py --config=configs/resnet_anp.py --workdir=runs/first

trains ResNet-50 on the embedded set anp_shapes (60 pairs, 48 px, chance 2 %).
Variants, as in --config=configs/resnet_anp.py:demo

  demo       ResNet-18 at 48 px: minutes on two CPU cores
  zero_shot  the same, of whose 60 pairs six are named without an example: 31 %
             of their images right (chance 2 %), 98 % of those of the others
  paper      the recipe of Torres et al. 2017 for 224 px photographs; without
             a data source it enlarges the embedded drawings of 72 px, which
             tries the recipe out but says nothing of the accuracy it reaches
  anp553     the same on your photographs of the 553 pairs of the VSO subset
  anp1200    the same on your photographs of the 1,200 pairs of English MVSO
  modern     the recipe to start from on accelerators, 224 px, bfloat16
  tiny       seconds; for tests

A tree of your own images: --config.data.source=folder --config.data.path=DIR

anp553 and anp1200 train on a tree of your photographs with a folder for each
pair. The published lists of pairs, adjectives and nouns give the classes their
ids; they are looked for in the current folder, else name them:

  python main.py --config=configs/resnet_anp.py:anp553 --workdir=runs/anp553
    --config.data.path=DIR [--config.data.lists=PAIRS,ADJECTIVES,NOUNS]

Torres et al. began with ImageNet's weights: --config.init.from=FILE, together
with that file's own model.version, data.mean and data.std.

Published accuracies, and how to train for each of their rows:
python -m anp_jax.tools.study papers anp553. Neither recipe has been run on its
photographs here.
"""

from anp_jax import config as config_lib

_DEMO = {'model.name': 'resnet18', 'duration': '5 epochs', 'optimizer.learning_rate': 0.1}

# Torres et al., CCGrid 2017: 32 images an accelerator, RMSProp, rate 0.1
# times 0.9 every 10 epochs, averaged weights.
_PAPER = {
  'batch_size': 0,  # 32 x accelerators
  'batch_size_per_device': 32,
  'duration': '100 epochs',
  'ema': 0.9999,
  'model.version': 'v1',
  'model.zero_init': False,
  'data.image_size': 224,
  'data.resize': 256,
  'data.augment': 'scale',
  'data.scale_range': (256, 512),
  'data.std': (1.0, 1.0, 1.0),  # only the mean is subtracted
  'optimizer.name': 'rmsprop',
  'optimizer.learning_rate': 0.1,
  'optimizer.decay': 0.9,
  'optimizer.momentum': 0.9,
  'optimizer.eps': 1.0,
  'optimizer.weight_decay': 1e-4,
  'optimizer.clip_value': 2.0,
  'schedule.name': 'exponential',
  'schedule.every': '10 epochs',
  'schedule.factor': 0.9,
  'schedule.warmup': '0 steps',
}

VARIANTS = {
  'demo': _DEMO,
  # Six adjectives and six nouns; each is seen in three other pairs or more.
  'zero_shot': {
    **_DEMO,
    'model.head': 'factored',
    'data.held_out': (
      'striped_star',
      'dotted_house',
      'hollow_heart',
      'tiny_circle',
      'rainbow_flower',
      'huge_moon',
    ),
  },
  'paper': _PAPER,
  # A photograph counts for training or validation by a hash of its name; split
  # files of your own: data.train_split, data.eval_split.
  'anp553': {
    **_PAPER,
    'data.source': 'folder',
    'data.lists': 'mtvso553_anplabels.txt,mtvso553_adjlabels.txt,mtvso553_nounlabels.txt',
  },
  'anp1200': {
    **_PAPER,
    'data.source': 'folder',
    'data.lists': 'mvso1200_anp_list.txt,mvso1200_adj_list.txt,mvso1200_noun_list.txt',
  },
  'modern': {
    'batch_size': 1024,
    'duration': '90 epochs',
    'label_smoothing': 0.1,
    'ema': 0.9999,
    'model.dtype': 'bfloat16',
    'data.image_size': 224,
    'data.resize': 256,
    'data.crop_area': (0.08, 1.0),
    'data.mixup': 0.2,
    'optimizer.learning_rate': 2.0,  # 0.5 for each 256 images
    'optimizer.weight_decay': 5e-5,
    'schedule.warmup': '5 epochs',
    'log.every': '100 steps',
  },
  'tiny': {
    'batch_size': 16,
    'duration': '12 steps',
    'model.name': 'resnet18',
    'model.width': 8,
    'model.norm_group': 8,
    'data.source': 'synthetic',
    'data.image_size': 32,
    'data.resize': 32,
    'data.synthetic_examples': 64,
    'data.synthetic_classes': 12,
    'schedule.warmup': '2 steps',
    'eval.every': '6 steps',
    'eval.batch_size': 32,
    'eval.examples': False,
    'checkpoint.every': '4 steps',
    'log.every': '2 steps',
  },
}


def get_config(variant: str = ''):
  """The plain recipe, or one of VARIANTS."""
  config = config_lib.base()
  config.duration = '6 epochs'
  config.data.image_size = 48
  config.data.resize = 55
  config.schedule.warmup = '1 epochs'
  config.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return config
