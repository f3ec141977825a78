"""The steps after which groups exchange weights."""

from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import durations


def in_steps(config: ConfigDict, batch_size: int, examples: int) -> ConfigDict:
  """Returns the config with the starts of its periods in steps.

  Args:
    config: config of the run.
    batch_size: images per step.
    examples: images per epoch.

  Raises:
    ConfigError: if a period does not start after the one before it.
  """
  period = config.strategy.period
  phases = durations.staircase(period, batch_size, examples)
  starts = [start for start, _ in phases]
  for before, start in zip(starts, starts[1:]):
    if start <= before:
      raise config_lib.ConfigError(
        f'config.strategy.period={period!r}: a period starts at step {start}, '
        f'expected one after step {before}, where the one before it does'
      )
  first, *later = [f'{n}@{start} steps' for start, n in phases]
  texts = [first.partition('@')[0], *later]
  return config_lib.replaced(config, {'strategy.period': ','.join(texts)})


def is_due(config: ConfigDict, step: jax.Array | int) -> Any:
  """Whether groups exchange after `step` updates: the same on all devices.

  Groups exchange at the start of each period and every `period` steps after it.

  Args:
    config: config of the run, from `in_steps`.
    step: integer array, traced or not, or an int, which uses no device.

  Returns:
    A bool, or a bool array of the step's shape.
  """
  xp = jnp if isinstance(step, jax.Array) else np
  (_, period), *later = durations.staircase(config.strategy.period, 1, 1)
  due = step % period == 0
  for start, period in later:
    due = xp.where(step < start, due, (step - start) % period == 0)
  return due


def share(config: ConfigDict, batch_size: int, examples: int) -> float:
  """Returns the share of a run's steps after which groups exchange.

  Args:
    config: config of the run.
    batch_size: images per step.
    examples: images per epoch.
  """
  phases = durations.staircase(config.strategy.period, batch_size, examples)
  total = max(1, config_lib.steps(config.duration, batch_size, examples))
  ends = [start for start, _ in phases[1:]] + [total]
  return (
    sum(max(0, min(end, total) - start) / period for (start, period), end in zip(phases, ends))
    / total
  )
