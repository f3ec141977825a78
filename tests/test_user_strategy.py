"""A strategy of the user's own: trained, resumed, evaluated and studied."""

import jax
import numpy as np
import pytest

from anp_jax import train
from anp_jax.checkpoint import trained
from anp_jax.config import command_line, strategy as strategy_lib
from anp_jax.reporting import telemetry
from anp_jax.tools.study import __main__ as study
from tests import builders, launching

_NAME = 'tests.sign_sgd:SignSgd'
_KEYS = {
  'strategy.name': _NAME,
  'model.name': 'tests.user_network:SmallNet',
  'log.tensorboard': 'False',
  'optimizer.name': 'sgd',
  'optimizer.learning_rate': '0.25',
  'optimizer.weight_decay': '0.0',
  **launching.CONSTANT,
}


def _config(**keys):
  return command_line.load('configs/resnet_anp.py:tiny', {**_KEYS, **keys})


@pytest.mark.slow
def test_it_trains_resumes_and_is_evaluated(tmp_path, monkeypatch):
  builders.use_devices(monkeypatch, 2)
  train.run(_config(duration='1 steps'), str(tmp_path))
  first = trained.load(str(tmp_path))
  train.run(_config(duration='2 steps'), str(tmp_path))
  second = trained.load(str(tmp_path))
  assert (first.step, second.step) == (1, 2)
  # Whatever the gradient, a weight moves by the learning rate or not at all;
  # 0.25 and sums of a few of it are exact enough in float32 for 1e-6.
  moves = jax.tree.map(lambda a, b: np.abs(a - b), first.params, second.params)
  moves = np.concatenate([x.ravel() for x in jax.tree.leaves(moves)])
  is_still = moves < 1e-6
  np.testing.assert_allclose(moves[~is_still], 0.25, atol=1e-6)
  assert is_still.mean() < 0.9
  scores = train.run(_config(duration='2 steps'), str(tmp_path), 'evaluate')
  lines = telemetry.read(str(tmp_path))
  last = [r for r in lines if r['kind'] == 'validation'][-1]
  assert scores['loss'] == pytest.approx(last['loss'], rel=1e-5)


@pytest.mark.multiprocess
@pytest.mark.soak
def test_it_is_studied(tmp_path, capsys):
  status = study.main(
    [
      'strategies',
      '--config=configs/resnet_anp.py:tiny',
      '--nodes=2',
      f'--strategies=sync,{_NAME}',
      f'--workdir={tmp_path}',
      '--config.model.name=tests.user_network:SmallNet',
      '--config.duration=8 steps',
      '--config.log.every=2 steps',
    ]
  )
  assert status == 0, capsys.readouterr().out
  rows = (tmp_path / 'study.md').read_text().splitlines()
  # One in the table of speed and one in that of scores.
  own_columns, sync_columns = (
    [row.count('|') for row in rows if row.startswith(f'| {name} ')] for name in (_NAME, 'sync')
  )
  assert len(own_columns) == 2 and own_columns == sync_columns


class NoKeys(strategy_lib.Strategy):
  default_config = lambda self: None  # noqa: E731


class PlainValues(strategy_lib.Strategy):
  default_config = lambda self: {'alpha': 0.5}  # noqa: E731


@pytest.mark.parametrize('name', ['NoKeys', 'PlainValues'])
def test_keys_that_are_none_are_refused(name):
  words = f'{__name__}:{name}', 'expected a default_config with keys, such as'
  builders.assert_refused(words, _config, **{'strategy.name': f'{__name__}:{name}'})


def test_a_strategy_is_named_by_its_address():
  names = _NAME, 'sync', 'local_sgd'
  assert tuple(strategy_lib.by_name(name).name for name in names) == names


def test_a_name_without_a_class_is_refused():
  builders.assert_refused('local_sgd', strategy_lib.by_name, 'locl')
  builders.assert_refused('SignSG', strategy_lib.by_name, 'tests.sign_sgd:SignSG')
