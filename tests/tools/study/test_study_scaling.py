"""Tests of study: a batch for all workers, or one for each."""

import pytest

from anp_jax import config as config_lib
from anp_jax.tools.study import grid, named_strategies, scaling, study_results, study_runner

_LENET = 'configs/lenet.py'


def _study(**typed):
  typed = {k.replace('__', '.'): v for k, v in typed.items()}
  return study_runner.Study(_LENET, {'batch_size': '64'} | typed, 'folder')


def _cell(strategy, *varied):
  return grid.Cell(strategy, 4, 1, 0, varied, weak=True)


_SYNCHRONOUS, _RENNALA = (('strategy.mode', mode) for mode in ('synchronous', 'rennala'))


@pytest.mark.parametrize(
  'cell, size',
  [
    (_cell('sync'), 256),
    (_cell('local_sgd'), 256),
    # A gradient of a whole batch is an update already.
    (_cell('parameter_server'), 64),
    (_cell('parameter_server', _RENNALA, ('strategy.parts', '1')), 64),
    (_cell('parameter_server', _RENNALA), 256),
    (_cell('parameter_server', _SYNCHRONOUS), 256),
    # One of four is not waited for.
    (_cell('parameter_server', _SYNCHRONOUS, ('strategy.backup_workers', '1')), 192),
    # A varied batch size is that of a worker, too.
    (_cell('sync', ('batch_size', '32')), 128),
  ],
)
def test_a_batch_for_each_worker(cell, size):
  assert _study().config(cell).batch_size == size
  assert f'--config.batch_size={size}' in _study().arguments(cell)
  assert '-weak-' in cell.name


def test_cells_that_agree_are_one():
  cells = grid.expand(named_strategies.parse('sync,parameter_server'), (1, 4), (1,), (0,))
  names = [c.name for c in scaling.cells(_study().config, cells, ('strong', 'weak'))]
  assert names == [
    'sync-1x1-seed0',
    'parameter_server-1x1-seed0',
    'sync-4x1-seed0',
    'sync-4x1-weak-seed0',
    'parameter_server-4x1-seed0',
  ]
  assert scaling.cells(_study().config, cells, ('strong',)) == cells


def test_weak_and_strong_have_rows_of_their_own():
  cells = scaling.cells(
    _study().config,
    grid.expand(named_strategies.parse('sync'), (4,), (1,), (0,)),
    ('strong', 'weak'),
  )
  points = study_results.points(cells, {}, {})
  assert [p.varied for p in points] == [{}, {'scaling': 'weak'}]


@pytest.mark.parametrize('duration', ['60 steps', '60steps', '1 step'])
def test_steps_are_refused(duration):
  """So many steps of a larger batch are more samples."""
  with pytest.raises(config_lib.ConfigError, match='expected epochs or exampl'):
    _study(duration=duration).config(_cell('sync'))


def test_a_recipe_need_not_be_valid_without_what_was_typed(tmp_path):
  recipe = tmp_path / 'recipe.py'
  recipe.write_text(
    'from anp_jax import config\n\ndef get_config(variant=""):\n  result = config.base()\n'
    '  result.data.source, result.batch_size = "folder", 8\n  return result\n'
  )
  study = study_runner.Study(str(recipe), {'data.path': str(tmp_path)}, 'folder')
  assert study.config(_cell('sync')).batch_size == 32
