"""Caffe's CIFAR-10 "full": its network and, where there are keys, its solver.

  python main.py --config=configs/cifar10_full.py --workdir=runs/full

trains on scikit-learn's digits (pip install scikit-learn): 97.5 to 99.2 % of
355 images (three seeds) after 70 epochs, a minute and a half on two CPU cores.

  python main.py --config=configs/cifar10_full.py:cifar10 --workdir=runs/cifar
    --config.data.source=arrays --config.data.path=CIFAR10

is the original: 70,000 steps on CIFAR-10's batches in the folder CIFAR10, or,
without the last two flags, on what `tfds build cifar10` prepared. CIFAR-10 as a
tree of images, CIFAR10/train/frog/1.png and CIFAR10/test/frog/2.png, takes
--config.data.source=folder; with validation/ in place of test/, also
--config.data.eval_split=validation. JPEG loses a little accuracy. The rate
falls once, after 60,000 steps; the original's a second time, after 65,000.
"""

from anp_jax import config as config_lib

VARIANTS = {
  'cifar10': {
    'duration': '70000 steps',
    'data.source': 'tfds:cifar10',
    'data.eval_split': 'test',
    'data.mean': (125.3, 123.0, 113.9),  # of the training set's pixels
    # The original's: without, the network learns its training set by heart.
    'optimizer.decay_multipliers': (('head', 250.0),),
    'optimizer.multipliers': (('bias', 2.0),),
    'schedule.every': '60000 steps',
    'eval.every': '1000 steps',
    'checkpoint.every': '10000 steps',
    'log.every': '200 steps',
  }
}


def get_config(variant: str = ''):
  """The recipe on digits, or one of VARIANTS."""
  c = config_lib.base()
  c.duration = '70 epochs'
  c.batch_size = 100
  c.model.name = 'cifar10_full'
  c.data.source = 'digits'
  c.data.image_size = c.data.resize = 32
  c.data.augment = 'none'
  c.data.mean = (78.0, 78.0, 78.0)  # of the digits' pixels
  c.data.std = (1.0, 1.0, 1.0)  # what the response normalisation is tuned for
  c.optimizer.name = 'momentum'
  c.optimizer.learning_rate = 0.001
  c.optimizer.weight_decay = 0.004
  c.schedule.name = 'step'
  c.schedule.every = '60 epochs'  # the original's 60,000 of 70,000 steps
  c.schedule.factor = 0.1
  c.eval.every = '5 epochs'
  c.checkpoint.every = '10 epochs'
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
