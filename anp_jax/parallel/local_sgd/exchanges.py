"""The steps after which groups exchange weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import durations


def in_steps(
  config: ml_collections.ConfigDict, batch_size: int, examples: int
) -> ml_collections.ConfigDict:
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


def is_due(config: ml_collections.ConfigDict, step: jax.Array) -> jax.Array:
  """Whether groups exchange after `step` updates: the same on all devices.

  Groups exchange at the start of each period and every `period` steps after it.

  Args:
    config: config of the run, from `in_steps`.
    step: integer array, traced or not.

  Returns:
    A bool array of its shape.
  """
  (_, period), *later = durations.staircase(config.strategy.period, 1, 1)
  due = step % period == 0
  for start, period in later:
    due = jnp.where(step < start, due, (step - start) % period == 0)
  return due


def on_host(config: ml_collections.ConfigDict) -> Callable[[int], bool]:
  """Returns `is_due` as a function of an int, which uses no device."""
  phases = durations.staircase(config.strategy.period, 1, 1)

  def is_due_on_host(step):
    start, period = [phase for phase in phases if phase[0] <= step][-1]
    return (step - start) % period == 0

  return is_due_on_host


def share(config: ml_collections.ConfigDict, batch_size: int, examples: int) -> float:
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
