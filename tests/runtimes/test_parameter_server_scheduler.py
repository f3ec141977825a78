"""The ticket scheduler alone: tickets, staleness and order."""

import random

import pytest

from anp_jax.runtimes.parameter_server import scheduler as scheduler_lib
from tests import builders


def _scheduler(mode='async', total=6, workers=1, version=0, used=(), **keys):
  config = builders.config(
    {
      'strategy.name': 'parameter_server',
      'strategy.mode': mode,
      **{f'strategy.{key}': value for key, value in keys.items()},
    }
  )
  used = {(step, 0) for step in used}
  return scheduler_lib.TicketScheduler(config, total, version, used, workers)


def _contribution(version, weight=4.0):
  return {'reads': [version], 'weight': weight}


def _compute(scheduler, worker, ticket):
  version = scheduler.begin_read(worker, ticket)
  return scheduler.commit(worker, ticket, _contribution(version))


@pytest.mark.parametrize(
  'total, version, used, steps',
  [
    (6, 0, (), [0, 1, 2, 3, 4, 5]),
    (6, 3, (0, 1, 4), [2, 3, 5]),  # goes on with those that were not used
    (6, 9, range(9), []),  # has had more updates than a shorter run
  ],
)
def test_one_worker_gets_each_step_once_and_in_order(total, version, used, steps):
  scheduler = _scheduler(total=total, version=version, used=used)
  tickets = []
  while (ticket := scheduler.take('a')) is not None:
    read = version + len(tickets)
    assert scheduler.begin_read('a', ticket) == read
    assert len(scheduler.commit('a', ticket, _contribution(read))) == 1
    tickets.append(ticket)
  assert tickets == [(s, 0) for s in steps]
  assert scheduler.version == max(total, version)


def test_lost_workers_ticket_goes_to_another_and_counts_once():
  scheduler = _scheduler()
  lost = scheduler.take('dead')
  assert scheduler.begin_read('dead', lost) == 0
  scheduler.release('dead')
  assert scheduler.take('b') == lost
  assert len(_compute(scheduler, 'b', lost)) == 1
  # It was only slow: what it computed is not counted again.
  assert scheduler.commit('dead', lost, _contribution(0)) is None
  assert scheduler.version == 1


@pytest.mark.parametrize(
  'mode, updates, is_given_up', [('async', 3, True), ('rennala', 1, True), ('rennala', 1, False)]
)
def test_a_late_worker_is_dropped_where_its_version_is_old(mode, updates, is_given_up):
  """Otherwise it counts, since its ticket is still free."""
  scheduler = _scheduler(mode)
  late = scheduler.take('late')
  tickets = [scheduler.take('quick') for _ in range(updates)]
  assert scheduler.begin_read('late', late) == 0
  assert scheduler.begin_read('quick', tickets[0]) == 0
  assert scheduler.accepts(late, 0)
  if is_given_up:
    scheduler.release('late')
  for ticket in tickets:
    assert len(_compute(scheduler, 'quick', ticket)) == 1
  if mode == 'async':
    assert len(scheduler.commit('late', late, _contribution(0))) == 1
    assert scheduler.version == updates + 1
    return
  assert not scheduler.accepts(late, 0) and scheduler.reads() == set()
  # Another computes it, of the weights of now.
  assert scheduler.take('quick') == late
  assert scheduler.commit('late', late, _contribution(0)) is None
  assert scheduler.version == updates == scheduler.begin_read('quick', late)
  assert len(scheduler.commit('quick', late, _contribution(updates))) == 1


def test_last_tickets_are_given_twice():
  scheduler = _scheduler(total=2)
  first, second = scheduler.take('slow'), scheduler.take('b')
  _compute(scheduler, 'b', second)
  assert scheduler.take('b') == first
  assert scheduler.take('c') is None  # twice is enough
  _compute(scheduler, 'b', first)
  assert scheduler.begin_read('slow', first) is None
  assert scheduler.take('slow') is None


def test_a_contributor_repeats_what_its_last_update_lacks():
  scheduler = _scheduler('rennala', parts=2, total=1)
  assert [scheduler.take('slow'), scheduler.take('quick')] == [(0, 0), (0, 1)]
  assert _compute(scheduler, 'quick', (0, 1)) == []
  assert scheduler.take('quick') == (0, 0)
  assert len(_compute(scheduler, 'quick', (0, 0))) == 2 and scheduler.version == 1


def test_stop_ends_at_the_present_version():
  scheduler = _scheduler()
  _compute(scheduler, 'a', scheduler.take('a'))
  ticket = scheduler.take('a')
  version = scheduler.begin_read('a', ticket)
  scheduler.stop()
  assert scheduler.commit('a', ticket, _contribution(version)) is None
  assert scheduler.take('a') is None
  assert scheduler.limit == scheduler.version == 1


@pytest.mark.parametrize(
  'mode, parts, keys',
  [
    ('rennala', 1, {'parts': 1}),
    ('rennala', 5, {}),  # as many as workers
    ('rennala', 3, {'parts': 3}),
    ('synchronous', 5, {}),
    ('synchronous', 3, {'backup_workers': 2}),
  ],
)
def test_no_gradient_is_stale_and_nobody_waits_for_ever(mode, parts, keys):
  """Five workers of random speed run, and some of them die."""
  rng = random.Random(parts)
  scheduler = _scheduler(mode, total=200, workers=5, **keys)
  hands, used = {}, []
  worker, names, calls = 0, list(range(5)), 0
  while scheduler.version < 200:
    calls += 1
    assert calls < 60000, 'nothing moves'
    worker = rng.choice(names)
    ticket, read = hands.get(worker, (None, None))
    if rng.random() < 0.01:
      names.remove(worker)
      names.append(max(names) + 1)
      scheduler.release(worker)
    elif ticket is None:
      answer = scheduler.take(worker)
      if isinstance(answer, tuple):
        hands[worker] = answer, None
    elif read is None:
      answer = scheduler.begin_read(worker, ticket)
      if answer is None:
        del hands[worker]
      else:
        hands[worker] = ticket, answer
    else:
      version = scheduler.version
      answer = scheduler.commit(worker, ticket, _contribution(read))
      del hands[worker]
      if isinstance(answer, list):
        used.append(ticket)
        assert read == version and len(answer) in (0, parts)
        assert scheduler.version == version + bool(answer)
  assert sorted(used) == [(s, i) for s in range(200) for i in range(parts)]


def test_synchronous_update_is_made_of_one_shard_a_worker():
  scheduler = _scheduler('synchronous', workers=3, total=2)
  tickets = {w: scheduler.take(w) for w in 'abc'}
  assert sorted(tickets.values()) == [(0, 0), (0, 1), (0, 2)]
  assert scheduler.take('a') is None  # one in hand at a time
  assert _compute(scheduler, 'c', tickets['c']) == []
  assert _compute(scheduler, 'a', tickets['a']) == []
  assert scheduler.take('a') is None  # the next step has not begun
  contributions = scheduler.commit(
    'b', tickets['b'], _contribution(scheduler.begin_read('b', tickets['b']), 7.0)
  )
  assert [p['weight'] for p in contributions] == [4.0, 7.0, 4.0]  # by shard
  assert scheduler.take('b') == (1, 0)


def test_a_synchronous_update_is_of_one_step_though_a_worker_comes_late():
  scheduler = _scheduler('synchronous', workers=2, total=2)
  _compute(scheduler, 'a', scheduler.take('a'))
  assert scheduler.take('a') == (0, 1)
  assert scheduler.take('late') is None
  assert len(_compute(scheduler, 'a', (0, 1))) == 2
  assert scheduler.take('late') == (1, 0)


def test_the_first_workers_make_the_update_where_one_is_a_backup():
  scheduler = _scheduler('synchronous', workers=3, total=3, backup_workers=1)
  assert scheduler.data_shards == 2
  tickets = {w: scheduler.take(w) for w in ('slow', 'quick', 'other')}
  assert tickets == {'slow': (0, 0), 'quick': (0, 1), 'other': (1, 0)}
  scheduler.begin_read('slow', (0, 0))
  assert _compute(scheduler, 'quick', (0, 1)) == []
  assert len(_compute(scheduler, 'other', (1, 0))) == 2
  # What the slow one brings is dropped, and its images are leased again.
  assert scheduler.commit('slow', (0, 0), _contribution(0)) is None
  assert [scheduler.take(w) for w in tickets] == [(0, 0), (1, 1), (2, 0)]


def test_a_second_gradient_of_a_worker_stands_in_for_lost_ones_alone():
  """Else it would compute into the next update, which would lack a worker."""
  scheduler = _scheduler('synchronous', workers=4, total=3, backup_workers=1)
  tickets = {w: scheduler.take(w) for w in 'abcd'}
  for worker in 'bd':
    assert _compute(scheduler, worker, tickets[worker]) == []
  assert scheduler.take('b') is None
  scheduler.release('a')
  assert scheduler.take('b') is None  # the third is under way
  scheduler.release('c')
  assert scheduler.take('b') == tickets['a'] and scheduler.take('d') is None
  assert len(_compute(scheduler, 'b', tickets['a'])) == 3


def test_as_many_backup_workers_as_workers_are_refused():
  keys = {'workers': 2, 'backup_workers': 2}
  builders.assert_refused(['backup_workers=2'], _scheduler, 'synchronous', **keys)
