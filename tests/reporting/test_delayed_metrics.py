"""delayed_metrics: one step late, all numbers once, refusals that say why."""

import types

import jax.numpy as jnp
import ml_collections
import pytest

from anp_jax import cluster
from anp_jax.cluster import preemption
from anp_jax.reporting import delayed_metrics
from anp_jax.training import eval_loop

_NAMES = ('loss', 'grad_norm', 'damaged', 'finite', 'vote')


def _values(loss, damaged=0, finite=1, vote=0):
  return jnp.array([loss, 0.5, damaged, finite, vote], jnp.float32)


def _damage(allowed=0.5):
  config = ml_collections.ConfigDict({'data': {'max_damaged': allowed}})
  return delayed_metrics.DamageCounter(config, 'photos', 1000)


class _Telemetry:
  """Keeps what it is told."""

  start_step = 0

  def __init__(self):
    self.records = []

  def train(self, step, metrics, waited):
    self.records.append((step, metrics, waited))


def _log(every=1, total=9, damage=None):
  telemetry, feed = _Telemetry(), types.SimpleNamespace(wait_seconds=5.0)
  log = delayed_metrics.TrainingLog(_NAMES, telemetry, damage or _damage(), every, total, feed)
  return log, telemetry, feed


def test_a_step_is_read_once_the_next_one_is_under_way():
  metrics = delayed_metrics.DelayedMetrics(_NAMES)
  assert metrics.flush() is None
  assert metrics.push(7, _values(2.0, 3)) is None
  first = metrics.push(8, _values(1.0, vote=2))
  assert (first.step, first.vote) == (7, 0)
  assert first.values == {'loss': 2.0, 'grad_norm': 0.5, 'damaged': 3.0}
  last = metrics.flush()
  assert (last.step, last.values['loss'], last.vote) == (8, 1.0, 2)
  assert metrics.flush() is None


def test_a_step_that_is_not_finite_is_refused_when_it_is_read():
  metrics = delayed_metrics.DelayedMetrics(_NAMES)
  metrics.push(7, _values(jnp.nan, finite=0))
  with pytest.raises(delayed_metrics.NotFiniteError) as error:
    metrics.push(8, _values(1.0))
  assert str(error.value) == (
    'step 7 is not finite: loss nan, gradient norm 0.5; nothing of it was saved'
  )
  assert isinstance(error.value, (cluster.RunFailedError, ArithmeticError))


def test_a_log_records_every_few_steps_and_the_last():
  log, telemetry, feed = _log(every=2, total=5)
  votes, read = [], [log.step]
  for step in range(1, 6):
    feed.wait_seconds += 1
    votes.append(log.push(step, _values(step, damaged=1, vote=3 * (step == 2))))
    read.append(log.step)
  assert read == [0, 0, 1, 2, 3, 4]
  assert [step for step, *_ in telemetry.records] == [2, 4]
  assert log.flush() == log.flush() == preemption.CONTINUE
  assert [step for step, *_ in telemetry.records] == [2, 4, 5] and log.step == 5
  # Damaged examples are counted over all steps, and every wait once.
  assert [r['damaged'] for _, r, _ in telemetry.records] == [2, 4, 5]
  assert sum(waited for *_, waited in telemetry.records) == 5
  assert votes == [preemption.CONTINUE] * 2 + [3] + [preemption.CONTINUE] * 2


def test_too_many_damaged_examples_end_the_run_at_any_step():
  damage = _damage(allowed=0.1)
  log, telemetry, _ = _log(every=100, damage=damage)
  log.push(1, _values(1.0, damaged=101))
  with pytest.raises(eval_loop.CorruptExampleError, match='of photos could not be read'):
    log.push(2, _values(1.0))
  assert (damage.damaged, damage.examples) == (101, 1000)
  assert telemetry.records == []
