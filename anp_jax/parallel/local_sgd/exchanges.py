"""After which steps groups exchange weights."""

from collections.abc import Callable

import jax.numpy as jnp

from anp_jax import config as config_lib
from anp_jax.config import durations


def in_steps(config, batch_size: int, examples: int):
  """Returns the config with the starts of its periods in steps.

  Args:
    config: of the run.
    batch_size: images a step.
    examples: images an epoch.

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


def is_due(config, step):
  """Whether groups exchange after `step` updates: alike on all devices.

  Groups exchange where a period starts, and every `period` steps after it.

  Args:
    config: of the run, from `in_steps`.
    step: integer array, traced or not.

  Returns:
    A bool array of its shape.
  """
  (_, period), *later = durations.staircase(config.strategy.period, 1, 1)
  due = step % period == 0
  for start, period in later:
    due = jnp.where(step < start, due, (step - start) % period == 0)
  return due


def on_host(config) -> Callable[[int], bool]:
  """Returns what answers `is_due` outside a program, without a device."""
  phases = durations.staircase(config.strategy.period, 1, 1)

  def is_due_on_host(step):
    start, period = [phase for phase in phases if phase[0] <= step][-1]
    return (step - start) % period == 0

  return is_due_on_host


def share(config, batch_size: int, examples: int) -> float:
  """Returns the share of a run's steps after which groups exchange.

  Args:
    config: of the run.
    batch_size: images a step.
    examples: images an epoch.
  """
  phases = durations.staircase(config.strategy.period, batch_size, examples)
  total = max(1, config_lib.steps(config.duration, batch_size, examples))
  ends = [start for start, _ in phases[1:]] + [total]
  return (
    sum(max(0, min(end, total) - start) / period for (start, period), end in zip(phases, ends))
    / total
  )
