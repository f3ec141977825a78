"""A training by what its strategy measures first."""

from anp_jax import experiment
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel.sync import sync_strategy


def calibrated(
  opened: experiment.Experiment, invocation: strategy_lib.Invocation, is_training: bool = True
) -> tuple[experiment.Experiment, list[str]]:
  """Returns the training with the plan or rows that were measured, and lines for people.

  All processes call it.

  Args:
    opened: training by its config alone.
    invocation: processes, devices and workdir of the run.
    is_training: whether steps follow; without them nothing is measured.
  """
  config, lines = strategy_lib.find(opened.config).calibrate(opened.spec, invocation, is_training)
  result = opened.with_config(config)
  if not is_training or config.strategy.get('rows') != sync_strategy.MEASURED:
    return result, lines
  from anp_jax.runtimes.calibration import row_speeds  # imports SciPy, which takes a second

  result, more = row_speeds.with_measured_rows(result, invocation.workdir, invocation.processes)
  return result, [*lines, *more]
