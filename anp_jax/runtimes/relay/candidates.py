"""The models of a ring: one config, and what differs in each."""

import dataclasses

from anp_jax import config as config_lib
from anp_jax.config import validation

_KEY = 'config.strategy.models'
# Groups and keys that may differ: all that is not of the run or of the parts.
_OWN = (
  'seed', 'batch_size', 'batch_size_per_device', 'accumulate',
  'label_smoothing', 'ema', 'init', 'model', 'optimizer', 'schedule',
  'data.augment', 'data.crop_area', 'data.crop_ratio', 'data.scale_range',
  'data.flip', 'data.mixup', 'data.cutmix', 'data.mean', 'data.std',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One of the models.

  Attributes:
    index: among all, in the order in which they enter the ring.
    text: what differs, as it stands in the config.
    config: of this model alone.
    run_seed: of the run: synthetic validation examples are made of it, the same
      for all models.
  """

  index: int
  text: str
  config: object
  run_seed: int

  @property
  def name(self) -> str:
    """Of its folder."""
    return f'{self.index:03}'


def create(config, devices: int) -> list[Candidate]:
  """The candidates of config.strategy.models.

  Args:
    config: the run's config.
    devices: of a station, for batch_size_per_device.

  Raises:
    ConfigError: naming the candidate and the key at fault.
  """
  found = []
  for index, text in enumerate(config.strategy.models):
    own = config.copy_and_resolve_references()
    try:
      for part in text.split(';'):
        if part.strip():
          _differ(own, part)
      validation.validate(own)
    except config_lib.ConfigError as e:
      raise config_lib.ConfigError(f'{_KEY}[{index}]={text!r}: {e}') from None
    # Another list must not make a candidate's checkpoints another model's.
    own.strategy.models = ()
    own.strategy.at_once = own.strategy.halving = 0
    if not own.batch_size:
      own.batch_size = own.batch_size_per_device * devices
    found.append(Candidate(index, text.strip(), own, config.seed))
  return found


def epochs(key: str, text: str) -> int:
  """A duration in laps of the ring.

  Args:
    key: of the config, named where the text is refused.
    text: its value.

  Raises:
    ConfigError: if that is not a whole number of epochs.
  """
  # In millionths, so that no half of a lap is rounded away.
  laps = config_lib.steps(text, 1, 10**6) / 10**6
  if 'epoch' not in text or laps != int(laps):
    raise config_lib.ConfigError(
      f'config.{key}={text!r}: expected whole epochs where '
      'config.strategy.name is relay: a model goes round once an epoch'
    )
  return int(laps)


def _differ(config, part):
  key, equals, value = part.partition('=')
  key = key.strip()
  if not equals:
    raise config_lib.ConfigError(
      f'{part.strip()!r}: expected key=value, with ; between several'
    )
  known = config_lib.flat(config)
  free = [k for k in known if k in _OWN or k.rpartition('.')[0] in _OWN]
  if key in known and key not in free:
    raise config_lib.ConfigError(
      f'config.{key} is the same for all models of a ring; these may differ: '
      f'{", ".join(_OWN)}'
    )
  validation.override(config, key, value.strip())
