"""Tests of --mode=range_test: rates in closed form, a loss that is known."""

import json

import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.tools import trials
from anp_jax.tools.trials import range_test
from tests import builders

_CLASSES = 5


def _config(config, **keys):
  changes = {
    'model.name': 'tests.small_networks:Biases',
    'model.norm_group': 2,
    'data.image_size': 8,
    'data.resize': 8,
    'data.synthetic_classes': _CLASSES,
    'label_smoothing': 1.0,
    'optimizer.name': 'sgd',
    'optimizer.learning_rate': 100.0,
    'optimizer.weight_decay': 0.0,
    'schedule.name': 'range',
    'schedule.start': 1e-4,
    'schedule.warmup': '0 steps',
    'duration': '60 steps',
  }
  return builders.editable(config_lib.replaced(config, changes | keys))


def _result(workdir):
  return json.loads((workdir / 'range_test.json').read_text())


def _numpy_losses(rates):
  """Losses of descent on the biases, with labels smoothed to nothing."""
  weights, losses = np.arange(_CLASSES, dtype=np.float64), []
  for rate in rates:
    logs = weights - weights.max()
    logs -= np.log(np.exp(logs).sum())
    losses.append(-logs.mean())
    weights -= rate * (np.exp(logs) - 1 / _CLASSES)
  return losses


@pytest.mark.slow
@pytest.mark.parametrize('count', [1, 2, 4])
def test_losses_and_rates_are_those_of_numpy(tmp_path, config, monkeypatch, capsys, count):
  builders.use_devices(monkeypatch, count)
  trials.run(_config(config), str(tmp_path), 'range_test')
  result = _result(tmp_path)
  rates = 1e-2 * 1e4 ** (np.arange(60) / 60)
  steps = len(result['rates'])
  assert 40 < steps <= 60
  # float32, and a power of it.
  np.testing.assert_allclose(result['rates'], rates[:steps], rtol=1e-5)
  expected = _numpy_losses(rates[:steps])
  np.testing.assert_allclose(result['losses'][:40], expected[:40], rtol=1e-4)
  # It has learnt, and then the loss was several times its smallest.
  assert result['diverged'] == result['rates'][-1]
  assert result['losses'][-1] > 3 * min(result['losses'])
  assert 0.05 < result['suggested'] < result['diverged']
  text = capsys.readouterr().out
  assert f'suggested learning rate {result["suggested"]:.2g}, diverged at ' in text
  assert (tmp_path / 'range_test.png').stat().st_size > 5000
  assert {p.name for p in tmp_path.iterdir()} == {'range_test.json', 'range_test.png'}


def test_a_loss_that_is_not_finite_ends_the_test_and_no_run(tmp_path, config, monkeypatch, capsys):
  builders.use_devices(monkeypatch, 1)
  keys = {'optimizer.learning_rate': 1e38, 'schedule.start': 1e-36}
  monkeypatch.setattr(range_test, '_LIMIT', float('inf'))
  trials.run(_config(config, **keys), str(tmp_path), 'range_test')
  result = _result(tmp_path)
  steps = len(result['losses'])
  assert 0 < steps < 60 and np.isfinite(result['losses']).all()
  rate = 1e38 * 1e-36 ** (1 - steps / 60)
  assert result['diverged'] == pytest.approx(rate, rel=1e-3)
  assert f'diverged at {rate:.2g}' in capsys.readouterr().out


def test_the_steepest_descent_of_a_curve_is_found():
  """A fall of a logistic function is steepest at its middle."""
  rates = 1e-5 * 1e6 ** (np.arange(400) / 400)
  losses = 1 + 2 / (1 + np.exp(4 * np.log10(rates / 1e-2)))
  noise = np.random.default_rng(0).normal(0, 0.05, 400)
  smoothed, suggested = range_test.analyse(rates, losses + noise)
  assert abs(np.log10(suggested / 1e-2)) < 0.15
  # A mean over 20 steps rounds the curve off.
  np.testing.assert_allclose(smoothed[50:-50], losses[50:-50], atol=0.15)
  assert range_test.analyse(rates, np.arange(400.0))[1] is None


def test_divergence_is_a_multiple_of_the_smallest_mean():
  # Means over two: 2, 1, 1, 3, 5.
  losses = [3, 1, 1, 1, 5, 5]
  assert [range_test._diverges(losses[:n], 2) for n in range(1, 7)] == [False] * 5 + [True]
  # The largest mean is below the first one, however small the smallest is.
  assert not range_test._diverges([9, 9, 0.1, 0.1, 5, 5], 2)
