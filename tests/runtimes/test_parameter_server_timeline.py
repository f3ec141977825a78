"""The order of simulated workers, against times worked out by hand."""

import collections
import math

import numpy as np
import pytest
from scipy import stats

from anp_jax import config as config_lib
from anp_jax.runtimes.parameter_server import log as log_lib, timeline


def _timeline(workers, total=24, records=(), batch_size=64, **keys):
  typed = {
    'batch_size': str(batch_size),
    'strategy.name': 'parameter_server',
    'strategy.simulate.workers': str(workers),
    'strategy.simulate.step_seconds': '1.0',
    **{f'strategy.{key}': str(value) for key, value in keys.items()},
  }
  config = config_lib.resolved(config_lib.base(), typed)
  return timeline.Timeline(config, records, total, len(records)).updates()


def _updates(*arguments, **keys):
  return [update.contributions for update in _timeline(*arguments, **keys)]


def _seconds(updates):
  return [u[0]['seconds'] for u in updates]


def _staleness(updates, version=0):
  return [order - c['reads'][0] for order, update in enumerate(updates, version) for c in update]


@pytest.mark.parametrize('workers', [1, 3, 8])
def test_equal_workers_come_in_turn(workers):
  updates = _updates(workers, **{'simulate.pull_seconds': 0.25, 'simulate.push_seconds': 0.5})
  # Sums of these times are exact in binary.
  assert _seconds(updates) == [1.75 * (n // workers + 1) for n in range(24)]
  # All begin with version 0; then each meets what all others have done.
  expected = [min(n, workers - 1) for n in range(24)]
  assert _staleness(updates) == expected
  tickets = [c['ticket'] for u in updates for c in u]
  assert sorted(tickets) == [[n, 0] for n in range(24)]


def test_a_slow_worker_makes_fewer_updates_of_older_weights():
  updates = _updates(2, **{'simulate.slow': ((1, 3.0),)})
  # In three seconds three by the quick worker and one by the slow one.
  assert _seconds(updates)[-1] == 18.0
  workers = collections.Counter(c['worker'] for u in updates for c in u)
  assert workers == {'worker 0': 18, 'worker 1': 6}
  slow = [
    order - c['reads'][0]
    for order, update in enumerate(updates)
    for c in update
    if c['worker'] == 'worker 1'
  ]
  # The slow one's commit at 3 s was scheduled before the quick one's third.
  assert slow == [2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize('workers, backup', [(1, 0), (4, 0), (9, 1)])
def test_a_pass_is_of_a_data_shards_images(workers, backup):
  keys = {'mode': 'synchronous', 'backup_workers': backup}
  updates = _updates(workers, 3, **{'simulate.image_seconds': 1 / 128}, **keys)
  assert all(len(u) == workers - backup for u in updates)
  # 64 images, divided among the workers that an update takes.
  seconds = 1 + 64 / (workers - backup) / 128
  assert _seconds(updates) == [seconds, 2 * seconds, 3 * seconds]


@pytest.mark.parametrize('in_flight', [1, 3])
def test_no_gradient_of_rennala_is_stale(in_flight):
  updates = _updates(
    6, 200, mode='rennala', parts=1, in_flight=in_flight, **{'simulate.spread': 0.5}
  )
  assert sorted(c['ticket'] for u in updates for c in u) == [[n, 0] for n in range(200)]
  assert set(_staleness(updates)) == {0}


def test_a_synchronous_update_waits_for_the_slowest():
  keys = {'mode': 'synchronous', 'simulate.slow': ((2, 3.0),)}
  updates = _updates(3, 4, **keys)
  assert _seconds(updates) == [3.0, 6.0, 9.0, 12.0]
  assert all(len(u) == 3 for u in updates)
  # With one worker more than data shards, nobody waits for the slow one. No images are left
  # for the last update but those of two passes: a quick worker makes both, unless one is its.
  updates = _updates(3, 5, backup_workers=1, **keys)
  assert _seconds(updates) == [1.0, 2.0, 3.0, 4.0, 6.0]
  assert all(len(u) == 2 for u in updates)
  assert set(_staleness(updates)) == {0}


@pytest.mark.parametrize('workers, backups', [(8, 0), (8, 1), (16, 4)])
def test_a_synchronous_update_takes_the_time_of_an_order_statistic(workers, backups):
  keys = {'mode': 'synchronous', 'backup_workers': backups, 'batch_size': 8 * 7 * 12}
  seconds = _seconds(_updates(workers, 1001, **keys, **{'simulate.spread': 0.2}))
  # The mean is the integral of the chance that more than the backups are still computing.
  variance = math.log1p(0.2**2)
  passes = stats.lognorm(math.sqrt(variance), scale=math.exp(-variance / 2))
  x = np.linspace(0, 5, 5001)
  mean = np.trapezoid(stats.binom.sf(backups, workers, passes.sf(x)), x)
  # A standard error is 0.5 % at most. No spare images are left for the last update.
  assert seconds[-2] / 1000 == pytest.approx(mean, rel=0.02)


def test_nobody_waits_for_an_outage_of_another():
  """An update a second of each worker, but for those away; a synchronous one waits."""
  keys = {'simulate.outage_chance': 0.02, 'simulate.outage_seconds': 50.0}
  seconds = _seconds(_updates(8, 4000, **keys))
  # A pass takes 1 + 0.02 x 50 = 2 s on average. Standard error of 500 passes of a
  # worker: sqrt(0.02 x 0.98 / 500) x 50 = 0.31 s, of all eight 0.11.
  assert abs(seconds[-1] / 500 - 2) < 0.45
  together = _seconds(_updates(8, 1000, mode='synchronous', **keys))
  # One of eight is away in 1 - 0.98^8 = 0.149 of the updates; standard error 0.0113.
  assert abs(together[-1] / 1000 - (1 + 0.149 * 50)) < 4 * 0.0113 * 50


@pytest.mark.parametrize('mode', ['async', 'rennala'])
def test_no_update_ends_an_outage(mode):
  keys = {'simulate.outage_chance': 0.3, 'simulate.outage_seconds': 1000.0}
  keys |= {'parts': 1} if mode == 'rennala' else {}
  seconds = _seconds(_updates(4, 400, mode=mode, **keys))
  # Of 400 passes or more 120 begin with an outage, less 4 standard errors of 9.2: 83.
  # Four of these may last on, and at most four workers are away at once.
  assert seconds[-1] > (83 - 4) * 1000 / 4


def test_two_gradients_in_flight_share_a_device():
  keys = {'simulate.pull_seconds': 1.0, 'simulate.push_seconds': 1.0}
  updates = _updates(1, 6, in_flight=2, **keys)
  # The second computes while the first is sent: a pass from 1 to 2 s, one from
  # 2 to 3 s, then from 4 to 5 s and so on.
  assert _seconds(updates) == [3.0, 4.0, 6.0, 7.0, 9.0, 10.0]


def _rennala(taus, parts, count):
  """Rennala SGD with stops: all workers begin again at each update.

  Yields:
    (seconds, workers of its gradients in the order of arrival) of each update.
  """
  now = 0.0
  for _ in range(count):
    ends = sorted(
      (now + sum([tau] * passes), f'worker {i}')
      for i, tau in enumerate(taus)
      for passes in range(1, parts + 1)
    )[:parts]
    now = ends[-1][0]
    yield now, [worker for _, worker in ends]


@pytest.mark.parametrize('parts', [1, 2, 7])
@pytest.mark.parametrize('seed', range(3))
def test_rennala_makes_the_updates_of_its_paper(seed, parts):
  rng = np.random.default_rng([seed, parts])
  taus = np.exp(rng.uniform(0, 3, size=6)).tolist()
  keys = {'mode': 'rennala', 'parts': parts, 'batch_size': 56}
  updates = _updates(6, 80, **keys, **{'simulate.slow': tuple(enumerate(taus))})
  tickets = sorted(tuple(c['ticket']) for u in updates for c in u)
  assert tickets == [(n, i) for n in range(80) for i in range(parts)]
  assert set(_staleness(updates)) == {0}
  # At the end no ticket is left for some of the workers.
  expected = [*_rennala(taus, parts, 80 - 6)]
  for order, (update, (seconds, workers)) in enumerate(zip(updates, expected)):
    assert sorted(c['worker'] for c in update) == sorted(workers), order
    # Sums of some hundred times, rounded in another order.
    assert update[0]['seconds'] == pytest.approx(seconds, rel=1e-12)


def test_a_stop_frees_the_device_for_the_other_gradient_in_flight():
  keys = {'mode': 'rennala', 'parts': 5, 'batch_size': 60, 'in_flight': 2}
  updates = _updates(2, 24, **keys, **{'simulate.slow': ((1, 3.5),)})
  # The quick worker ends a pass a second, the slow one one at 3.5 s: the update of their five
  # gradients at 4 s stops its second pass, so that its next ones begin at once.
  assert _seconds(updates)[:5] == [4.0, 8.0, 12.0, 16.0, 20.0]
  for update in updates[:5]:
    assert [c['worker'] for c in update].count('worker 1') == 1


def test_parts_of_an_update_that_were_left_are_used_when_it_goes_on():
  keys = {'mode': 'rennala', 'parts': 4}
  keys['simulate.slow'] = ((1, 3.5), (2, 100.0))
  first = _updates(3, 12, **keys)[:5]
  used = [c['ticket'] for u in first for c in u]
  assert set(collections.Counter(step for step, _ in used).values()) > {4}
  records = [{'order': n, 'parts': parts} for n, parts in enumerate(first)]
  later = _updates(3, 12, records, **keys)
  assert len(later) == 7 and _staleness(later, 5) == [0] * 28
  tickets = sorted(used + [c['ticket'] for u in later for c in u])
  assert tickets == [[n, i] for n in range(12) for i in range(4)]


def test_it_goes_on_with_the_time_and_the_steps_that_are_left():
  records = [
    {'order': n, 'parts': [{'ticket': [step, 0], 'seconds': 0.5 * n}]}
    for n, step in enumerate((4, 0, 1))
  ]
  updates = _updates(1, 6, records)
  assert [u[0]['ticket'][0] for u in updates] == [2, 3, 5]
  assert _staleness(updates, 3) == [0, 0, 0]
  assert _seconds(updates) == [2.0, 3.0, 4.0]


def test_draws_depend_on_the_seed_alone():
  first, again, other = (
    _seconds(_updates(4, **{'simulate.spread': 0.3}, **more))
    for more in ({}, {}, {'simulate.step_seconds': 2.0})
  )
  assert first == again
  # The same draws, times two.
  assert other == pytest.approx([2 * s for s in first], rel=1e-12)


@pytest.mark.parametrize('mode', ['async', 'rennala', 'synchronous'])
def test_an_update_names_the_versions_that_are_still_to_be_used(mode):
  keys = {'mode': mode, 'simulate.spread': 0.5, 'in_flight': 2}
  updates = [*_timeline(5, 60, **keys)]
  last = log_lib.last_reads([u.contributions for u in updates], 0)
  for version, update in enumerate(updates):
    versions = {read for read, last_use in last.items() if read <= version <= last_use}
    # The gradients under way at the end are not among those that count, nor are late ones.
    has_more = mode == 'rennala' or version > 50
    assert versions == update.reads or has_more and versions < update.reads


def test_an_update_is_ordered_once_it_is_asked_for():
  updates = _timeline(4, 10**12)
  assert [next(updates).contributions[0]['ticket'] for _ in range(3)] == [[0, 0], [1, 0], [2, 0]]
