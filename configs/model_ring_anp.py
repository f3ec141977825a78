"""Four networks in a ring: which learning rate, which depth?

  python main.py --config=configs/model_ring_anp.py --workdir=runs/model_ring

trains a ResNet-18 at three learning rates and a ResNet-34 on the embedded set
anp_shapes, 32 px. Every device (or process) keeps a part of the images, and the
networks go round; with one device it is one station. On more:

  JAX_NUM_CPU_DEVICES=2 python main.py ...      two CPU devices
  scripts/launch_local.sh 2 --bind ...          two processes, a core each
  sbatch scripts/slurm/train.sbatch ...         a cluster, see docs/clusters.md

WORKDIR/leaderboard.md has the scores after every lap. Variants:

  tiny   seconds; for tests
"""

from anp_jax import config as config_lib

VARIANTS = {
  'tiny': {
    'batch_size': 16,
    'duration': '2 epochs',
    'model.width': 4,
    'model.norm_group': 8,
    'data.source': 'synthetic',
    'data.synthetic_examples': 64,
    'data.synthetic_classes': 12,
    'schedule.warmup': '2 steps',
    'eval.batch_size': 32,
    'log.every': '2 steps',
    'strategy.models': ('seed=1', 'seed=2; optimizer.learning_rate=0.1'),
  }
}


def get_config(variant: str = ''):
  """The plain recipe, or one of VARIANTS."""
  c = config_lib.base()
  c.duration = '6 epochs'
  c.model.name = 'resnet18'
  c.model.width = 16
  c.data.image_size = 32
  c.data.resize = 36
  c.data.cache = 'mapped'  # networks come back to the same images
  c.schedule.warmup = '1 epochs'
  c.strategy.name = 'model_ring'
  c.strategy.models = (
    'optimizer.learning_rate=0.05',
    'optimizer.learning_rate=0.1',
    'optimizer.learning_rate=0.2',
    'optimizer.learning_rate=0.1; model.name=resnet34',
  )
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
