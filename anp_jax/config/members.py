"""The numbers in which members of an ensemble may differ."""

import ml_collections

from anp_jax.config import resolve, simulation_keys

RATE = 'optimizer.learning_rate'
_DECAY = 'optimizer.weight_decay'  # without it, the program is another
NUMBERS = ('seed', RATE, 'optimizer.momentum', _DECAY, 'label_smoothing')


def program_key(config: ml_collections.ConfigDict) -> str:
  """Returns a text that is equal for configs whose members share a program."""
  values = resolve.flat(config)
  for key in NUMBERS:
    # By its seed, a training keeps other examples of an imbalanced set.
    if key in values and not (key == 'seed' and values['data.imbalance'] != 1):
      values[key] = bool(values[key]) if key == _DECAY else None
  return repr(sorted(item for item in values.items() if not _is_time(item[0])))


def _is_time(key):
  """Whether a key is a time of simulated workers, which no program has."""
  return key.startswith('strategy.simulate.') and key != simulation_keys.WORKERS
