"""What a person who mistypes is told: one line, with the nearest name."""

import difflib


class ConfigError(ValueError):
  """A config, flag or workdir the run cannot start with; one clear line."""


def nearest(name: str, valid) -> str:
  """Returns the valid name nearest to `name`, as text for an error line."""
  valid = [str(v) for v in valid]
  matches = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
  if not matches:  # a leaf typed without its group, say: learning_rate
    leaf = str(name).split('.')[-1]
    matches = [v for v in valid if v.split('.')[-1] == leaf][:1]
  return f'; did you mean {matches[0]!r}?' if matches else ''


def check(good, key: str, value, expected: str) -> None:
  """Raises ConfigError, naming the key and what was expected, if not good."""
  if not good:
    raise ConfigError(f'config.{key}={value!r}: expected {expected}')
