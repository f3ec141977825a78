"""Trials of a config on the machine at hand; no checkpoint is read or made."""

import ml_collections

from anp_jax import cluster, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.tools.trials import benchmark, range_test

_LOOPS = {'benchmark': benchmark.run, 'range_test': range_test.run}


def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  mode: str,
  processes: cluster.Processes | None = None,
) -> dict:
  """Tries a config out; returns what the trial measured.

  Args:
    config: resolved and valid config.
    workdir: folder for the files of the trial.
    mode: one of `config.strategy.TRIALS`.
    processes: processes of the run, from `cluster.start`; None: this one.

  Raises:
    ConfigError: if the config does not fit the devices.
  """
  return train.start(strategy_lib.Invocation(config, workdir, processes, mode), _LOOPS[mode])
