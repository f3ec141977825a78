"""Tests of study: the best value of a key for each cell."""

import math
import pathlib
import types

import pytest

from anp_jax.tools.study import __main__ as study_main, grid, study_runner, together, tune
from tests import study_runs

_LENET, _RATE = study_runs.LENET, grid.RATE


def _tuning(*texts, budget=None, seeds=(0, 1), duration='24 epochs', config=_LENET):
  flags = types.SimpleNamespace(
    tune=list(texts), tune_budget=budget, vary=[], emulate=None, config=config
  )
  overrides = {'duration': duration}
  return tune.parse(flags, ('sync', 'parameter_server'), overrides, grid.AXES, seeds)


def _study(folder='folder'):
  return study_runner.Study(_LENET, {'duration': '24 epochs'}, str(folder))


def _write(study, cell, accuracy):
  folder = pathlib.Path(study.workdir(cell))
  study_runs.write(folder, validation=[{'step': 1, 'anp_top1': accuracy}])


@pytest.mark.parametrize(
  'values, budget, expected',
  [
    # Each rung costs one run of 24 epochs; n values share it.
    (2, None, [12]),
    (4, None, [6, 12]),
    (5, None, [24 / 5, 8, 12]),
    (8, None, [3, 6, 12]),
    # A budget is of all rungs: 2 of 12 epochs, then 3 of 16.
    (4, '24 epochs', [3, 6]),
    (8, '48 epochs', [2, 4, 8]),
    # Never longer than the runs that are scored.
    (4, '96 epochs', [12, 24]),
    (2, '96 epochs', [24]),
  ],
)
def test_a_rungs_runs_share_its_budget(values, budget, expected):
  tuning = _tuning(f'{_RATE}=0.1,0.2', budget=budget)
  assert tune.durations(values, tuning) == pytest.approx(expected)


@pytest.mark.parametrize('duration', ['3e4examples', '30000 example'])
def test_a_duration_is_read_as_the_config_reads_it(duration):
  tuning = _tuning(f'{_RATE}=0.1,0.2', duration=duration, budget='30000 examples')
  assert (tuning.duration, tuning.budget, tuning.unit) == (30000, 30000, 'examples')


def test_a_recipe_need_not_be_valid_without_what_was_typed():
  tuning = _tuning(f'{_RATE}=0.1,0.2', config='configs/resnet_anp.py:anp553', budget='1 epochs')
  assert tuning.unit == 'epochs'


def test_the_better_half_goes_on(tmp_path):
  """The order of eight values changes as they train for longer."""
  study, tuning = _study(tmp_path), _tuning(f'{_RATE}=8,7,6,5,4,3,2,1')
  accuracy = {
    '3 epochs': {1: 0.1, 2: 0.8, 3: 0.7, 4: 0.2, 5: 0.3, 6: 0.75, 7: 0.6, 8: 0.4},
    '6 epochs': {2: 0.7, 3: 0.8, 6: 0.9, 7: 0.6},
    '12 epochs': {3: 0.95, 6: 0.94},
  }
  rungs = []

  def train(cells):
    rungs.append([(c.duration, c.seed, c.rate) for c in cells])
    for c in cells:
      _write(study, c, accuracy[c.duration][c.rate])
    return {}

  cells = [grid.Cell('sync', 2, 1, seed) for seed in (0, 1)]
  chosen, failures, (tuned,) = tune.run(study, cells, tuning, train)
  assert rungs == [
    [('3 epochs', 1000, rate) for rate in range(1, 9)],
    [('6 epochs', 1000, rate) for rate in (2, 6, 3, 7)],
    [('12 epochs', 1000, rate) for rate in (6, 3)],
  ]
  assert failures == {} and [c.rate for c in chosen] == [3, 3]
  assert [(c.seed, c.duration) for c in chosen] == [(0, ''), (1, '')]
  assert tuned.spent == 8 * 3 + 4 * 6 + 2 * 12
  head, row = tune.rows(tuning, [tuned])
  assert head[0] == 'tuned' and head[-1] == 'epochs spent'
  assert row[0] == 'sync-2x1' and row[-1] == '72'
  assert row[1:4] == ('10.0 % (3 epochs)', '70.0 % (6 epochs)', '95.0 % (12 epochs) best')
  (note,) = tune.notes(tuning, [tuned])
  assert 'seed 1000, which is not scored; 72 epochs' in note


def test_a_run_that_two_rungs_have_is_spent_once(tmp_path):
  study, tuning = _study(tmp_path), _tuning(f'{_RATE}=0.1,0.2,0.3,0.4', budget='192 epochs')

  def train(cells):
    for c in cells:
      _write(study, c, c.rate)
    return {}

  _, _, (tuned,) = tune.run(study, [grid.Cell('sync', 1, 1, 0)], tuning, train)
  assert tune.durations(4, tuning) == [24, 24] and tuned.spent == 4 * 24


@pytest.mark.parametrize('best, place', [(0.1, 'first'), (0.3, 'last')])
def test_the_edge_of_the_grid_is_said(tmp_path, best, place):
  study, tuning = _study(tmp_path), _tuning(f'{_RATE}=0.3,0.1,0.2')

  def train(cells):
    for c in cells:
      _write(study, c, 1 - abs(c.rate - best))
    return {}

  (cell,), _, contests = tune.run(study, [grid.Cell('sync', 1, 1, 0)], tuning, train)
  assert cell.rate == best
  assert tune.notes(tuning, contests)[1:] == [
    f"sync-1x1: the best value of {_RATE}, {best}, is the grid's {place}: widen it"
  ]


def test_what_diverges_is_no_candidate(tmp_path):
  """No value is left for `parameter_server`, and the one that trains for `sync`."""
  study, tuning = _study(tmp_path), _tuning(f'{_RATE}=0.1,0.2,0.3,0.4')

  def train(cells):
    failed = {
      c: 'step 3 is not finite' for c in cells if c.strategy == 'parameter_server' or c.rate > 0.1
    }
    for c in cells:
      if c not in failed:
        _write(study, c, 0.2)
    return failed

  cells = [grid.Cell(name, 1, 1, 0) for name in ('sync', 'parameter_server')]
  chosen, failures, contests = tune.run(study, cells, tuning, train)
  assert chosen[0].rate == 0.1
  assert failures == {chosen[1]: 'step 3 is not finite'}
  _, sync, server = tune.rows(tuning, contests)
  assert sync[1:] == ('20.0 % (6 epochs) best', *['failed'] * 3, '24')
  assert server[1:] == (*['failed'] * 4, '24')


@pytest.mark.parametrize('diverges', [False, True])
def test_a_value_that_is_refused_hides_no_other(tmp_path, diverges):
  study, tuning = _study(tmp_path), _tuning(f'{_RATE}=0.1,0.2')

  def train(cells):
    first, second = cells
    _write(study, second, 0.2)
    return {first: study_runner.Refusal('no')} | ({second: 'not finite'} if diverges else {})

  cells = [grid.Cell('sync', 1, 1, 0)]
  (chosen,), failures, contests = tune.run(study, cells, tuning, train)
  assert failures == ({chosen: 'not finite'} if diverges else {})
  assert not isinstance(failures.get(chosen), study_runner.Refusal)
  score = 'failed' if diverges else '20.0 % (12 epochs) best'
  assert tune.rows(tuning, contests)[1] == ('sync-1x1', 'failed', score, '12')


def test_what_cannot_be_is_no_row(tmp_path):
  study, tuning = _study(tmp_path), _tuning(f'{_RATE}=0.1,0.2')
  refusal = study_runner.Refusal('config.strategy.backup_workers=1: expected 0')
  cells = [grid.Cell('parameter_server', 1, 1, 0)]
  chosen, failures, contests = tune.run(
    study, cells, tuning, lambda cells: dict.fromkeys(cells, refusal)
  )
  assert failures == {chosen[0]: refusal}
  assert tune.rows(tuning, contests) == []


def test_a_key_that_a_strategy_lacks_is_not_tuned_there():
  tuning = _tuning(f'{_RATE}=0.1,0.2', 'strategy.look_ahead=none,dana')
  counts = [
    len(tune.candidates(_study(), grid.Cell(name, 1, 1, 0), tuning))
    for name in ('sync', 'parameter_server')
  ]
  assert counts == [2, 4]
  cell = grid.Cell('parameter_server', 1, 1, 0, tuned=((_RATE, '0.1'),))
  assert _study().config(cell).optimizer.learning_rate == 0.1
  assert f'{_RATE}=0.1' in cell.name


def test_its_seed_is_none_of_those_that_are_scored():
  assert _tuning(f'{_RATE}=1,2', seeds=(0, 1)).seed == 1000
  assert _tuning(f'{_RATE}=1,2', seeds=(1000, 1003)).seed == 1004


# Running, with a launcher that trains nothing: accuracy 1 - |log10(10 rate)|,
# and the largest rate diverges.
_DIVERGES = """\
rate = float(flags['config.optimizer.learning_rate'])
if rate > 1:
  print('error: step 3 is not finite: loss nan')
  sys.exit(1)
accuracy = 1 - abs(math.log10(10 * rate))
"""


@pytest.mark.slow
def test_a_command_that_tunes_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
  study_runs.pretend(tmp_path, monkeypatch, _DIVERGES)
  monkeypatch.setattr(together, 'groups', lambda study, cells, _: [(cell,) for cell in cells])
  command = [
    'strategies',
    f'--config={_LENET}',
    f'--workdir={tmp_path / "study"}',
    '--strategies=sync',
    '--nodes=1',
    '--seeds=0,1',
    f'--tune={_RATE}=0.03,0.1,0.3,3',
  ]
  assert study_main.main(command) == 0
  short = [f'sync-1x1-tune-5epochs-{_RATE}={r}-seed1000' for r in (0.03, 0.1, 0.3, 3.0)]
  longer = [f'sync-1x1-tune-10epochs-{_RATE}={r}-seed1000' for r in (0.1, 0.03)]
  scored = [f'sync-1x1-{_RATE}=0.1-seed{seed}' for seed in (0, 1)]
  calls = (tmp_path / 'calls').read_text().split()
  assert calls[:4] == short and calls[6:] == scored
  # 0.03 and 0.3 are 0.52 and 0.48 decades away.
  assert math.log10(0.3 / 0.1) < math.log10(0.1 / 0.03)
  assert calls[4:6] == [longer[0], longer[0].replace('=0.1-', '=0.3-')]
  out = capsys.readouterr().out
  assert '4 runs that tune, of 5 epochs, 4 of them to do' in out
  assert '40 epochs spent in all' in out
  # Nothing is run again, nor what diverged while it tuned.
  assert study_main.main(command) == 0
  assert (tmp_path / 'calls').read_text().split() == calls
  page = (tmp_path / 'study' / 'study.md').read_text()
  assert '| sync-1x1 |' in page and 'failed' in page
  assert '100.0 % (10 epochs) best' in page
  # A seed more is trained with the value that is known.
  assert study_main.main([*command, '--seeds=0,1,2']) == 0
  assert (tmp_path / 'calls').read_text().split()[len(calls) :] == [f'sync-1x1-{_RATE}=0.1-seed2']
  # Before anything of another duration is tuned, whose runs have other names.
  assert study_main.main([*command, '--config.duration=15 epochs']) == 2
  assert "has '20 epochs'; choose another --workdir" in capsys.readouterr().err
  assert len((tmp_path / 'calls').read_text().split()) == len(calls) + 1
