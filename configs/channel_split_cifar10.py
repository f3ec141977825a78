"""Two wide convolutions, divided by channels: Marques et al. 2017.

  scripts/launch_local.sh 2 --bind --config=configs/channel_split_cifar10.py
    --workdir=runs/split

trains the smallest of the paper's networks, 50 and 500 kernels, on the embedded
set anp_shapes at 32 px. All devices, here two processes with a core each, have
the same batch; of each convolution each computes as many channels as the run's
plan says, which is made of what they are timed to take, or as many as
--config.strategy.shares="(2, 1)" says. On one device nothing is split. With
--config.strategy.offload_to="('processes',)" the second process, of any
platform, only helps the first.
Under Slurm: sbatch scripts/slurm/train.sbatch --config=... . Variants:

  150x800, 300x1000, 500x1500   the paper's other networks; the last one has
                                thirty times the smallest's multiplications
  cifar10                       50 and 500 kernels on what `tfds build cifar10`
                                prepared
"""

from anp_jax import config as config_lib

VARIANTS = {
  '150x800': {'model.kernels': (150, 800)},
  '300x1000': {'model.kernels': (300, 1000)},
  '500x1500': {'model.kernels': (500, 1500)},
  'cifar10': {'data.source': 'tfds:cifar10', 'data.eval_split': 'test'},
}


def get_config(variant: str = ''):
  """The plain recipe, or one of VARIANTS."""
  c = config_lib.base()
  c.duration = '3 epochs'
  c.model.name = 'two_convolutions'
  c.model.kernels = (50, 500)
  c.data.image_size = c.data.resize = 32
  c.data.augment = 'none'
  c.optimizer.name = 'momentum'
  c.optimizer.learning_rate = 0.01
  c.schedule.warmup = '1 epochs'
  c.strategy.name = 'channel_split'
  c.mesh.data, c.mesh.model = 1, -1
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
