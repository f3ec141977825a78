"""What a person who mistypes is told: one line, with the nearest name."""

import difflib
import os

# Below this share of equal letters a proposal is nonsense: maybe, yes.
_ALIKE = 0.6


class ConfigError(ValueError):
  """A config, flag or workdir the run cannot start with; one clear line."""


def nearest(name: str, valid) -> str:
  """Returns the valid name nearest to `name`, as text for an error line.

  A name that was not typed to its end comes first, then a key that was typed
  without its group, then a name that is much alike; '' where none is.
  """
  name, valid = str(name), [str(v) for v in valid]
  stem, suffix = os.path.splitext(name)
  continued = [v for v in valid if v.startswith(stem) and v.endswith(suffix)]
  continued = continued if len(stem.strip('-')) > 1 else []
  leaf = name.rpartition('.')[2]
  same_leaf = [v for v in valid if v.rpartition('.')[2] == leaf]
  for candidates, cutoff in ((continued, 0), (same_leaf, 0), (valid, _ALIKE)):
    matches = difflib.get_close_matches(name, candidates, 1, cutoff)
    if matches:
      return f'; did you mean {matches[0]!r}?'
  return ''


def check(good, key: str, value, expected: str) -> None:
  """Raises ConfigError, naming the key and what was expected, if not good."""
  if not good:
    raise ConfigError(f'config.{key}={value!r}: expected {expected}')
