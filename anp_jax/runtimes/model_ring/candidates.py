"""The models of a ring: one config, and what differs in each."""

import dataclasses

import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir

_KEY = 'config.strategy.models'
# Groups and keys that may differ: all that describe neither the run nor its shards.
_FREE = tuple(
  'seed batch_size batch_size_per_device accumulate label_smoothing ema init model optimizer '
  'schedule data.augment data.crop_area data.crop_ratio data.scale_range data.rand_augment_ops '
  'data.rand_augment_magnitude data.erase data.flip data.mixup data.cutmix data.mean '
  'data.std'.split()
)


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One of the models.

  Attributes:
    index: index among all models, in the order in which they enter the ring.
    text: differing keys, as they stand in the config.
    config: config of this model alone.
    run_seed: seed of the run, which makes the synthetic validation examples that
      all models share.
  """

  index: int
  text: str
  config: ml_collections.ConfigDict
  run_seed: int

  @property
  def name(self) -> str:
    """The name of the model's folder."""
    return f'{self.index:03}'


def create(config: ml_collections.ConfigDict, devices: int) -> list[Candidate]:
  """Returns the candidates of config.strategy.models.

  Args:
    config: the run's config.
    devices: number of a station's devices, for batch_size_per_device.

  Raises:
    ConfigError: naming the candidate and the key at fault.
  """
  candidates = []
  for index, text in enumerate(config.strategy.models):
    try:
      model_config = config_lib.resolved(config, _overrides(text))
    except config_lib.ConfigError as e:
      raise config_lib.ConfigError(f'{_KEY}[{index}]={text!r}: {e}') from None
    # Another list must not make a candidate's checkpoints another model's.
    model_config = config_lib.replaced(model_config, {'strategy.models': ()})
    model_config = run_dir.with_sizes(model_config, '', devices)
    candidates.append(Candidate(index, text.strip(), model_config, config.seed))
  return candidates


def laps(key: str, text: str) -> int:
  """Converts a duration to laps of the ring, which are epochs.

  Args:
    key: key of the config, named in the error.
    text: value of the key.

  Raises:
    ConfigError: if that is not a whole number of epochs.
  """
  # In millionths, so that no half of a lap is rounded away.
  count = config_lib.steps(text, 1, 10**6) / 10**6
  if 'epoch' not in text or count != int(count):
    raise config_lib.ConfigError(
      f'config.{key}={text!r}: expected whole epochs where '
      'config.strategy.name is model_ring: a model goes round once an epoch'
    )
  return int(count)


def _overrides(text):
  """Returns the texts that make one model differ, by dotted key."""
  keys = config_lib.known_keys('model_ring')
  overrides = {}
  for part in filter(str.strip, text.split(';')):
    key, equals, value = part.partition('=')
    key = key.strip()
    if not equals:
      raise config_lib.ConfigError(f'{part.strip()!r}: expected key=value, with ; between several')
    if key in keys and key not in _FREE and key.rpartition('.')[0] not in _FREE:
      raise config_lib.ConfigError(
        f'config.{key} is the same for all models of a ring; these may differ: {", ".join(_FREE)}'
      )
    overrides[key] = value.strip()
  return overrides
