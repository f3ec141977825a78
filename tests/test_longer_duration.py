"""Tests of a run that is resumed with another duration than it began with."""

import json
import math

import pytest

from anp_jax import config as config_lib
from anp_jax.training import run_spec, schedule_change
from tests import builders

_PEAK, _WARMUP = 0.4, 2
_BATCH, _EXAMPLES = 8, 48


def _config(config, schedule, duration, **keys):
  changes = {
    'optimizer.learning_rate': _PEAK,
    'schedule.name': schedule,
    'schedule.warmup': f'{_WARMUP} steps',
    'duration': duration,
  }
  return builders.on_biases(config, **changes | keys)


def _rate(schedule, step, total):
  """The rate of a step in closed form."""
  rise = min(step / _WARMUP, 1)
  done = min(max(step - _WARMUP, 0) / (total - _WARMUP), 1)
  if schedule == 'cosine':
    return rise * _PEAK * (1 + math.cos(math.pi * done)) / 2
  return rise * _PEAK * (1 - done)


@pytest.mark.parametrize('schedule', ['cosine', 'polynomial'])
@pytest.mark.parametrize('old, new', [(5, 9), (9, 6), (40, 41)])
@pytest.mark.parametrize('step', [3, 5])
def test_rates_of_both_schedules(config, schedule, old, new, step):
  saved, spec = _runs(config, schedule, f'{old} steps', f'{new} steps')
  assert schedule_change.rates(saved, spec, step) == pytest.approx(
    (_rate(schedule, step, old), _rate(schedule, step, new)), abs=1e-12
  )


def test_the_old_rate_is_by_all_of_the_old_config(config):
  before = _config(config, 'polynomial', '9 steps')
  saved = json.loads(config_lib.to_json(before))
  _, spec = _runs(config, 'constant', '1 steps', '12 steps', **{'optimizer.learning_rate': 1})
  assert schedule_change.rates(saved, spec, 5) == pytest.approx((_rate('polynomial', 5, 9), 1.0))


@pytest.mark.parametrize(
  'old, new',
  [('4 steps', '8 steps'), ('1e12 steps', '2e12 steps')],  # also one that a time limit will stop
)
def test_the_rates_to_come_decide(config, old, new):
  """In the warm-up both are equal at the step of resume, and differ later."""
  saved, spec = _runs(config, 'cosine', old, new)
  assert schedule_change.rates(saved, spec, 2) == (_PEAK, _PEAK)


@pytest.mark.parametrize(
  'schedule, old, new',
  [
    ('constant', '4 steps', '8 steps'),
    ('cosine', '8 steps', '8 steps'),
    ('cosine', '8 steps', f'{8 * _BATCH} examples'),  # the same in other words
    ('step', '4 steps', '8 steps'),
  ],
)
def test_a_schedule_that_stays_is_no_change(config, schedule, old, new):
  saved, spec = _runs(config, schedule, old, new)
  assert schedule_change.rates(saved, spec, 4) == ()


def test_a_new_run_has_no_schedule_before(config):
  _, spec = _runs(config, 'cosine', '4 steps', '8 steps')
  assert schedule_change.rates({}, spec, 0) == ()


def _runs(config, schedule, old, new, **keys):
  """The flat config of a run, and what it is with another duration."""
  saved = json.loads(config_lib.to_json(_config(config, schedule, old, **keys)))
  now = _config(config, schedule, new, **keys)
  return saved, run_spec.RunSpec(now, None, None, _BATCH, _EXAMPLES)
