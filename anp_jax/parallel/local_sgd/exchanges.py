"""After which steps groups exchange weights."""

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import durations

_COIN = 1  # told apart from a step's other random numbers
_BLOCK = 1024  # steps that `on_host` asks about at once


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

  They do where a period follows another, and each so many steps from there.

  Args:
    config: of the run, from `in_steps`.
    step: integer array, traced or not; () with an exchange_probability.

  Returns:
    A bool array of its shape.
  """
  s = config.strategy
  if s.exchange_probability:
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    key = jax.random.fold_in(key, _COIN)
    return jax.random.bernoulli(key, s.exchange_probability)
  (_, period), *later = durations.staircase(s.period, 1, 1)
  due = step % period == 0
  for start, period in later:
    due = jnp.where(step < start, due, (step - start) % period == 0)
  return due


def on_host(config) -> Callable[[int], bool]:
  """Returns what answers `is_due` outside a program, many steps at a time."""
  are_due = jax.jit(jax.vmap(functools.partial(is_due, config)))

  @functools.lru_cache(maxsize=1)
  def block(index):
    steps = np.arange(index * _BLOCK, (index + 1) * _BLOCK, dtype=np.int32)
    return jax.device_get(are_due(jax.device_put(steps)))

  return lambda step: bool(block(step // _BLOCK)[step % _BLOCK])


def share(config, batch_size: int, examples: int) -> float:
  """Returns the share of a run's steps after which groups exchange.

  Args:
    config: of the run.
    batch_size: images a step.
    examples: images an epoch.
  """
  s = config.strategy
  if s.exchange_probability:
    return s.exchange_probability
  phases = durations.staircase(s.period, batch_size, examples)
  total = max(1, config_lib.steps(config.duration, batch_size, examples))
  ends = [start for start, _ in phases[1:]] + [total]
  return (
    sum(max(0, min(end, total) - start) / period for (start, period), end in zip(phases, ends))
    / total
  )
