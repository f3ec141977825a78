"""Simulated seconds of `sync` and `local_sgd`, and that they change nothing."""

import math

import numpy as np
import pytest

from anp_jax import config as config_lib, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.reporting import telemetry
from anp_jax.training import run_spec
from tests import builders, launching

BATCH, SEED = 16, 3


def _config(**keys):
  """A config with keys of its strategy, written with __ for dots."""
  keys = {k.replace('__', '.'): v for k, v in keys.items()}
  return builders.config(
    {'batch_size': BATCH, 'seed': SEED} | {f'strategy.{key}': value for key, value in keys.items()}
  )


def _clock(**keys):
  config = _config(**keys)
  spec = run_spec.RunSpec(config, None, None, BATCH, 640)
  return strategy_lib.find(config).simulation(spec, '', 0)


def _seconds(count, **keys):
  clock = _clock(**keys)
  return [clock.seconds(step) for step in range(1, count + 1)]


# Sums of these times are exact in binary.
_TIMES = {'simulate__step_seconds': 1.0, 'simulate__image_seconds': 0.125}


def test_a_step_of_sync_takes_as_long_as_its_slowest_worker():
  keys = {**_TIMES, 'simulate__reduce_seconds': 0.25}
  # Of four workers each has four images.
  keys['simulate__workers'] = 4
  assert _seconds(9, **keys) == [1.75 * step for step in range(1, 10)]
  slow = ((1, 2.0), (2, 3.0))
  assert _seconds(9, **keys, simulate__slow=slow) == [
    (3 * 1.5 + 0.25) * step for step in range(1, 10)
  ]
  # One worker has nobody to add its gradients to.
  keys['simulate__workers'] = 1
  assert _seconds(2, **keys) == [3.0, 6.0]


def test_groups_wait_for_each_other_in_exchanges_only():
  keys = {
    'name': 'local_sgd',
    'groups': 2,
    'period': 3,
    'simulate__workers': 4,
    **_TIMES,
    'simulate__slow': ((3, 2.0),),
    'simulate__reduce_seconds': 0.25,
    'simulate__exchange_seconds': 0.5,
  }
  # The second group has the slow worker; it takes 3.25 seconds a step.
  assert _seconds(7, **keys) == [3.25, 6.5, 10.25, 13.5, 16.75, 20.5, 23.75]
  # A group of one worker has no sum of gradients.
  keys |= {'groups': 4}
  assert _seconds(3, **keys) == [3.0, 6.0, 9.5]
  # One group has nobody to exchange with, and is `sync`.
  keys |= {'groups': 1}
  assert _seconds(3, **keys) == [3.25, 6.5, 9.75]


@pytest.mark.parametrize('workers', [1, 2, 4])
def test_a_step_waits_for_the_outage_of_any_worker(workers):
  """Which delays it by its seconds, and changes no other time."""
  keys = {**_TIMES, 'simulate__workers': workers, 'simulate__spread': 0.25}
  outages = {'simulate__outage_chance': 0.1, 'simulate__outage_seconds': 512.0}
  steps = [np.diff(_seconds(2000, **keys, **more)) for more in ({}, outages)]
  late = steps[1] > 512
  # A slow worker's outage delays its own pass, which may be shorter than the longest.
  np.testing.assert_allclose(steps[1][~late], steps[0][~late], rtol=0, atol=1e-9)
  assert (steps[1][late] <= steps[0][late] + 512 + 1e-9).all()
  if workers == 1:
    np.testing.assert_allclose(steps[1][late], steps[0][late] + 512, rtol=0, atol=1e-9)
  # Four standard errors of 2,000 draws are at most 0.045.
  assert abs(late.mean() - (1 - 0.9**workers)) < 0.045


def _passes(step, workers, spread):
  """Lognormal times with mean 1, drawn from the seed and the step."""
  variance = math.log(1 + spread**2)
  normal = np.random.default_rng([SEED, step]).standard_normal(workers)
  return np.exp(np.sqrt(variance) * normal - variance / 2)


def test_groups_with_drawn_times_against_a_loop():
  steps, workers, period = 40, 8, 5
  clocks, expected, waits = np.zeros(4), [], 0.0
  for step in range(1, steps + 1):
    passes = _passes(step, workers, 0.5)
    for i in range(4):
      clocks[i] += max(passes[2 * i], passes[2 * i + 1]) + 0.25
    if step % period == 0:
      waits += clocks.max() - clocks.min()
      clocks = np.full(4, clocks.max() + 0.5)
    expected.append(clocks.max())
  assert waits > 1  # seconds: the test can fail
  keys = {
    'groups': 4,
    'simulate__spread': 0.5,
    'period': period,
    'simulate__workers': workers,
    'simulate__step_seconds': 1.0,
    'simulate__exchange_seconds': 0.5,
    'simulate__reduce_seconds': 0.25,
  }
  # Logarithms and exponentials round in their last bits.
  got = _seconds(steps, name='local_sgd', **keys)
  np.testing.assert_allclose(got, expected, 1e-12)
  # Where the run is resumed, and where it looks back, it has the same bits.
  clock = _clock(name='local_sgd', **keys)
  assert [clock.seconds(step) for step in (30, 40, 7)] == [got[step - 1] for step in (30, 40, 7)]


def test_a_workers_times_do_not_depend_on_how_many_there_are():
  keys = {'simulate__step_seconds': 1.0, 'simulate__spread': 0.3}
  few, many = (_seconds(50, simulate__workers=n, **keys) for n in (2, 16))
  assert all(a <= b for a, b in zip(np.diff(few), np.diff(many)))
  assert few[-1] < many[-1]


_CASES = {'sync': {}, 'local_sgd': {'strategy.groups': 2, 'strategy.period': 4}}


@pytest.mark.slow
@pytest.mark.usefixtures('on_one_device')
@pytest.mark.parametrize('name', [builders.soak('sync'), 'local_sgd'])
def test_a_run_learns_the_same_and_goes_on_with_its_time(tmp_path, config, name):
  config = config_lib.replaced(
    config,
    {
      'model.name': 'tests.user_network:PlainNet',
      'strategy.name': name,
      'log.tensorboard': False,
      'log.every': '1 steps',
      'eval.every': '3 steps',
      **launching.CONSTANT,
      **_CASES[name],
    },
  )
  simulated = {
    'strategy.simulate.workers': 4,
    'strategy.simulate.step_seconds': 0.5,
    'strategy.simulate.slow': ((0, 1.5),),
    'strategy.simulate.reduce_seconds': 0.25,
  }
  for folder, keys, stops in (('real', {}, (8,)), ('simulated', simulated, (5, 8))):
    for stop in stops:
      changes = {**keys, 'duration': f'{stop} steps'}
      scores = train.run(config_lib.replaced(config, changes), str(tmp_path / folder))
      assert 'simulated_seconds' not in scores
  real, same = (launching.weights(tmp_path / folder) for folder in ('real', 'simulated'))
  assert not [k for k in real if real[k].tobytes() != same[k].tobytes()]
  assert not any('simulated_seconds' in r for r in telemetry.read(str(tmp_path / 'real')))
  lines = [
    (r['kind'], r['step'], r['simulated_seconds'])
    for r in telemetry.read(str(tmp_path / 'simulated'))
  ]
  assert sorted(lines) == [
    *(('train', step, step) for step in range(1, 9)),
    *(('validation', step, step) for step in (3, 5, 6, 8)),
  ]


@pytest.mark.parametrize('name', ['invariant', 'channel_split'])
def test_other_strategies_have_no_simulated_time(name):
  config = _config(name=name)
  spec = run_spec.RunSpec(config, None, None, BATCH, 640)
  assert strategy_lib.find(config).simulation(spec, '', 0) is None


def test_a_resume_keeps_the_cluster_that_is_simulated():
  before = _config(simulate__workers=2)
  now = _config(simulate__workers=2, simulate__spread=0.5)
  saved = config_lib.flat(before)
  assert config_lib.difference(saved, before) == ''
  assert 'config.strategy.simulate.spread is 0.5' in config_lib.difference(saved, now)
