"""Evaluation on every example exactly once, on any number of devices."""

from collections.abc import Callable, Iterable
import itertools
import math

import jax
from ml_collections import ConfigDict
import numpy as np

from anp_jax import cluster
from anp_jax.data import sources
from anp_jax.parallel import state as state_lib

# The fewest examples that make a rate of damage: a first batch with one bad
# example is none yet.
_FEW_EXAMPLES = 1000


class CorruptExampleError(cluster.RunFailedError):
  """More examples cannot be read than config.data.max_damaged allows."""


def run(eval_step: Callable, state: state_lib.TrainState, batches: Iterable[dict]) -> dict:
  """Means over all examples of weight 1.

  Args:
    eval_step: step from `eval_step.EvalStep.sums`.
    state: state of one network; averaged weights are used if it has them.
    batches: device batches that hold every example once, padded with rows of
      weight 0.

  Returns:
    Means by name, and the number of `examples`.
  """
  totals: dict = {}
  for sums in _late(eval_step, state, batches):
    _add(totals, sums)
  return _means(totals)


def examples(
  examples_step: Callable, state: state_lib.TrainState, batches: Iterable[dict], count: int
) -> tuple[dict, dict]:
  """The means of `run`, and the scores of each example.

  Args:
    examples_step: step from `eval_step.EvalStep.examples`.
    state: state of one network.
    batches: batches of `run`, in the order of the source.
    count: number of examples.

  Returns:
    The means of `run`; and the rows of `EvalStep.examples` as NumPy arrays (count,
    ...) in the order of the source; {} on all processes but the first. An example
    that cannot be read has weight 0.
  """
  totals: dict = {}
  arrays: dict = {}
  start = 0
  for sums, rows in _late(examples_step, state, batches):
    _add(totals, sums)
    if jax.process_index():
      continue
    rows = jax.device_get(rows)
    arrays = arrays or {
      name: np.empty((count, *values.shape[1:]), values.dtype) for name, values in rows.items()
    }
    for name, values in rows.items():
      arrays[name][start : start + len(values)] = values[: count - start]
    start += len(rows['label'])
  return _means(totals), arrays


def check_damage(config: ConfigDict, source: sources.Source, scores: dict[str, float]) -> None:
  """Refuses scores of too few examples.

  Args:
    config: config of the run.
    source: validation examples.
    scores: means from `run` or `examples`.

  Raises:
    CorruptExampleError: if too many examples could not be read.
  """
  lost = len(source) - scores['examples']
  check_excess(config, int(lost), len(source), source.name, not scores['examples'])


def check_excess(
  config: ConfigDict, damaged: int, examples: int, name: str, all_lost: bool = False
) -> None:
  """Refuses more damage than config.data.max_damaged allows.

  All processes count the same reduced numbers, so all raise or none.

  Args:
    config: config of the run.
    damaged: number of examples that could not be read.
    examples: number of examples that were to be read.
    name: name of the source.
    all_lost: whether no example is left, however few there are.

  Raises:
    CorruptExampleError: naming the source and the numbers.
  """
  allowed = config.data.max_damaged
  if all_lost or damaged > allowed * max(examples, _FEW_EXAMPLES):
    raise CorruptExampleError(
      f'{damaged} of {examples} examples of {name} could not be read, more than '
      f'config.data.max_damaged={allowed:g} allows; the log names them'
    )


def _late(step, state, batches):
  """Yields each batch's result one batch late: the host never waits for it."""
  params, stats = state.evaluated()
  results = (step(params, stats, batch) for batch in batches)
  for result, _ in itertools.pairwise(itertools.chain(results, [None])):
    yield result


def _means(totals):
  weight = totals.pop('weight', np.float64(0))
  means = {k: float(v / weight) if weight else math.nan for k, v in totals.items()}
  return means | {'examples': int(weight)}


def _add(totals, sums):
  # Sums over batches in float64: a million examples are still counted exactly.
  for name, value in jax.device_get(sums).items():
    totals[name] = totals.get(name, np.float64(0)) + np.float64(value)
