"""Tests of study: workers that one process simulates."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from anp_jax.tools.study import (
  __main__ as study_main,
  grid,
  local,
  named_strategies,
  plots,
  scores,
  settings,
  simulate,
  study_page,
  study_results,
  study_runner,
)
from tests import builders, launching, study_runs


def _study(folder='folder', **typed):
  typed = {k.replace('__', '.'): v for k, v in typed.items()}
  text = 'step_seconds=0.5,slow=3:2'
  overrides = settings.overrides(
    '--simulate', text, simulate.GROUP, typed, ('sync', 'parameter_server')
  )
  return study_runner.Study(study_runs.LENET, overrides, str(folder), simulated=True)


def test_cells_of_simulated_workers():
  study = _study()
  cells = grid.expand(
    named_strategies.parse('invariant,local_sgd,parameter_server'), (1, 16), (1,), (0,)
  )
  names = [cell.name for cell in simulate.cells(study, cells)]
  # What simulates nobody trains alike for any number of workers.
  assert names == [
    'invariant-1x1-seed0',
    'local_sgd-simulated-1x1-seed0',
    'parameter_server-simulated-1x1-seed0',
    'local_sgd-simulated-16x1-seed0',
    'parameter_server-simulated-16x1-seed0',
  ]


def test_the_config_of_a_simulated_cell():
  cell = grid.Cell('parameter_server', 16, 1, 0, simulated=True)
  assert cell.processes == 1
  strategy = _study().config(cell).strategy
  assert strategy.simulate.workers == 16
  assert strategy.simulate.step_seconds == 0.5
  assert strategy.simulate.slow == ((3, 2.0),)
  # A group for each worker, unless the study says how many there are.
  cell = grid.Cell('local_sgd', 16, 1, 0, simulated=True)
  assert _study(batch_size='64').config(cell).strategy.groups == 16
  study = _study(batch_size='64', strategy__groups='4')
  assert study.config(cell).strategy.groups == 4


@pytest.mark.parametrize('nodes, devices, groups', [(1, 1, 1), (1, 4, 4), (3, 1, 3), (2, 4, 2)])
def test_groups_of_real_devices(nodes, devices, groups):
  study = study_runner.Study('configs/lenet.py', {}, '')
  cell = grid.Cell('local_sgd', nodes, devices, 0)
  assert study.config(cell).strategy.groups == groups


def test_groups_of_a_recipe_stay(tmp_path):
  recipe = tmp_path / 'recipe.py'
  lines = 'from anp_jax.config import base', 'def get_config(variant=""):', ' c = base()'
  more = ' c.strategy.name, c.strategy.groups = "local_sgd", 8', ' return c'
  recipe.write_text('\n'.join((*lines, *more)))
  study = study_runner.Study(str(recipe), {}, '')
  assert study.config(grid.Cell('local_sgd', 2, 1, 0)).strategy.groups == 8


def test_runs_at_once_have_a_core_each():
  study = _study()
  cells = [grid.Cell('parameter_server', 16, 1, 0, simulated=True)]
  assert local._shares(study, cells, [4, 5, 7]) == [[4], [5], [7]]
  command = local._command(study, cells[0], [5])
  assert command[:6] == ['taskset', '-c', '5', local.LAUNCHER, '1', '--devices=1']
  # Two devices each: the third core is left; more than there are share all.
  pairs = [grid.Cell('parameter_server', 16, 2, 0, simulated=True), *cells]
  assert local._shares(study, pairs, [4, 5, 7]) == [[4, 5]]
  assert local._shares(study, pairs, [4]) == [[4]]
  # Where times are measured, one run has all cores.
  measured = study_runner.Study(study_runs.LENET, {}, 'folder')
  assert local._shares(measured, cells, [4, 5, 7]) == [[4, 5, 7]]


_WAITING = """\
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / str(os.getpid())).touch()
end = time.time() + 30
while len(list(folder.iterdir())) < 2 and time.time() < end:
  time.sleep(0.01)
sys.exit(len(list(folder.iterdir())) < 2)
"""


def test_two_runs_are_under_way_at_once(tmp_path, monkeypatch):
  """Each waits for the other to begin."""
  (tmp_path / 'waiting.py').write_text(_WAITING)
  (tmp_path / 'begun').mkdir()
  monkeypatch.setattr(
    local,
    '_command',
    lambda *_: [sys.executable, str(tmp_path / 'waiting.py'), str(tmp_path / 'begun')],
  )
  monkeypatch.setattr(local, '_POLL', 0.01)
  monkeypatch.setattr(local, '_shares', lambda *_: [[0], [1]])
  cells = [grid.Cell('parameter_server', n, 1, 0, simulated=True) for n in (2, 4)]
  ends = {}
  local.run(_study(tmp_path), cells, lambda c: None, ends.__setitem__)
  assert ends == dict.fromkeys(cells, '')


def _write_run(folder):
  train = [
    {'step': n, 'seconds': 1.0, 'images_per_second': 20.0, 'staleness_0': 2, 'staleness_15': 2}
    for n in (2, 4)
  ]
  validation = [
    {'step': n, 'anp_top1': top1, 'anp_top5': 0.9, 'noun_top1': 0.75, 'simulated_seconds': seconds}
    for n, top1, seconds in ((2, 0.4, 3600.0), (4, 0.6, 7200.0))
  ]
  study_runs.write(folder, train, validation)
  # Read at versions 0, 0, 0 and 1, applied as updates 0 to 3.
  updates = [{'order': n, 'parts': [{'reads': [max(0, n - 2)]}]} for n in range(4)]
  (folder / 'server.jsonl').write_text('\n'.join(map(json.dumps, updates)))
  return str(folder)


def test_a_simulated_runs_numbers(tmp_path):
  run = study_results.read(_write_run(tmp_path / 'run'), simulated=True)
  assert run.seconds.tolist() == [3600, 7200] and run.end == 7200
  assert [run.spent_to(t, 'seconds') for t in (0.5, 0.7)] == [7200, None]
  assert run.scores == {'anp_top5': 0.9, 'noun_top1': 0.75}
  # Of the log, which does not count the stalest together: 0, 1, 2 and 2.
  assert run.staleness == {0: 1, 1: 1, 2: 2}
  assert (run.mean_staleness, run.max_staleness) == (1.25, 2)
  # Its own speed is not that of the workers.
  assert study_results.read(str(tmp_path / 'run')).seconds.tolist() == [1, 2]


def _outcome(tmp_path):
  run = study_results.read(_write_run(tmp_path / 'run'), simulated=True)
  alone = study_runs.run(0.7, seconds=np.nan)
  cells = [grid.Cell('parameter_server', n, 1, 0, simulated=True) for n in (4, 16)]
  cells.append(grid.Cell('invariant', 1, 1, 0))
  return study_page.Outcome(
    cells, dict(zip(cells, (run, run, alone))), {}, 2, simulation='step_seconds=0.5'
  )


def test_the_table_has_times_staleness_and_scores(tmp_path):
  outcome = _outcome(tmp_path)
  points = study_results.points(outcome.cells, outcome.runs, {})
  places, columns = ('strategy', 'workers'), ('top-1', 'top-5', 'noun', 'staleness', 'at most')
  times = ('simulated time to 50 %', 'images to 50 %', 'simulated time')
  assert scores.rows(points, [0.5]) == [
    (*places, *columns, *times, 'seeds'),
    *(
      (
        'parameter_server',
        n,
        '60.0 %',
        '90.0 %',
        '75.0 %',
        '1.25',
        '2',
        '2.00 h',
        '40',
        '2.00 h',
        '1',
      )
      for n in ('4', '16')
    ),
    ('invariant', '1', '70.0 %', '-', '-', '-', '-', '-', '10', '-', '1'),
  ]


def test_accuracy_is_drawn_against_simulated_time_and_workers(tmp_path):
  outcome = _outcome(tmp_path)
  points = study_results.points(outcome.cells, outcome.runs, {})
  points = [dataclasses.replace(p, devices=2) for p in points]  # of the one process
  _, time, workers = plots.accuracy(points, ()).axes
  assert time.get_xlabel() == 'simulated seconds'
  curve = next(x for x in time.lines if x.get_label() == 'parameter_server, 16 workers')
  assert curve.get_xydata().tolist() == [[3600, 0.4], [7200, 0.6]]
  (server, _) = workers.containers
  assert server.lines[0].get_xydata().tolist() == [[4, 0.6], [16, 0.6]]


@pytest.mark.parametrize('draw', [plots.staleness, plots.accuracy])
def test_long_names_are_below_the_panels(tmp_path, draw):
  outcome = _outcome(tmp_path)
  varied = {'mode': 'synchronous', 'look_ahead': 'none', 'backup_workers': '1'}
  points = [
    dataclasses.replace(p, varied={**varied, 'max_staleness': '16'})
    for p in study_results.points(outcome.cells, outcome.runs, {})
    if p.nodes == 16
  ]
  figure = draw(points, [0.5]) if draw is plots.accuracy else draw(points)
  plots.save(figure, str(tmp_path / 'figure.png'))
  (legend,) = figure.legends
  names = legend.get_window_extent()
  assert 0 <= names.x0 and names.x1 <= figure.bbox.x1
  for axis in figure.axes:
    assert names.y1 <= axis.get_tightbbox().y0  # in pixels, upwards
    assert axis.get_position().height > 0.5  # of the figure's
    assert axis.get_position().width > 0.2
  # A panel of seconds has no percents.
  assert '%' not in figure.axes[-1].xaxis.get_major_formatter().format_ticks([3600.0])[0]


def test_the_page_says_that_workers_are_simulated(tmp_path):
  text = study_page.write(str(tmp_path), 'A title', '', _outcome(tmp_path), ())
  assert 'Simulated workers, step_seconds=0.5: one process' in text
  assert 'images/s' not in text and 'All nodes are processes' not in text
  assert not (tmp_path / 'speed.png').exists()
  rows = builders.rows(tmp_path / 'cells.csv')
  assert [row['seconds'] for row in rows] == ['7200.0', '7200.0', '']
  assert rows[1]['max_staleness'] == '2' and rows[1]['simulated'] == 'True'


@pytest.mark.multiprocess
def test_the_command_simulates_workers(tmp_path):
  """Two workers take turns: all gradients but the first are one update old."""
  flags = ['--strategies=parameter_server', '--simulate=step_seconds=2', '--workers=2']
  flags += launching.typed(launching.TINY)
  command = ['strategies', '--config=configs/resnet_anp.py:tiny', f'--workdir={tmp_path}']
  assert study_main.main([*command, *flags]) == 0
  (pair,) = builders.rows(tmp_path / 'cells.csv')
  assert pair['max_staleness'] == '1'
  # So many updates, two of them every 2 s.
  folder = tmp_path / 'runs' / 'parameter_server-simulated-2x1-seed0'
  config = json.loads((folder / 'config.json').read_text())
  updates = int(config['duration'].split()[0])
  assert config['duration'].endswith('steps')
  assert float(pair['mean_staleness']) == pytest.approx(1 - 1 / updates)
  assert float(pair['seconds']) == pytest.approx(updates)
