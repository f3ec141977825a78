"""Evaluation on every example exactly once, on any number of devices."""

import math

import jax
import numpy as np


def run(eval_step, state, batches) -> dict[str, float]:
  """Means over all examples of weight 1.

  Args:
    eval_step: from `step.make_eval_step`.
    state: TrainState; its averaged weights are used where there are any.
    batches: device batches that hold every example once, padded with rows of
      weight 0.

  Returns:
    Name to mean; `examples` counts what was seen.
  """
  params, stats = state.evaluated()
  totals, pending = {}, None
  for batch in batches:
    sums = eval_step(params, stats, batch)
    if pending is not None:
      _add(totals, pending)  # one batch late: the device is never waited for
    pending = sums
  if pending is not None:
    _add(totals, pending)
  weight = totals.pop('weight', np.float64(0))
  means = {k: float(v / weight) if weight else math.nan
           for k, v in totals.items()}  # fmt: skip
  return means | {'examples': int(weight)}


def _add(totals, sums):
  # Sums over batches in float64: a million examples are still counted exactly.
  for name, value in jax.device_get(sums).items():
    totals[name] = totals.get(name, np.float64(0)) + np.float64(value)
