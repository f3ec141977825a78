"""Tests of study: its cells, and the flags that ask for them."""

from anp_jax.tools import flag_values
from anp_jax.tools.study import __main__ as study_main, grid, named_strategies, study_runner

_TINY = 'configs/resnet_anp.py:tiny'


def _cell(strategy='sync', nodes=1, devices=1, seed=0):
  return grid.Cell(strategy, nodes, devices, seed)


def _command(folder, *more):
  return ['strategies', f'--config={_TINY}', f'--workdir={folder}', '--strategies=sync', *more]


def test_grid_is_every_combination_seed_by_seed():
  cells = grid.expand(named_strategies.parse('sync,local_sgd'), (1, 4), (2,), (7, 8))
  assert [(c.seed, c.nodes, c.devices, c.strategy) for c in cells] == [
    (7, 1, 2, 'sync'),
    (7, 1, 2, 'local_sgd'),
    (7, 4, 2, 'sync'),
    (7, 4, 2, 'local_sgd'),
    (8, 1, 2, 'sync'),
    (8, 1, 2, 'local_sgd'),
    (8, 4, 2, 'sync'),
    (8, 4, 2, 'local_sgd'),
  ]
  assert cells[2].name == 'sync-4x2-seed7' and cells[2].workers == 8
  assert cells[2].overrides == {'strategy.name': 'sync', 'seed': '7'}
  assert len({c.name for c in cells}) == len(cells)


def test_each_strategy_is_given_the_keys_that_it_has(tmp_path, capsys):
  keys = {'strategy.period': '3', 'strategy.in_flight': '2', 'seed': '1'}
  study = study_runner.Study(_TINY, keys, str(tmp_path))
  shares = {
    name: {a.partition('=')[0].removeprefix('--config.') for a in study.overridden(_cell(name))}
    for name in ('sync', 'local_sgd', 'parameter_server')
  }
  common = {'seed', 'strategy.name'}
  assert shares == {
    'sync': common,
    'local_sgd': common | {'strategy.period'},
    'parameter_server': common | {'strategy.in_flight'},
  }
  # One that none of them has is refused.
  command = _command(tmp_path, '--config.strategy.period=3')
  assert study_main.main(command) == 2
  assert 'belongs to strategy.name=local_sgd, not sync' in capsys.readouterr().err


def test_lists_of_numbers():
  assert flag_values.numbers('--nodes', '4, 1,2,1', 1) == (1, 2, 4)
  assert flag_values.numbers('--seeds', '0', 0) == (0,)
