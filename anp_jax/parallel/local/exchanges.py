"""After which steps groups exchange weights."""

from collections.abc import Callable
import functools

import jax
import numpy as np

_COIN = 1  # told apart from a step's other random numbers
_BLOCK = 1024  # steps that `on_host` asks about at once


def is_due(config, step):
  """Whether groups exchange after `step` updates: alike on all devices.

  Args:
    config: of the run.
    step: integer array, traced or not.

  Returns:
    A bool array of its shape; with an exchange_probability, () of ().
  """
  s = config.strategy
  if not s.exchange_probability:
    return step % s.period == 0
  key = jax.random.fold_in(jax.random.key(config.seed), step)
  key = jax.random.fold_in(key, _COIN)
  return jax.random.bernoulli(key, s.exchange_probability)


def on_host(config) -> Callable[[int], bool]:
  """Returns what answers `is_due` outside a program, many steps at a time."""
  are_due = jax.jit(jax.vmap(functools.partial(is_due, config)))

  @functools.lru_cache(maxsize=1)
  def block(index):
    steps = np.arange(index * _BLOCK, (index + 1) * _BLOCK, dtype=np.int32)
    return jax.device_get(are_due(jax.device_put(steps)))

  return lambda step: bool(block(step // _BLOCK)[step % _BLOCK])
