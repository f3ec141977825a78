"""Flags of a study that set keys of one group of the config."""

from collections.abc import Mapping, Sequence

from anp_jax import config as config_lib
from anp_jax.config import errors


def parse(
  flag: str, text: str, group: str, names: Sequence[str], typed: Mapping[str, str]
) -> dict[str, str]:
  """Returns the config's overrides of a flag, by dotted key.

  Args:
    flag: name of the flag, such as '--emulate'.
    text: text of the flag, such as 'step_seconds=0.1,slow=3:2+5:1.5'.
    group: group of the config with its dot, such as 'emulate.'.
    names: names of the group's keys that the flag takes.
    typed: other overrides that were typed, by dotted key.

  Raises:
    ConfigError: for an unknown key, with the nearest, and for one that is set twice.
  """
  keys: dict[str, str] = {}
  for part in filter(None, map(str.strip, text.split(','))):
    name, equals, value = map(str.strip, part.partition('='))
    errors.check_choice(f'{flag}: key {name!r}', name, names)
    if not equals or not value:
      raise config_lib.ConfigError(f'{flag}: {part!r}: expected {name}=VALUE')
    key = group + name
    if key in keys or key in typed:
      raise config_lib.ConfigError(f'{flag}: {name} is set twice')
    keys[key] = _slow(flag, value) if name == 'slow' else value
  return keys


def _slow(flag, text):
  """'3:2+5:1.5' as the pairs of the key `slow`."""
  pairs = []
  for part in text.split('+'):
    process, _, factor = part.partition(':')
    try:
      pairs.append((int(process), float(factor)))
    except ValueError:
      raise config_lib.ConfigError(
        f'{flag}: slow={text!r}: expected PROCESS:FACTOR, or several with +, such as 3:2+5:1.5'
      ) from None
  return repr(tuple(pairs))
