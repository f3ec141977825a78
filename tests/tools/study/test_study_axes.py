"""Tests of study: any key of the config as an axis."""

import csv

import pytest

from anp_jax.tools.study import axes, grid, plots, study_results, study_runner, study_table
from tests import study_runs


def _parsed(*texts, strategies=('sync', 'parameter_server')):
  return axes.parse(texts, strategies, {}, grid.AXES)


def _combinations(strategy, *texts):
  overrides = {'strategy.name': strategy}
  return axes.combinations(study_runs.LENET, overrides, _parsed(*texts))


def test_values_are_those_between_commas_outside_brackets():
  sizes, mode = _parsed(
    'emulate.slow=((0, 2.0),(1, 3.0)), ()', 'strategy.mode= async,rennala,async'
  )
  assert sizes.values == ('((0, 2.0), (1, 3.0))', '()')
  assert (mode.key, mode.values) == ('strategy.mode', ('async', 'rennala'))
  # One value, however it is typed.
  rate, in_flight = _parsed('optimizer.momentum=.5,0.50', 'strategy.in_flight=1')
  assert rate.values == ('0.5',) and in_flight.key == 'strategy.in_flight'


def test_a_strategy_without_the_key_is_not_multiplied():
  flags = 'strategy.mode=async,rennala', 'optimizer.momentum=0,0.9'
  momenta = (('optimizer.momentum', '0.0'), ('optimizer.momentum', '0.9'))
  assert _combinations('sync', *flags) == [(m,) for m in momenta]
  assert _combinations('parameter_server', *flags) == [
    (('strategy.mode', mode), m) for mode in ('async', 'rennala') for m in momenta
  ]
  # Nor is one whose optimizer has no such key.
  combined = _combinations('sync', 'optimizer.name=nesterov,adam', 'optimizer.momentum=0,0.9')
  assert combined == [
    (('optimizer.name', 'nesterov'), momenta[0]),
    (('optimizer.name', 'nesterov'), momenta[1]),
    (('optimizer.name', 'adam'),),
  ]


def test_brackets_around_a_text_with_commas_are_no_part_of_it():
  (period,) = _parsed('strategy.period=8,(1,8@1000 steps)', strategies=('local_sgd',))
  assert period.values == ('8', '1,8@1000 steps')
  (weights,) = _parsed('init.from=a(1).safetensors,b.safetensors')
  assert weights.values == ('a(1).safetensors', 'b.safetensors')


def test_folders_of_varied_cells():
  keys = (('strategy.mode', 'async'), ('duration', '2 epochs'))
  cell = grid.Cell('parameter_server', 4, 1, 0, keys)
  assert cell.name == ('parameter_server-4x1-strategy.mode=async-duration=2_epochs.b06773d6-seed0')
  assert cell.overrides['duration'] == '2 epochs'
  # What a name cannot hold tells them apart all the same.
  slow = ['((0, 2.0),)', '((0. 2.0),)', 50 * '1', 51 * '1']
  names = {grid.Cell('sync', 1, 1, 0, (('k', v),)).name for v in slow}
  assert len(names) == 4 and not any('/' in n or ' ' in n for n in names)


def test_short_names_tell_keys_apart():
  assert axes.short_names(['a.mode', 'b.c.mode', 'batch_size']) == {
    'a.mode': 'a.mode',
    'b.c.mode': 'c.mode',
    'batch_size': 'batch_size',
  }
  assert axes.short_names(['size', 'a.size']) == {'size': 'size', 'a.size': 'a.size'}


def test_each_combination_is_a_row_and_a_curve(tmp_path):
  modes = [(('strategy.mode', mode),) for mode in ('async', 'rennala')]
  runs = {grid.Cell('parameter_server', 2, 1, 0, mode): study_runs.run(0.9) for mode in modes}
  runs[grid.Cell('sync', 2, 1, 0)] = study_runs.run(0.2)
  points = study_results.points(list(runs), runs, {})
  head, *rows = study_table.speed(points, ())
  assert head[:4] == ('strategy', 'mode', 'nodes', 'devices a node')
  assert [row[1] for row in rows] == ['async', 'rennala', '-']
  lines = plots.accuracy(points, ()).axes[0].lines
  assert [line.get_label() for line in lines] == [
    'parameter_server, mode=async, 2 x 1',
    'parameter_server, mode=rennala, 2 x 1',
    'sync, 2 x 1',
  ]
  paths = [str(tmp_path / name) for name in ('cells.csv', 'curves.csv')]
  study_table.write_cells(paths[0], list(runs), runs, {}, ())
  study_table.write_curves(paths[1], runs)
  for path in paths:
    with open(path) as f:
      modes = [row['strategy.mode'] for row in csv.DictReader(f)]
    assert modes == ['async', 'rennala', '']


def test_a_note_for_each_cell_that_cannot_be():
  study = study_runner.Study(study_runs.LENET, {}, 'folder')
  keys = (('optimizer.name', 'lars'),)
  cells = [grid.Cell('parameter_server', 2, 1, seed, keys) for seed in (0, 1)]
  refusals = {}
  for cell in cells:
    with pytest.raises(ValueError, match='optimizer.name') as refused:
      study.config(cell)
    refusals[cell] = study_runner.Refusal(refused.value)
  (note,) = study_table.notes([], None, '', refusals)
  assert note.startswith(f'left out: {cells[0].name}: config.optimizer.name=')
