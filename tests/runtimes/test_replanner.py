"""The plan of a channel split changes while the run goes on."""

import itertools
import types

import pytest

from anp_jax import cluster, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel.channel_split import split as split_lib
from anp_jax.runtimes.calibration import calibrate, costs as costs_lib, replanner, timing
from anp_jax.runtimes.offload import pool
from tests import launching, splitting


def _offloaded(rates):
  """Costs of devices that compute so many features a second, nothing else."""
  layers = {
    'conv1': splitting.layer(*rates, features=8),
    'conv2': splitting.layer(*rates, features=16, reads='conv1'),
  }
  measured = splitting.costs(layers, rest=0.0)
  return costs_lib.OffloadCosts(**vars(measured))


def _config(**overrides):
  return splitting.two_convolutions(
    **{
      **splitting.SYNTHETIC,
      **launching.CONSTANT,
      'mesh.model': '1',
      'mesh.data': '1',
      **overrides,
    }
  )


def _measured(monkeypatch, *rates):
  """Has the devices measured with this result."""
  timed = types.SimpleNamespace(costs=lambda: _offloaded(rates))
  monkeypatch.setattr(timing, 'Timing', lambda *_: timed)


def _spec(*devices, **overrides):
  config = _config(**{'strategy.offload_to': "('processes',)", **overrides})
  return splitting.spec(config, splitting.mesh(1, 1), offload_devices=devices)


class _Pool:
  """Offload devices that a test loses."""

  def __init__(self, *devices):
    self.devices, self.lines = devices, []

  def news(self):
    lines, self.lines = self.lines, []
    return lines


def _replanner(spec, workdir, processes, pool):
  invocation = strategy_lib.Invocation(spec.config, str(workdir), processes, pool=pool)
  return replanner.Replanner(spec, invocation)


def _device():
  return types.SimpleNamespace(name='offload', is_lost=False)


def test_devices_that_are_lost_change_a_measured_plan(tmp_path, monkeypatch):
  second, third = _device(), _device()
  _measured(monkeypatch, 4, 2, 2)
  spec, pool = _spec(second, third), _Pool(second, third)
  processes = cluster.Processes(spec.config)
  text, _ = calibrate.choose_plan(spec, str(tmp_path), processes)
  assert text == 'conv1=4,2,2; conv2=8,4,4'
  planner = _replanner(spec, tmp_path, processes, pool)
  assert planner.revise(1) == (None, [])
  second.is_lost, pool.lines = True, ['rank 1 has gone']
  changed, lines = planner.revise(2)
  assert changed.offload_devices == (third,)
  # Of 8, 5.33 and 2.67; of 16, 10.67 and 5.33.
  assert changed.config.strategy.plan == 'conv1=5,3; conv2=11,5'
  assert lines == [
    'plan     rank 1 has gone',
    "plan     config.strategy.plan='conv1=5,3; conv2=11,5' after step 2",
  ]
  third.is_lost, pool.lines = True, ['rank 2 has gone']
  changed, _ = planner.revise(3)
  assert changed.offload_devices == ()
  assert changed.config.strategy.plan == split_lib.NOTHING
  assert planner.revise(5) == (None, [])


def test_a_plan_by_hand_stays(tmp_path):
  """What replaces a lost device computes for it."""
  device = _device()
  spec, pool = _spec(device, **{'strategy.shares': '(3, 1)'}), _Pool(device)
  planner = _replanner(spec, tmp_path, cluster.Processes(spec.config), pool)
  device.is_lost, pool.lines = True, ['rank 1 has gone']
  assert planner.revise(7) == (None, ['plan     rank 1 has gone'])


@pytest.mark.slow
def test_a_run_goes_on_with_its_weights_by_another_plan(tmp_path, monkeypatch, capsys):
  """Its only offload device is lost after the third step."""
  keys = {**splitting.FLOAT32, 'duration': '6 steps', 'strategy.offload_to': "('cpu:1',)"}
  calls = itertools.count(1)

  def news(self):
    if next(calls) != 3:
      return []
    self.devices[0].is_lost = True
    return ['rank 1 has gone']

  _measured(monkeypatch, 5, 3)
  monkeypatch.setattr(pool.DevicePool, 'news', news)
  train.run(_config(**keys), str(tmp_path / 'lost'))
  printed = capsys.readouterr().out
  assert "config.strategy.plan='conv1=5,3; conv2=10,6'\n" in printed
  assert 'plan     rank 1 has gone\n' in printed
  assert "config.strategy.plan='nothing' after step 3\n" in printed
  train.run(_config(**keys, **{'strategy.plan': 'nothing'}), str(tmp_path / 'alone'))
  # Sums of some hundred float32 terms in another order, over three steps.
  key = '6/params/conv1/kernel'
  splitting.assert_same_weights(tmp_path / 'lost', tmp_path / 'alone', key, tolerance=1e-5)
