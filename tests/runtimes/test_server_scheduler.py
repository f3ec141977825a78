"""The desk of the server strategy: tickets, staleness and order, by itself."""

import random

import pytest

from anp_jax import config as config_lib
from anp_jax.runtimes.server import scheduler as desk_lib


class _Clock:
  now = 0.0

  def __call__(self):
    return self.now


def _desk(mode='async', total=6, workers=1, version=0, used=(), **keys):
  config = config_lib.base()
  config.strategy.mode = mode
  config.strategy.ticket_timeout = 10.0
  config.strategy.update(keys)
  clock = _Clock()
  desk = desk_lib.Desk(config, total, version, set(used), workers, clock)
  return desk, clock


def _part(version, weight=4.0):
  return {'reads': [version], 'weight': weight}


def _compute(desk, worker, ticket):
  version = desk.begin(worker, ticket)
  return desk.commit(worker, ticket, _part(version))


def test_one_worker_gets_each_step_once_and_in_order():
  desk, _ = _desk()
  steps = []
  while (ticket := desk.take('a')) != desk_lib.OVER:
    steps.append(ticket)
    assert desk.begin('a', ticket) == len(steps) - 1
    assert len(desk.commit('a', ticket, _part(len(steps) - 1))) == 1
  assert steps == [(s, 0) for s in range(6)]
  assert desk.version == 6


def test_goes_on_with_the_steps_that_were_not_used():
  desk, _ = _desk(version=3, used={0, 1, 4})
  taken = []
  while (ticket := desk.take('a')) != desk_lib.OVER:
    taken.append(ticket[0])
    _compute(desk, 'a', ticket)
  assert taken == [2, 3, 5]


def test_silent_workers_ticket_goes_to_another_and_counts_once():
  desk, clock = _desk()
  lost = desk.take('dead')
  assert desk.begin('dead', lost) == 0
  clock.now = 10.5
  desk.look()
  assert desk.take('b') == lost
  assert len(_compute(desk, 'b', lost)) == 1
  # It was only slow: what it computed is not counted again.
  assert desk.commit('dead', lost, _part(0)) == desk_lib.DROP
  assert desk.version == 1


def test_slow_worker_that_is_still_first_counts():
  desk, clock = _desk()
  ticket = desk.take('slow')
  desk.begin('slow', ticket)
  clock.now = 11
  desk.look()
  assert len(desk.commit('slow', ticket, _part(0))) == 1
  assert desk.take('b') == (1, 0)


@pytest.mark.parametrize('updates, counts', [(2, True), (3, False)])
def test_given_up_worker_is_dropped_beyond_the_bound(updates, counts):
  """Nobody waits for its reading, though its ticket is still free."""
  desk, clock = _desk('bounded', max_staleness=2)
  late = desk.take('late')
  tickets = [desk.take('quick') for _ in range(updates)]
  assert desk.begin('late', late) == 0
  clock.now = 9
  assert desk.begin('quick', tickets[0]) == 0
  clock.now = 10.5
  desk.look()  # only `late` has been silent for more than ten seconds
  for ticket in tickets:
    assert len(_compute(desk, 'quick', ticket)) == 1
  answer = desk.commit('late', late, _part(0))
  if counts:
    assert len(answer) == 1 and desk.version == updates + 1
    return
  assert answer == desk_lib.DROP and desk.version == updates
  # Another computes it, of the weights of now.
  assert desk.take('quick') == late
  assert desk.begin('quick', late) == updates


def test_last_tickets_are_given_twice():
  desk, _ = _desk(total=2)
  first, second = desk.take('slow'), desk.take('b')
  _compute(desk, 'b', second)
  assert desk.take('b') == first
  assert desk.take('c') == desk_lib.WAIT  # twice is enough
  _compute(desk, 'b', first)
  assert desk.begin('slow', first) == desk_lib.DROP
  assert desk.take('slow') == desk_lib.OVER


def test_stop_ends_at_the_present_version():
  desk, _ = _desk()
  _compute(desk, 'a', desk.take('a'))
  ticket = desk.take('a')
  version = desk.begin('a', ticket)
  desk.stop()
  assert desk.commit('a', ticket, _part(version)) == desk_lib.DROP
  assert desk.take('a') == desk_lib.OVER
  assert desk.limit == desk.version == 1


def test_quick_worker_waits_for_the_bound_of_a_slow_one():
  desk, _ = _desk('bounded', max_staleness=2, total=20)
  slow = desk.take('slow')
  assert desk.begin('slow', slow) == 0
  for version in range(2):
    assert len(_compute(desk, 'quick', desk.take('quick'))) == 1
    assert desk.version == version + 1
  ticket = desk.take('quick')
  read = desk.begin('quick', ticket)
  # A third would leave the slow one, which read version 0, three behind.
  assert desk.commit('quick', ticket, _part(read)) == desk_lib.WAIT
  assert len(desk.commit('slow', slow, _part(0))) == 1
  assert len(desk.commit('quick', ticket, _part(read))) == 1


@pytest.mark.parametrize('bound', [0, 1, 2, 3, 5])
def test_bound_holds_and_nobody_waits_for_ever(bound):
  """Random workers of random speed, some of which die."""
  rng = random.Random(bound)
  desk, clock = _desk('bounded', max_staleness=bound, total=200)
  hands, used = {}, []
  worker, names, asked = 0, list(range(5)), 0
  while desk.version < 200:
    asked += 1
    assert asked < 20000, 'nothing moves'
    clock.now += 0.1
    desk.look()
    worker = rng.choice(names)
    ticket, read = hands.get(worker, (None, None))
    if rng.random() < 0.01:
      names.remove(worker)
      names.append(max(names) + 1)
    elif ticket is None:
      found = desk.take(worker)
      if isinstance(found, tuple):
        hands[worker] = found, None
    elif read is None:
      found = desk.begin(worker, ticket)
      if found == desk_lib.DROP:
        del hands[worker]
      elif found != desk_lib.WAIT:
        hands[worker] = ticket, found
    else:
      found = desk.commit(worker, ticket, _part(read))
      if found != desk_lib.WAIT:
        del hands[worker]
      if isinstance(found, list):
        used.append(ticket)
        assert desk.version - 1 - read <= bound
  assert sorted(used) == [(s, 0) for s in range(200)]


def test_synchronous_update_is_made_of_one_part_a_worker():
  desk, _ = _desk('synchronous', workers=3, total=2)
  taken = {w: desk.take(w) for w in 'abc'}
  assert sorted(taken.values()) == [(0, 0), (0, 1), (0, 2)]
  assert desk.take('a') == desk_lib.WAIT  # one in hand at a time
  assert _compute(desk, 'c', taken['c']) == []
  assert _compute(desk, 'a', taken['a']) == []
  assert desk.take('a') == desk_lib.WAIT  # the next step has not begun
  parts = desk.commit('b', taken['b'], _part(desk.begin('b', taken['b']), 7.0))
  assert [p['weight'] for p in parts] == [4.0, 7.0, 4.0]  # by shard
  assert desk.take('b') == (1, 0)


def test_backup_worker_stands_in_for_the_slowest():
  desk, _ = _desk('synchronous', workers=3, total=3, backup_workers=1)
  assert desk.shards == 2
  slow, quick, backup = desk.take('slow'), desk.take('quick'), desk.take('back')
  assert (slow, quick, backup) == ((0, 0), (0, 1), (0, 0))
  desk.begin('slow', slow)
  assert _compute(desk, 'quick', quick) == []
  assert len(_compute(desk, 'back', backup)) == 2
  assert desk.version == 1
  # The others go on, and what the slow one brings is dropped.
  assert [desk.take('quick'), desk.take('back')] == [(1, 0), (1, 1)]
  assert desk.commit('slow', slow, _part(0)) == desk_lib.DROP


def test_as_many_backup_workers_as_workers_are_refused():
  with pytest.raises(config_lib.ConfigError, match='backup_workers=2'):
    _desk('synchronous', workers=2, backup_workers=2)


@pytest.mark.parametrize(
  'keys, workers, want',
  [
    ({}, 1, 0.0),
    ({}, 4, 3.0),
    ({'lanes': 2}, 3, 5.0),
    ({'weight_prediction': 0.5}, 3, 1.0),
    ({'weight_prediction': 0.0}, 3, 0.0),
    ({'mode': 'bounded', 'max_staleness': 2}, 4, 2.0),
    ({'mode': 'synchronous'}, 4, 0.0),
  ],
)
def test_weights_are_ahead_by_the_gradients_of_the_others(keys, workers, want):
  config = config_lib.base()
  config.strategy.weight_prediction = 1.0
  config.strategy.update(keys)
  assert desk_lib.ahead(config, workers) == want
