"""Tests of study: its cells, and the flags that ask for them."""

import itertools

from anp_jax.tools.study import grid, named_strategies, study_runner
from tests import study_runs


def test_grid_is_every_combination_seed_by_seed():
  cells = grid.expand(named_strategies.parse('sync,local_sgd'), (1, 4), (2,), (7, 8))
  assert [(c.seed, c.nodes, c.devices, c.strategy) for c in cells] == list(
    itertools.product((7, 8), (1, 4), (2,), ('sync', 'local_sgd'))
  )
  assert cells[2].name == 'sync-4x2-seed7'
  assert cells[2].overrides == {'strategy.name': 'sync', 'seed': '7'}
  assert len({c.name for c in cells}) == len(cells)


def test_each_strategy_is_given_the_keys_that_it_has(tmp_path):
  keys = {'strategy.period': '3', 'strategy.in_flight': '2', 'seed': '1'}
  study = study_runner.Study(study_runs.TINY, keys, str(tmp_path))
  shares = {
    name: {
      argument.partition('=')[0].removeprefix('--config.')
      for argument in study.overridden(grid.Cell(name, 1, 1, 0))
    }
    for name in ('sync', 'local_sgd', 'parameter_server')
  }
  common = {'seed', 'strategy.name'}
  assert shares == {
    'sync': common,
    'local_sgd': common | {'strategy.period', 'strategy.groups'},
    'parameter_server': common | {'strategy.in_flight'},
  }
