"""The splits of a data set: their usual names, and the halves of a set without splits."""

from collections.abc import Iterable
import hashlib

from anp_jax import config as config_lib

# Usual names of splits, in lower case; one row is one split.
USUAL = (
  ('train', 'training', 'training_set', 'train_set'),
  ('validation', 'valid', 'val', 'validation_set', 'valid_set', 'val_set'),
  ('test', 'testing', 'test_set', 'testing_set'),
)
SPLIT = '{split}'  # in a pattern of files, stands for the name of a split
HALVES = ('train', 'validation')
_TRAIN_SHARE = 0.8  # of a set without splits
KEYS = 'set config.data.train_split and config.data.eval_split'


def usual_names(split: str) -> tuple[str, ...]:
  """The name of a split, then the others that it usually goes by."""
  lower = split.casefold()
  usual = next((names for names in USUAL if lower in names), ())
  return (split, *(name for name in usual if name != lower))


def matches(split: str, names: Iterable[str]) -> list[str]:
  """The names that mean a split: the same, else in any case, else a usual one."""
  names, lower, usual = list(names), split.casefold(), usual_names(split)
  return (
    [name for name in names if name == split]
    or [name for name in names if name.casefold() == lower]
    or [name for name in names if name.casefold() in usual]
  )


def choose(place: str, split: str, names: Iterable[str], alone: str = '') -> str:
  """The name of a split as the set has it.

  Args:
    place: name of the set in messages.
    split: name that the run gives.
    names: splits of the set.
    alone: beginning of the config value that names an only split as a set of its
      own; '': there is none.

  Raises:
    ConfigError: if none of the names, or more than one, means the split.
  """
  names = list(names)
  result = matches(split, names)
  if len(result) == 1:
    return result[0]
  if result:
    raise config_lib.ConfigError(
      f'{place} has several splits that may be {split!r} ({", ".join(result)}); {KEYS}'
    )
  text = f'{place} has no split {split!r} (it has {", ".join(names)}); {KEYS}'
  if len(names) > 1 and split == 'validation':
    text += f', as in config.data.eval_split={names[-1]}'
  if len(names) == 1 and alone:
    text += f', or {alone}{names[0]} to have that divided into train and validation'
  raise config_lib.ConfigError(text + config_lib.nearest(split, names))


def check_half(place: str, split: str) -> None:
  """Refuses other splits of a set without splits than '', train and validation."""
  if split and split not in HALVES:
    raise config_lib.ConfigError(
      f'{place} has no split {split!r}; a set without splits is divided into train and '
      f'validation: {KEYS} to these{config_lib.nearest(split, HALVES)}'
    )


def in_half(name: str, split: str) -> bool:
  """Whether an image of a set without splits is in one of its halves.

  No image's half depends on other images, so a new one moves none.

  Args:
    name: image, as the set names it.
    split: 'train' or 'validation'; '' for both.
  """
  digest = hashlib.sha256(name.encode(errors='surrogateescape')).digest()
  in_train = int.from_bytes(digest[:8], 'big') / 2.0**64 < _TRAIN_SHARE
  return not split or in_train == (split == 'train')
