"""The keys of config.strategy.simulate, for strategies that can be simulated."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from anp_jax.config import emulation_keys, errors, keys

WORKERS = 'strategy.simulate.workers'
_SIMULATED: dict[str, Any] = {'only_if': (WORKERS, ('[!0]*',))}
KEYS = {
  'simulate.workers': keys.integer(
    0, 'simulated workers, for which this process computes; 0: no simulation', at_least=0
  ),
  **{
    f'simulate.{name}': dataclasses.replace(
      emulation_keys.KEYS[name], resumable=False, **_SIMULATED
    )
    for name in ('step_seconds', 'image_seconds', 'spread', 'slow')
  },
  'simulate.outage_chance': keys.share(
    0, 'chance of an outage of a worker before a pass', **_SIMULATED
  ),
  'simulate.outage_seconds': keys.number(60, 'seconds of an outage', above=0, **_SIMULATED),
}


def seconds(help: str) -> keys.Key:
  """Returns the key of a simulated time in seconds, 0 by default."""
  return keys.number(0, help, at_least=0, **_SIMULATED)


def has_one_loop(strategy: Any, values: Mapping) -> bool:
  """Returns whether a process makes all steps of a run in the loop of `train`.

  Args:
    strategy: strategy of the run.
    values: config values by dotted key.
  """
  return strategy.steps_together or bool(values.get(WORKERS))


def check(values: dict, groups: int = 1) -> None:
  """Refuses workers that do not divide a step's batch, or into groups.

  Args:
    values: config values by dotted key.
    groups: number of groups of workers that train in step.

  Raises:
    ConfigError: naming the key, its value and what was expected.
  """
  # A strategy that inherits from `sync` may have other keys.
  workers = values.get(WORKERS, 0)
  if not workers:
    return
  batch_size = values['batch_size']
  errors.check(
    batch_size,
    'batch_size',
    0,
    f'a number of images where {WORKERS} is '
    'above 0: batch_size_per_device makes the batch depend on the devices',
  )
  errors.check(workers % groups == 0, WORKERS, workers, f'a multiple of strategy.groups={groups}')
  errors.check(
    batch_size % workers == 0, WORKERS, workers, f'a number that divides batch_size={batch_size}'
  )
