"""Tests of study: differences between strategies, and their intervals."""

import numpy as np
import pytest
from scipy import stats

from anp_jax.reporting import summaries
from anp_jax.tools.study import grid, scores, study_results
from tests import study_runs

_SYNC = (0.90, 0.92, 0.91)


def _points(accuracies, samples=10):
  """`sync` on one node, and `parameter_server` with one accuracy a seed."""
  runs = {grid.Cell('sync', 1, 1, seed): study_runs.run(a) for seed, a in enumerate(_SYNC)}
  runs |= {
    grid.Cell('parameter_server', 4, 1, seed): study_runs.run(a, samples=samples)
    for seed, a in enumerate(accuracies)
  }
  return study_results.points(list(runs), runs, {})


def test_the_interval_of_a_mean_is_students():
  values = [0.90, 0.92, 0.97]
  low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
  interval = summaries.summarize(values).interval
  assert interval == pytest.approx((high - low) / 2, rel=1e-9)
  assert summaries.summarize([0.5]).interval is None


def test_differences_are_paired_by_seed():
  sync, server = _points((0.88, 0.89, 0.90))
  # -2, -3 and -1 points: deviation 1, and t of two degrees of freedom 4.303.
  summary = scores.over_sync(server, [sync, server])
  assert summary.mean == pytest.approx(-0.02, abs=1e-12)
  assert summary.interval == pytest.approx(0.0430265 / 3**0.5, rel=1e-5)
  assert scores.difference(summary) == '-2.0 ± 2.5, not distinguishable'
  pairs = stats.ttest_rel((0.88, 0.89, 0.90), _SYNC)
  low, high = pairs.confidence_interval(0.95)
  assert summary.interval == pytest.approx((high - low) / 2, rel=1e-9)
  assert scores.over_sync(sync, [sync, server]) is None
  # Clear of 0: -2, -2.1 and -1.9 points.
  points = _points((0.88, 0.899, 0.891))
  assert scores.difference(scores.over_sync(points[1], points)) == '-2.0 ± 0.2'


def test_what_a_run_ends_at_is_compared():
  """Neither the best of its evaluations nor the first."""
  runs = {
    grid.Cell('sync', 1, 1, 0): study_runs.run(0.9, 0.7, 0.5),
    grid.Cell('parameter_server', 1, 1, 0): study_runs.run(0.2, 0.9, 0.6),
  }
  points = study_results.points(list(runs), runs, {})
  assert scores.over_sync(points[1], points).mean == pytest.approx(0.1, abs=1e-12)
  assert [p.accuracy.mean for p in points] == [0.5, 0.6]


def test_one_seed_claims_nothing_and_more_samples_even_less():
  points = _points((0.95,))
  assert scores.difference(scores.over_sync(points[1], points)) == '+5.0'
  points = _points((0.9, 0.9, 0.9), samples=20)
  assert scores.over_sync(points[1], points) is None
  assert scores.difference(None) == '-'


def test_the_baseline_has_the_same_keys_and_size():
  """Among `sync` of two momenta and sizes, the one that is alike."""
  accuracies = {(1, '0.0'): 0.1, (1, '0.9'): 0.2, (4, '0.0'): 0.3, (4, '0.9'): 0.4}
  runs = {
    grid.Cell('sync', nodes, 1, 0, (('optimizer.momentum', momentum),)): study_runs.run(accuracy)
    for (nodes, momentum), accuracy in accuracies.items()
  }
  more = (('optimizer.momentum', '0.9'), ('strategy.mode', 'async'))
  server = grid.Cell('parameter_server', 4, 1, 0, more)
  runs[server] = study_runs.run(0.9)
  points = study_results.points(list(runs), runs, {})
  summary = scores.over_sync(points[-1], points)
  assert summary.mean == pytest.approx(0.5, abs=1e-12)
  # Of a size that `sync` does not have, that of the same keys.
  fewer = {cell: run for cell, run in runs.items() if cell.nodes == 1}
  fewer[server] = runs[server]
  points = study_results.points(list(fewer), fewer, {})
  summary = scores.over_sync(points[-1], points)
  assert summary.mean == pytest.approx(0.7, abs=1e-12)


def test_weak_scaling_is_compared_with_weak_scaling():
  runs = {
    grid.Cell(strategy, 4, 1, 0, weak=weak): study_runs.run(accuracy)
    for strategy, weak, accuracy in (
      ('sync', False, 0.9),
      ('sync', True, 0.7),
      ('local_sgd', True, 0.6),
    )
  }
  points = study_results.points(list(runs), runs, {})
  summary = scores.over_sync(points[-1], points)
  assert summary.mean == pytest.approx(-0.1, abs=1e-12)
  # An asynchronous gradient is of a whole batch in both: `sync` of its size.
  runs = {cell: run for cell, run in runs.items() if cell.weak}
  runs[grid.Cell('sync', 1, 1, 0)] = study_runs.run(0.8)
  runs[grid.Cell('parameter_server', 4, 1, 0)] = study_runs.run(0.65)
  points = study_results.points(list(runs), runs, {})
  summary = scores.over_sync(points[-1], points)
  assert summary.mean == pytest.approx(-0.05, abs=1e-12)


def test_speed_ups_of_weak_scaling_are_over_one_worker():
  """Its run is that of strong scaling: both give it the same batch."""
  runs = {grid.Cell('sync', 1, 1, 0): study_runs.run(0.5)}
  fast = grid.Cell('sync', 4, 1, 0, weak=True)
  runs[fast] = study_runs.run(0.5, rate=300.0)
  point = study_results.points(list(runs), runs, {})[-1]
  assert point.over_device.mean == 3 and point.over_node.mean == 3
