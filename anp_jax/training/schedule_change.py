"""The effect of a new duration on the learning rate of a resumed run."""

import numpy as np

from anp_jax import config as config_lib
from anp_jax.training import optimizer, run_spec


def rates(saved: dict, spec: run_spec.RunSpec, step: int) -> tuple[float, ...]:
  """Returns the learning rates of a step under both durations of a run.

  A schedule that ends with the run (cosine, polynomial) is stretched by a
  longer one: the rate rises, from its end to the middle if it was doubled.

  Args:
    saved: flat config of the run before, after JSON; {} for a new run.
    spec: run with the new config.
    step: next step, 0 for a new run.

  Returns:
    (old, new), each of its whole config; () if the duration, or the rates of
    10,000 further steps, are unchanged.
  """
  if not saved:
    return ()
  old = config_lib.from_flat(saved)
  if old.duration == spec.config.duration:
    return ()
  # Not all of a long run's, which memory may not hold.
  steps = np.linspace(step, spec.total_steps - 1, 10_000).astype(np.int64)
  before, now = (
    optimizer.schedule(config, spec.batch_size, spec.examples, spec.steps(config.duration))(steps)
    for config in (old, spec.config)
  )
  if np.array_equal(before, now):
    return ()
  return float(before[0]), float(now[0])
