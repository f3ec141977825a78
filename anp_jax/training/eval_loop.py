"""Evaluation on every example exactly once, on any number of devices."""

import math

import jax
import numpy as np

from anp_jax import cluster
from anp_jax.data.input import corruption


class CorruptExampleError(cluster.RunFailedError):
  """More examples cannot be read than config.data.max_damaged allows."""


def run(eval_step, state, batches) -> dict[str, float]:
  """Means over all examples of weight 1.

  Args:
    eval_step: from `eval_step.EvalStep.sums`.
    state: TrainState; its averaged weights are used where there are any.
    batches: device batches that hold every example once, padded with rows of
      weight 0.

  Returns:
    Name to mean; `examples` counts what was seen.
  """
  totals = {}
  for sums in _late(eval_step, state, batches):
    _add(totals, sums)
  return _means(totals)


def examples(examples_step, state, batches, count: int):
  """The same means, and what was made of each example.

  Args:
    examples_step: from `eval_step.EvalStep.examples`.
    state: as for `run`.
    batches: as for `run`, in the order of the source.
    count: of examples.

  Returns:
    Name to mean, as `run`; and the rows of `per_example.rows` with label and
    weight, NumPy arrays (count, ...) in the order of the source, on every
    process. An example that cannot be read has weight 0.
  """
  totals, batch_rows = {}, []
  for sums, rows in _late(examples_step, state, batches):
    _add(totals, sums)
    batch_rows.append(jax.device_get(rows))
  return _means(totals), {
    name: np.concatenate([rows[name] for rows in batch_rows])[:count] for name in batch_rows[0]
  }


def check_damage(config, source, scores: dict) -> None:
  """Refuses scores of too few examples.

  Args:
    config: the run's config.
    source: that was evaluated.
    scores: from `run` or `examples`.

  Raises:
    CorruptExampleError: if too many examples could not be read.
  """
  lost = len(source) - scores['examples']
  check_excess(config, lost, len(source), source.name, not scores['examples'])


def check_excess(config, damaged, examples, name, all_lost=False) -> None:
  """Raises CorruptExampleError where `corruption.too_many_error` says so.

  All processes count the same reduced numbers, so all raise or none.
  """
  text = corruption.too_many_error(config, damaged, examples, name, all_lost)
  if text:
    raise CorruptExampleError(text)


def _late(step, state, batches):
  """What a step gives, one batch late: the device is never waited for."""
  params, stats = state.evaluated()
  pending = None
  for batch in batches:
    result = step(params, stats, batch)
    if pending is not None:
      yield pending
    pending = result
  if pending is not None:
    yield pending


def _means(totals):
  weight = totals.pop('weight', np.float64(0))
  means = {k: float(v / weight) if weight else math.nan for k, v in totals.items()}
  return means | {'examples': int(weight)}


def _add(totals, sums):
  # Sums over batches in float64: a million examples are still counted exactly.
  for name, value in jax.device_get(sums).items():
    totals[name] = totals.get(name, np.float64(0)) + np.float64(value)
