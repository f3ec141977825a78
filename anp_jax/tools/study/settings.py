"""Flags of a study that set keys of one group of the config."""

from collections.abc import Iterable

from anp_jax import config as config_lib
from anp_jax.config import errors, resolve
from anp_jax.tools.study import grid

_BY_STUDY = 'emulate.enabled', grid.WORKERS


def overrides(
  flag: str, text: str | None, group: str, typed: dict[str, str], strategies: Iterable[str] = ()
) -> dict[str, str]:
  """Returns the config's overrides of a study, with those of a flag.

  Args:
    flag: name of the flag, such as '--emulate'.
    text: text of the flag, such as 'step_seconds=0.1,slow=3:2+5:1.5'; None: it was not typed.
    group: group of the config with its dot, such as 'emulate.'.
    typed: other overrides that were typed, by dotted key.
    strategies: strategies of the study, whose keys the group may have.

  Raises:
    ConfigError: for an unknown key, with the nearest, and for one that is set twice.
  """
  if text is None:
    return typed
  taken_keys = [k for k in resolve.known_keys(*strategies) if k not in _BY_STUDY]
  names = [k.removeprefix(group) for k in taken_keys if k.startswith(group)]
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
  return typed | keys


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
