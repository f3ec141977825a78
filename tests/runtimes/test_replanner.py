"""The plan of a channel split changes while the run goes on."""

import itertools
import re
import time
import types

import numpy as np
import pytest

from anp_jax import cluster, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel.channel_split import split as plan_lib
from anp_jax.runtimes.calibration import calibrate, costs as costs_lib, probe, replanner
from anp_jax.system import stopwatch
from tests import launching, splitting


def _costs(*rates, kind=costs_lib.Costs, **fields):
  """Costs of devices that compute so many features a second, nothing else."""
  layers = {
    'conv1': splitting.layer(*rates, features=8),
    'conv2': splitting.layer(*rates, features=16, reads='conv1'),
  }
  measured = splitting.costs(layers, rest=0.0, alike=False, **fields)
  return kind(**{f: getattr(measured, f) for f in vars(measured)})


def _config(**overrides):
  return splitting.two_convolutions(
    **{
      'data.source': 'synthetic',
      'data.synthetic_classes': '12',
      'data.synthetic_examples': '64',
      'schedule.warmup': '0 steps',
      'schedule.name': 'constant',
      'log.tensorboard': 'False',
      'mesh.model': '2',
      'mesh.data': '4',
      **overrides,
    }
  )


def _slowdowns(monkeypatch, *values):
  """Has checks find these, the last one again and again."""
  values = itertools.chain(values, itertools.repeat(values[-1]))
  monkeypatch.setattr(probe.Probe, 'slowdown', lambda _: np.array(next(values)))


def _measurements(monkeypatch, *results):
  """Has the devices measured with these results, one after another."""
  results = iter(results)
  monkeypatch.setattr(calibrate, 'measure', lambda *_: next(results))


@pytest.mark.slow
def test_a_run_with_another_plan_has_the_bits_of_one_given_both(tmp_path, monkeypatch, capsys):
  # 5 to 3: 5 of 8 features and 10 of 16, so that kernels are kept with padding. 3 to 1: 6 and 12.
  _measurements(monkeypatch, _costs(5, 3), _costs(9, 3))
  # Off for three checks in a row only from the fourth on.
  _slowdowns(monkeypatch, [1, 1.2], [1.2, 1], [1, 1], *3 * [[1, 3]], [1, 1])
  measured = _config(**{'strategy.check_plan': '1e-6', 'duration': '30 steps'})
  train.run(measured, str(tmp_path / 'measured'))
  printed = capsys.readouterr().out
  first, second = 'conv1=5,3; conv2=10,6', 'conv1=6,2; conv2=12,4'
  assert f"config.strategy.plan='{first}'\n" in printed
  change = re.search(r"strategy.plan='(.*)' after step (\d+)", printed)
  # A step a check, from the eleventh on.
  assert change[1] == second and int(change[2]) == 16
  assert printed.count('after step') == 1
  for plan, duration in ((first, '16 steps'), (second, '30 steps')):
    config = _config(**{'strategy.plan': plan, 'duration': duration})
    train.run(config, str(tmp_path / 'given'))
  weights = launching.weights(tmp_path / 'measured')
  expected = launching.weights(tmp_path / 'given')
  assert weights.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(weights[name], value, err_msg=name)
  # A plan by hand is not checked, though devices were measured before.
  by_hand = _config(
    **{'strategy.plan': first, 'strategy.check_plan': '1e-6', 'duration': '45 steps'}
  )
  _slowdowns(monkeypatch, [1, 3])
  train.run(by_hand, str(tmp_path / 'measured'))
  assert 'after step' not in capsys.readouterr().out
  # A run that resumes has the plan of the end.
  _measurements(monkeypatch)
  again = _config(**{'duration': '46 steps'})
  train.run(again, str(tmp_path / 'measured'))
  assert f"config.strategy.plan='{second}'\n" in capsys.readouterr().out


@pytest.mark.slow
def test_devices_that_deserve_the_same_plan_are_not_measured_again(tmp_path, monkeypatch, capsys):
  _measurements(monkeypatch, _costs(8, 8), _costs(8, 7.9))
  _slowdowns(monkeypatch, [1, 1.3])
  config = _config(**{'strategy.check_plan': '1e-6', 'duration': '40 steps'})
  train.run(config, str(tmp_path))
  assert 'after step' not in capsys.readouterr().out


def _spec(*devices, **overrides):
  config = _config(
    **{'mesh.model': '1', 'mesh.data': '1', 'strategy.offload_to': "('processes',)", **overrides}
  )
  return splitting.spec(config, splitting.mesh(1, 1), offload_devices=devices)


class _Pool:
  """Offload devices that a test loses."""

  def __init__(self, *devices):
    self._devices, self.lines = devices, []

  def devices(self):
    return self._devices

  def news(self):
    lines, self.lines = self.lines, []
    return lines


def _replanner(spec, workdir, processes, pool, is_measured=True):
  invocation = strategy_lib.Invocation(spec.config, str(workdir), processes, pool=pool)
  return replanner.Replanner(spec, invocation, is_measured)


def _device():
  return types.SimpleNamespace(name='offload', is_lost=False)


def _offloaded(rates):
  return _costs(*rates, kind=costs_lib.OffloadCosts)


def test_devices_that_are_lost_change_a_measured_plan(tmp_path, monkeypatch):
  second, third = _device(), _device()
  _measurements(monkeypatch, _offloaded([4, 2, 2]))
  spec, pool = _spec(second, third), _Pool(second, third)
  processes = cluster.Processes(spec.config)
  text, _ = calibrate.choose_plan(spec, str(tmp_path), processes)
  assert text == 'conv1=4,2,2; conv2=8,4,4'
  planner = _replanner(spec, tmp_path, processes, pool)
  assert not planner.is_due(1)
  second.is_lost, pool.lines = True, ['rank 1 has gone']
  assert planner.is_due(2)
  changed, lines = planner.revise(2)
  assert changed.offload_devices == (third,)
  # Of 8, 5.33 and 2.67; of 16, 10.67 and 5.33.
  assert changed.config.strategy.plan == 'conv1=5,3; conv2=11,5'
  assert lines == [
    'plan     rank 1 has gone',
    "plan     config.strategy.plan='conv1=5,3; conv2=11,5' after step 2",
  ]
  third.is_lost, pool.lines = True, ['rank 2 has gone']
  assert planner.is_due(3)
  changed, _ = planner.revise(3)
  assert changed.offload_devices == ()
  assert changed.config.strategy.plan == plan_lib.NOTHING
  assert not planner.is_due(5)


def test_a_plan_by_hand_stays(tmp_path):
  """What replaces a lost device computes for it."""
  device = _device()
  spec, pool = _spec(device, **{'strategy.shares': '(3, 1)'}), _Pool(device)
  planner = _replanner(spec, tmp_path, cluster.Processes(spec.config), pool, is_measured=False)
  device.is_lost, pool.lines = True, ['rank 1 has gone']
  assert planner.is_due(7)
  assert planner.revise(7) == (None, ['plan     rank 1 has gone'])


def test_checks_are_as_many_seconds_apart_as_the_config_says(tmp_path, monkeypatch):
  """After the same step on all processes, by the first one's clock."""
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr(time, 'monotonic', lambda: clock.now)
  _measurements(monkeypatch, _costs(8, 8))
  spec = splitting.spec(_config(**{'strategy.check_plan': '60'}), splitting.mesh(1, 2))
  processes = cluster.Processes(spec.config)
  calibrate.choose_plan(spec, str(tmp_path), processes)
  planner = _replanner(spec, tmp_path, processes, None)
  checks = []
  monkeypatch.setattr(
    probe,
    'Probe',
    lambda *_: types.SimpleNamespace(slowdown=lambda: (checks.append(clock.now), np.ones(2))[1]),
  )
  for step in range(1, 200):
    clock.now = 2.0 * step
    if planner.is_due(step):
      assert planner.revise(step) == (None, [])
  # From the first step on, after which no time had passed.
  assert checks == [62.0, 122.0, 182.0, 242.0, 302.0, 362.0]


@pytest.mark.slow
@pytest.mark.parametrize('data, model', [(2, 2)])
def test_a_check_times_the_longest_layer_on_all_devices(data, model, monkeypatch):
  def on_device(call, count, split, _):
    import jax

    assert (call.layer, count, split) == ('conv2', 8, True)
    return splitting.lasting(1.0 + jax.config.jax_default_device.id)

  splitting.pretend_times(monkeypatch, convolution=on_device)
  monkeypatch.setattr(stopwatch, 'timed', lambda run: run() or run.seconds)
  config = _config(**{'mesh.model': str(model), 'mesh.data': str(data)})
  spec = splitting.spec(config, splitting.mesh(data, model))
  costs = _costs(*([8] * model))
  check = probe.Probe(spec, cluster.Processes(config), costs, {'conv2': (8, 8), 'conv1': (4, 4)})
  # 8 features at 8 a second were 1 s; the slowest of a column counts.
  expected = [1.0 + i + model * (data - 1) for i in range(model)]
  np.testing.assert_allclose(check.slowdown(), expected)
