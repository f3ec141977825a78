"""Classifiers of features that an encoder has written: minutes on any computer.

  python main.py --config=configs/features.py --workdir=runs/probe
    --config.data.source=features:clip-{split}.npz

trains a linear probe on clip-train.npz and scores it on clip-validation.npz.
`anp-predict --features` writes such files with any network here, and other encoders'
are arrays with the names of their images (docs/anp.md). Any head of
config.model.head is trained on them as well. Variants, as in
--config=configs/features.py:fusion

  fusion     names pairs from the outputs of two networks, one of adjectives and one of
             nouns, after Fernandez et al. 2017 (arXiv 1708.06039):
             --config.data.source=features:adj-{split}.npz#logits,noun-{split}.npz#logits
  tiny       seconds; for tests
"""

from anp_jax import config as config_lib

VARIANTS = {
  # An evaluation says what each network contributes, in classes.csv.
  'fusion': {'data.pairs': 'yes'},
  'tiny': {'batch_size': 16, 'duration': '8 epochs', 'schedule.warmup': '2 steps'},
}


def get_config(variant: str = ''):
  """A linear probe, or one of VARIANTS."""
  config = config_lib.base()
  config.batch_size = 256
  config.duration = '50 epochs'
  config.model.name = 'linear'
  config.model.norm_group = 0
  config.data.source = 'features:FILE-{split}.npz'
  config.optimizer.learning_rate = 0.1
  config.optimizer.weight_decay = 0.0
  config.schedule.name = 'cosine'
  config.schedule.warmup = '1 epochs'
  config.log.every = '100 steps'
  config.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return config
