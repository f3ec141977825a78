"""Caffe's LeNet: its network and, where there are keys, its solver.

  python main.py --config=configs/lenet.py --workdir=runs/lenet

trains on scikit-learn's digits (pip install scikit-learn): 97.7 to 98.3 % of
355 images (three seeds) after 20 epochs, in a quarter of a minute on two cores.

  python main.py --config=configs/lenet.py:mnist --workdir=runs/mnist
    --config.data.source=arrays --config.data.path=MNIST

is the original: 10,000 steps on the four idx files in the folder MNIST, or,
without the last two flags, on what `tfds build mnist` prepared. MNIST as a tree
of images, MNIST/train/7/1.png and MNIST/test/7/2.png, also as training/ and
testing/, takes --config.data.source=folder.

The solver's rate 0.01 (1 + 1e-4 s)^-0.75 is the polynomial below to 1.5 %. Of
its own rate for biases, see `anp_jax/models/convnets.py`.
"""

from anp_jax import config as config_lib

VARIANTS = {
  'mnist': {
    'duration': '10000 steps',
    'data.source': 'tfds:mnist',
    'data.eval_split': 'test',
    'eval.every': '500 steps',
    'checkpoint.every': '5000 steps',
    'log.every': '100 steps',
  }
}


def get_config(variant: str = ''):
  """The recipe on digits, or one of VARIANTS."""
  c = config_lib.base()
  c.duration = '20 epochs'
  c.batch_size = 64
  c.model.name = 'lenet'
  c.data.source = 'digits'
  c.data.image_size = c.data.resize = 28
  c.data.augment = 'none'
  c.data.mean = (0.0, 0.0, 0.0)
  c.data.std = (256.0, 256.0, 256.0)  # as the original scales
  c.optimizer.name = 'momentum'
  c.optimizer.learning_rate = 0.01
  c.optimizer.weight_decay = 5e-4
  c.schedule.name = 'polynomial'
  c.schedule.end = 0.595  # 2^-0.75, at the last step
  c.schedule.power = 1.5
  c.eval.every = '2 epochs'
  c.checkpoint.every = '10 epochs'
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
