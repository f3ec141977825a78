"""Trials of a config on the machine at hand; no checkpoint is read or made."""

from collections.abc import Callable

from anp_jax.config import strategy as strategy_lib
from anp_jax.tools.trials import benchmark
from anp_jax.tools.trials import range_test

_LOOPS = {'benchmark': benchmark.run, 'range_test': range_test.run}


def loop(mode: str) -> Callable[[strategy_lib.Job], dict] | None:
  """Returns what `train.run` calls in a mode instead of training."""
  return _LOOPS.get(mode)
