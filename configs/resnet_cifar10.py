"""He et al. 2015 on CIFAR-10: ResNet-20, 32 and 56 (arXiv 1512.03385, 4.2).

  python main.py --config=configs/resnet_cifar10.py --workdir=runs/cifar
    --config.data.source=arrays --config.data.path=CIFAR10

trains ResNet-20 by the paper's recipe, 64,000 steps, on CIFAR-10's batches in
the folder CIFAR10, or, without the last two flags, on what `tfds build cifar10`
prepared. --config.model.name=resnet56 is the deepest. The paper's errors are
8.75 % (ResNet-20), 7.51 % (32) and 6.97 % (56). `configs/cifar10_fast.py` takes a
tenth of the epochs. Variant, as in --config=configs/resnet_cifar10.py:tiny

  tiny       seconds, on synthetic images; for tests

CIFAR-10 as a tree of images, CIFAR10/train/frog/1.png and
CIFAR10/test/frog/2.png, takes --config.data.source=folder; with validation/ in
place of test/, also --config.data.eval_split=validation.

Shortcuts are the paper's for CIFAR, option A: every other pixel between
channels of zeros, no parameters. Different from the paper's: pixels are divided
by their deviation and their mean is a colour, not an image; batch statistics
are of 32 images.
"""

from anp_jax import config as config_lib

VARIANTS = {
  'tiny': {
    'batch_size': 16,
    'duration': '4 steps',
    'model.width': 4,
    'model.norm_group': 8,
    'data.source': 'synthetic',
    'data.eval_split': 'validation',
    'data.synthetic_examples': 64,
    'data.synthetic_classes': 12,
    'schedule.every': '2 steps, 3 steps',
    'eval.every': '4 steps',
    'eval.batch_size': 32,
    'eval.examples': False,
    'checkpoint.every': '4 steps',
    'log.every': '2 steps',
  }
}


def get_config(variant: str = ''):
  """The paper's recipe, or one of VARIANTS."""
  c = config_lib.base()
  c.duration = '64000 steps'
  c.batch_size = 128
  c.model.name = 'resnet20'
  c.model.width = 16
  c.model.zero_init = False
  c.data.source = 'tfds:cifar10'
  c.data.eval_split = 'test'
  c.data.image_size = c.data.resize = 32
  c.data.augment = 'pad'  # by 4 pixels
  c.data.mean = (125.3, 123.0, 113.9)  # of the training set's pixels
  c.data.std = (63.0, 62.1, 66.7)
  c.optimizer.name = 'momentum'
  c.optimizer.learning_rate = 0.1
  c.optimizer.weight_decay = 1e-4
  c.schedule.name = 'step'
  c.schedule.every = '32000 steps, 48000 steps'
  c.schedule.factor = 0.1
  c.eval.every = '2000 steps'
  c.checkpoint.every = '2000 steps'
  c.log.every = '100 steps'
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
