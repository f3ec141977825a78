"""The numbers in which members of an ensemble may differ."""

import ml_collections

from anp_jax.config import resolve

RATE = 'optimizer.learning_rate'
_DECAY = 'optimizer.weight_decay'  # without it, the program is another
NUMBERS = ('seed', RATE, 'optimizer.momentum', _DECAY, 'label_smoothing')


def program_key(config: ml_collections.ConfigDict) -> str:
  """Returns a text that is equal for configs whose members share a program."""
  values = resolve.flat(config)
  for key in NUMBERS:
    if key in values:
      values[key] = bool(values[key]) if key == _DECAY else None
  return repr(sorted(values.items()))
