"""Names that keys, values and recipes had before, and their names now.

What was typed, written in a recipe, or saved with a run by an old name means
the new one.
"""

import os

_LOOK_AHEAD = 'strategy.look_ahead'
_WITH_MOMENTUM = 'momentum', 'nesterov'
KEYS = {
  'optimizer.beta1': 'optimizer.b1',
  'optimizer.beta2': 'optimizer.b2',
  'optimizer.epsilon': 'optimizer.eps',
  'strategy.lanes': 'strategy.in_flight',
  'strategy.ticket_timeout': 'strategy.lease_timeout',
  'strategy.at_once': 'strategy.max_in_ring',
  'strategy.helpers': 'strategy.offload_to',
  'strategy.weight_prediction': _LOOK_AHEAD,
}
VALUES = {'strategy.name': {'kernel_split': 'channel_split'}}
RECIPES = {'kernel_split_cifar10.py': 'channel_split_cifar10.py'}


def renamed(values: dict) -> dict:
  """Returns values (or texts) by the keys' names of now.

  A value by an old name wins: what was there by the new one is a default.
  """
  result = {key: value for key, value in values.items() if key not in KEYS}
  result |= {KEYS[key]: values[key] for key in values if key in KEYS}
  for key, names in VALUES.items():
    value = result.get(key)
    if isinstance(value, str) and value in names:
      result[key] = names[value]
  if 'strategy.weight_prediction' in values:
    result[_LOOK_AHEAD] = _look_ahead(result[_LOOK_AHEAD], result)
  return result


def _look_ahead(updates, values):
  """The method that has replaced a prediction by times the usual staleness."""
  try:
    is_ahead = float(updates) != 0
  except ValueError:  # no number was typed: to be refused
    return updates
  # Runs that are saved have all keys; some predicted where `Server.check`
  # refuses to look ahead.
  can_look_ahead = (
    values.get('optimizer.name', 'momentum') in _WITH_MOMENTUM
    and values.get('strategy.mode') != 'synchronous'
    and values.get('strategy.compensation') != 'staleness'
  )
  return 'smega2' if is_ahead and can_look_ahead else 'none'


def renamed_key(key: str) -> str:
  """Returns the name that a key has now."""
  return KEYS.get(key, key)


def recipe(path: str) -> str:
  """Returns the path of a recipe that may have moved."""
  folder, name = os.path.split(path)
  if os.path.exists(path) or name not in RECIPES:
    return path
  return os.path.join(folder, RECIPES[name])
