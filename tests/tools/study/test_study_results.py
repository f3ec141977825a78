"""Tests of study: numbers, tables and figures of its runs."""

import csv
import math

import numpy as np
import pytest

from anp_jax.reporting import summaries
from anp_jax.tools.study import (
  grid,
  named_strategies,
  plots,
  scores as score_table,
  study_results,
  study_table,
)
from tests import study_runs


def test_a_runs_numbers_in_closed_form(tmp_path):
  """10 images a step. 40/s until step 8, 20/s until 12, 50/s until 22."""
  workdir = study_runs.write(
    tmp_path,
    [
      {'step': 1},  # timed by nothing
      {'step': 8, 'seconds': 7 / 4, 'images_per_second': 40.0},
      {'step': 12, 'seconds': 2.0, 'images_per_second': 20.0},
      # Continued after a stop: one step of this interval went untimed.
      {'step': 22, 'seconds': 9 / 5, 'images_per_second': 50.0},
    ],
    [
      {'step': 4, 'anp_top1': 0.3},
      {'step': 10, 'anp_top1': 0.9},  # scored again when the run went on
      {'step': 22, 'anp_top1': 0.5},
      {'step': 10, 'anp_top1': 0.6},
    ],
  )
  run = study_results.read(workdir)
  # Without the first interval: 40 images in 2 s, and 100 in 2 s, the untimed step's among them.
  assert run.images_per_second == pytest.approx(140 / 4, rel=1e-12)
  assert run.steps.tolist() == [4, 10, 22]
  assert run.samples.tolist() == [40, 100, 220]
  # 4 steps of 1/4 s; 8 of them and 2 of 1/2 s; and 2 more, and 10 of 1/5 s.
  np.testing.assert_allclose(run.seconds, [1, 3, 6], rtol=1e-12)
  assert run.accuracy.tolist() == [0.3, 0.6, 0.5]


@pytest.mark.parametrize(
  'accuracy, target, seconds',
  [
    ((0.3, 0.9, 0.5, 0.9), 0.9, 2.0),  # left and reached again
    ((0.3, 0.6, 0.7, 0.9), 0.6, 2.0),  # not the best of all
    ((0.9, 0.3, 0.2, 0.1), 0.5, 1.0),  # and not what it ends at
    ((0.1, 0.2, 0.3, 0.4), 0.4, 4.0),
    ((0.1, 0.2, 0.3, 0.4), 0.5, None),
  ],
)
def test_the_first_evaluation_that_is_as_good_counts(accuracy, target, seconds):
  """Evaluations come after 1, 2, 3 and 4 seconds."""
  run = study_runs.run(*accuracy, rate=1.0)
  assert run.spent_to(target, 'seconds') == seconds
  assert run.end == 4.0


def test_one_interval_is_better_than_none(tmp_path):
  train = [{'step': 3, 'seconds': 1.0, 'images_per_second': 20.0}]
  run = study_results.read(study_runs.write(tmp_path, train, [{'step': 3, 'anp_top1': 1.0}]))
  assert run.images_per_second == 20
  assert run.staleness == {}


def test_speed_ups_are_of_the_same_strategy_and_seed():
  seeds = {('sync', 1, 1): (10, 20), ('sync', 1, 2): (15, 40), ('sync', 4, 2): (45, 100)}
  seeds |= {('local_sgd', 4, 2): (90,), ('local_sgd', 1, 2): (30,)}
  rates = {(*key, seed): r for key, values in seeds.items() for seed, r in enumerate(values)}
  runs = {grid.Cell(*key): study_runs.run(0.5, rate=rate) for key, rate in rates.items()}
  lost = grid.Cell('local_sgd', 1, 1, 0)
  cells = grid.expand(named_strategies.parse('sync,local_sgd'), (1, 4), (1, 2), (0, 1))
  results_by_name = {
    (p.strategy, p.nodes, p.devices): p for p in study_results.points(cells, runs, {lost: 'lost'})
  }
  # Strategies in their order, then nodes, then devices.
  assert list(results_by_name)[:2] == [('sync', 1, 1), ('sync', 1, 2)]
  assert list(results_by_name)[4:] == [('local_sgd', n, d) for n in (1, 4) for d in (1, 2)]
  # (15 / 10 + 40 / 20) / 2, and the deviation of 1.5 and 2: 0.5 / sqrt(2).
  within = results_by_name['sync', 1, 2].over_device
  assert within.mean == pytest.approx(1.75, rel=1e-12)
  assert within.deviation == pytest.approx(0.5 / np.sqrt(2), rel=1e-12)
  assert results_by_name['sync', 1, 2].over_node.mean == 1
  across = results_by_name['sync', 4, 2]
  assert across.over_node.mean == pytest.approx((3 + 2.5) / 2, rel=1e-12)
  assert across.over_device.mean == pytest.approx((4.5 + 5) / 2, rel=1e-12)
  assert across.workers == 8
  # Its own baseline, without one device and one seed.
  local = results_by_name['local_sgd', 4, 2]
  assert local.over_node == summaries.Summary(3.0, 0.0, 1)
  assert local.over_device is None
  assert results_by_name['local_sgd', 1, 1].failures == {'local_sgd-1x1-seed0': 'lost'}
  assert results_by_name['sync', 4, 1].rate is None


def test_rows_have_the_tuned_rate_and_what_failed():
  scores = {('sync', '0.2'): (0.8, 0.6), ('local_sgd', '0.1'): (0.3, 0.5), ('fails', '0.1'): (0.9,)}
  runs = {
    grid.Cell(name, 1, 1, seed, tuned=((grid.RATE, rate),)): study_runs.run(0.1, score)
    for (name, rate), seeds in scores.items()
    for seed, score in enumerate(seeds)
  }
  lost = grid.Cell('fails', 1, 1, 1, tuned=((grid.RATE, '0.1'),))
  points = study_results.points([*runs, lost], runs, {lost: 'not finite'})
  rows = study_table.speed(points, ())
  assert rows[0][-2:] == ('learning rate', 'seeds')
  assert [row[-2:] for row in rows[1:]] == [('0.2', '2'), ('0.1', '2'), ('0.1', '1, 1 failed')]
  score_rows = score_table.rows(points, ())
  assert score_rows[0][3:] == ('learning rate', 'top-1', 'points over sync', 'seeds')
  # Of two seeds half the interval is t = tan(0.475 pi) times half of their
  # distance: 0.2, and 0.4 of the differences -0.5 and -0.1.
  assert score_rows[1][3:] == ('0.2', '70.0 ± 127.1 %', '-', '2')
  difference = '-30.0 ± 254.1, not distinguishable'
  assert score_rows[2][3:] == ('0.1', '40.0 ± 127.1 %', difference, '2')
  assert f'failed: {lost.name}: not finite' in study_table.notes(points, None)


def test_spread():
  # Deviations -1, 0, 1 from the mean, over n - 1 = 2.
  assert summaries.summarize([4.0, None, 2.0, 3.0]) == summaries.Summary(3.0, 1.0, 3)
  assert summaries.summarize([None]) is None
  for values, mean in (([1.0, math.inf], math.inf), ([1.0, math.nan], math.nan)):
    summary = summaries.summarize(values)
    np.testing.assert_array_equal([summary.mean, summary.deviation], [mean, math.nan])


# Tables and figures.


def _points(**more):
  cells = grid.expand(named_strategies.parse('sync'), (1, 2), (1, 2), (0, 1))
  runs = {
    c: study_runs.run(
      0.2,
      0.4 + 0.4 * c.seed,
      rate=100.0 * c.nodes * c.devices + c.seed,
      oversubscribed=c.nodes * c.devices > 2,
      **more,
    )
    for c in cells
  }
  return study_results.points(cells, runs, {})


def test_table_says_what_means_nothing():
  points = _points()
  rows = study_table.speed(points, [0.7])
  assert rows[0][:3] == ('strategy', 'nodes', 'devices a node')
  assert rows[0][3:6] == ('images/s', 'over one device', 'over one node')
  assert rows[0][6:] == ('time to 70 %', 'images to 70 %', 'seeds')
  by_place = {row[1:3]: row for row in rows[1:]}
  # Rates 200 and 201, baselines 100 and 101; of two numbers, t is 12.7 and the interval 6.35
  # of their difference on each side.
  assert by_place['1', '2'][3:6] == ('200 ± 6', '2.00 ± 0.06', '1.00 ± 0.00')
  # Only one seed reached 0.7, at its second evaluation: 2 / 201 s, and 20 images.
  assert by_place['1', '2'][6:] == ('0.0 s (1 not)', '20 (1 not)', '2')
  assert '*' not in ''.join(by_place['1', '2'])
  assert by_place['2', '2'][4].endswith('*')
  notes = '\n'.join(study_table.notes(points, 2))
  assert 'one machine with 2 cores' in notes and 'mean nothing' in notes
  assert 'mean nothing' not in '\n'.join(study_table.notes(points[:3], 2))
  # Columns that nothing fills are left out.
  head = study_table.speed(_points(), ())[0]
  assert not any('time' in h for h in head)


def test_each_target_has_the_time_and_the_images_to_it(tmp_path):
  """Steps of 1,000 images and 2 s; a seed of the three never reaches 98 %, and none 99 %."""
  scores = (0.5, 0.9, 0.9, 0.98), (0.9, 0.9, 0.95, 0.98), (0.3, 0.9, 0.9, 0.9)
  runs = {
    grid.Cell('sync', 8, 1, seed, simulated=True): study_runs.run(*s, samples=1000, seconds=2.0)
    for seed, s in enumerate(scores)
  }
  targets = (0.9, 0.98, 0.99)
  head, row = score_table.rows(study_results.points(list(runs), runs, {}), targets)
  # To 90 %: 2, 1 and 2 steps, whose deviation is 1 / sqrt(3); t of two degrees of freedom 4.303.
  assert dict(zip(head, row)) == {
    'strategy': 'sync',
    'workers': '8',
    'top-1': '95.3 ± 11.5 %',
    'simulated time to 90 %': '3.3 ± 2.9 s',
    'images to 90 %': '1,667 ± 1,434',
    'simulated time to 98 %': '8.0 ± 0.0 s (1 not)',
    'images to 98 %': '4,000 ± 0 (1 not)',
    'simulated time to 99 %': 'not reached',
    'images to 99 %': 'not reached',
    'simulated time': '8.0 ± 0.0 s',
    'seeds': '3',
  }
  path = tmp_path / 'cells.csv'
  study_table.write_cells(str(path), list(runs), runs, {}, targets)
  *_, last = csv.DictReader(path.open())
  kinds = [(last[f'seconds_to_{t}'], last[f'samples_to_{t}']) for t in targets]
  assert kinds == [('4.0', '2000.0'), ('', ''), ('', '')]


def _curves(axis):
  """Points of what is drawn, by name; error bars are containers."""
  curves = {c.get_label(): np.array(c.lines[0].get_xydata()) for c in axis.containers}
  for line in axis.lines:
    if not line.get_label().startswith('_'):
      curves[line.get_label()] = np.array(line.get_xydata())
  return curves


def test_figures_hold_the_series(tmp_path):
  points = _points(staleness={0: 3, 2: 1})
  speed = plots.speed(points)
  rates, within, across = (_curves(axis) for axis in speed.axes)
  # Means of two seeds; whole nodes of two devices, and one device.
  np.testing.assert_allclose(rates['sync'], [[1, 100.5], [2, 200.5], [4, 400.5]], rtol=1e-12)
  np.testing.assert_allclose(within['sync'], [[1, 1], [2, (2 + 201 / 101) / 2]], rtol=1e-12)
  np.testing.assert_allclose(across['sync'], [[1, 1], [2, (2 + 401 / 201) / 2]], rtol=1e-12)
  # Rates 200 and 201: half of the difference times Student's 12.7062.
  bar = speed.axes[0].containers[0].lines[2][0].get_segments()[1]
  np.testing.assert_allclose(bar[:, 1], 200.5 + 6.3531 * np.array([-1, 1]), rtol=1e-6)
  for curves in (within, across):
    np.testing.assert_array_equal(curves['ideal'], [[1, 1], [2, 2]])
  accuracy = plots.accuracy(points, [0.3])
  samples, seconds, to_target = (_curves(axis) for axis in accuracy.axes)
  assert set(samples) == {'sync, 2 x 2', 'sync, 1 x 1'}
  np.testing.assert_allclose(samples['sync, 2 x 2'], [[10, 0.2], [20, 0.6]], rtol=1e-12)
  np.testing.assert_allclose(
    seconds['sync, 2 x 2'][:, 0], [(1 / 400 + 1 / 401) / 2, (2 / 400 + 2 / 401) / 2], rtol=1e-12
  )
  assert to_target['sync'][:, 0].tolist() == [1, 2, 4]
  # One of the two seeds reaches 0.7.
  assert _curves(plots.accuracy(points, [0.7]).axes[2]) == {}
  (axis,) = plots.staleness(points).axes
  heights = [bar.get_height() for bar in axis.containers[0]]
  assert heights == [0.75, 0.25]
  for name, figure in (('speed', speed), ('accuracy', accuracy)):
    plots.save(figure, str(tmp_path / f'{name}.png'))
    assert (tmp_path / f'{name}.png').read_bytes()[:4] == b'\x89PNG'
  assert plots.staleness(_points()) is None
