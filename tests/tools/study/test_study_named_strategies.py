"""Tests of study: strategies with settings of their own, from a file."""

import pytest

from anp_jax.tools.study import (
  __main__ as study_main,
  grid,
  named_strategies,
  plots,
  scores,
  study_results,
  study_runner,
)
from tests import study_runs

_FILE = """
[sync]
strategy.name = "sync"
batch_size = 32

[dana]
strategy.name = "parameter_server"
strategy.look_ahead = "dana"
strategy.simulate.slow = [[0, 5.0]]
optimizer.learning_rate = 0.003
"""


@pytest.fixture
def methods(tmp_path):
  """The path of a file with two strategies."""
  path = tmp_path / 'methods.toml'
  path.write_text(_FILE)
  return str(path)


def test_each_strategy_of_a_file_trains_with_its_settings(methods):
  strategies = named_strategies.parse(f'invariant, {methods}, independent')
  assert [(s.label, s.name) for s in strategies] == [
    ('invariant', 'invariant'),
    ('sync', 'sync'),
    ('dana', 'parameter_server'),
    ('independent', 'anp_jax.tools.study.independent:Independent'),
  ]
  study = study_runner.Study(study_runs.LENET, {grid.WORKERS: '2'}, 'folder')
  cells = grid.expand(strategies[:3], (1,), (1,), (0,))
  invariant, sync, dana = map(study.config, cells)
  assert (invariant.batch_size, sync.batch_size, dana.batch_size) == (64, 32, 64)
  assert dana.strategy.name == 'parameter_server' and dana.strategy.look_ahead == 'dana'
  assert dana.optimizer.learning_rate == cells[2].rate == 0.003
  assert dana.strategy.simulate.slow == ((0, 5.0),)
  assert [c.name for c in cells] == ['invariant-1x1-seed0', 'sync-1x1-seed0', 'dana-1x1-seed0']


def test_a_file_names_the_baselines_too(tmp_path):
  path = tmp_path / 'methods.toml'
  path.write_text('[alone]\nstrategy.name = "independent"')
  (strategy,) = named_strategies.parse(str(path))
  name = named_strategies.BASELINES['independent']
  assert (strategy.label, strategy.name) == ('alone', name)


@pytest.mark.parametrize(
  'text, flags, message',
  [
    (_FILE, ['--config.batch_size=8'], 'sync sets batch_size=32, and so does --config.batch_size'),
    (_FILE, ['--vary=optimizer.learning_rate=1,2'], 'dana sets optimizer.learning_rate=0.003, and'),
    (
      '[a]\nstrategy.name = "sync"\nduration = "1 epochs"',
      ['--tune=optimizer.learning_rate=1,2'],
      'a sets duration=1 epochs, and so does --tune, for its shorter runs',
    ),
    ('[a]\nbatch_size = 8', [], 'methods.toml: [a]: expected a table with strategy.name'),
    ('a = 8', [], 'methods.toml: [a]: expected a table with strategy.name'),
    (
      '[a]\nstrategy.name = "sync"\nbatch_sise = 8',
      [],
      "methods.toml: [a]: unknown key batch_sise; did you mean 'batch_size'?",
    ),
    ('[a]\nstrategy.name = "sync"\nbatch_size = "8x"', [], "config.batch_size='8x': expected"),
    ('[a]\nstrategy.name = "sink"', [], 'methods.toml: [a] strategy.name=sink: expected one of'),
    (
      '[a]\nstrategy.name = "sync"\nstrategy.period = 8',
      [],
      '--strategies: a sets strategy.period=8, which its runs do not have',
    ),
    (_FILE + '[sync]', [], 'methods.toml: Cannot declare'),
    (_FILE, ['--strategies=sync,{}'], 'two strategies named sync'),
    (_FILE, ['--strategies=none.toml'], '--strategies=none.toml: No such file'),
  ],
)
def test_what_is_wrong_in_a_file_is_one_line(tmp_path, methods, capsys, text, flags, message):
  with open(methods, 'w') as f:
    f.write(text)
  command = ['strategies', '--config=configs/lenet.py', f'--workdir={tmp_path}/study']
  command += [f'--strategies={methods}', *(flag.format(methods) for flag in flags)]
  assert study_main.main(command) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and message in line


def test_strategies_with_varied_keys_are_curves_of_one_panel():
  keys = [(('strategy.simulate.spread', spread),) for spread in ('0.2', '1.0')]
  runs = {}
  for name, accuracy in (('sync', 0.8), ('dana', 0.6)):
    for factor, varied in enumerate(keys, 1):
      for seed in range(2):
        cell = grid.Cell('parameter_server', 8, 1, seed, varied, simulated=True, title=name)
        runs[cell] = study_runs.run(0.1, accuracy + 0.02 * seed, seconds=factor)
  points = study_results.points(list(runs), runs, {})
  _, time, target = plots.accuracy(points, (0.5,)).axes
  # Of one size, so side by side.
  assert [float(c.lines[0].get_xdata()[0]) for c in target.containers] == [0, 1, 2, 3]
  assert [tick.get_text() for tick in target.get_xticklabels()] == ['8']
  lines = {line.get_label(): line.get_xydata().tolist() for line in time.lines}
  assert lines == {
    f'{name}, spread={spread}, 8 workers': [[factor, 0.1], [2 * factor, pytest.approx(score)]]
    for name, score in (('sync', 0.81), ('dana', 0.61))
    for factor, spread in ((1, '0.2'), (2, '1.0'))
  }
  # The one named sync is what the others are compared with.
  (differences,) = {scores.over_sync(p, points).mean for p in points if p.strategy == 'dana'}
  assert differences == pytest.approx(-0.2)
