"""Processes that a run can do without are lost, and come again."""

import queue

import pytest

from anp_jax.cluster import coordinator, termination
from tests import coordinating

pytestmark = pytest.mark.usefixtures('short_waits')


_ALL = list(range(1, 4))


def _started(count):
  """A run that needs rank 0 alone, and what rank 0 is told."""
  run = coordinating.Run(count).join(0, optional=_ALL)
  run.join(*range(1, count), optional=_ALL).started()
  assert not run.errors
  return run, _mail(run)


def _mail(run, rank=0):
  """What a rank is told from now on, and was before."""
  mail = queue.Queue()
  run.clients[rank].receive_mail(lambda *message: mail.put(message))
  return mail


def _next(mail):
  return mail.get(timeout=coordinating.SOON)


def test_mail_reaches_one_process():
  run, mail = _started(3)
  run.clients[2].send(0, {'address': 'a'})
  assert _next(mail) == (2, {'address': 'a'}, '')
  run.clients[0].send(1, ['b'])
  # Also what came before it was asked for.
  received = _mail(run, 1)
  assert _next(received) == (0, ['b'], '')
  assert mail.empty() and received.empty() and not run.ended


def test_one_that_goes_is_told_to_rank_0_and_may_come_again():
  run, mail = _started(2)
  run.clients[1]._connection.close()
  text = 'rank 1 on node1 has gone: its process was ended, or its host'
  assert _next(mail) == (1, None, text)
  # On another host.
  run.join(1, optional=_ALL, host='node7').started()
  assert not run.errors and 0 not in run.ended
  run.clients[1].send(0, 'here')
  assert _next(mail) == (1, 'here', '')
  leaving = [run.clients[i].close for i in range(2)]
  coordinating.at_once(leaving)


def test_one_that_comes_again_before_it_is_missed_replaces_itself():
  run, mail = _started(2)
  run.join(1, optional=_ALL).started()
  text = 'rank 1 on node1 has been started again'
  assert _next(mail) == (1, None, text) and not run.errors
  run.clients[1].send(0, 'here')
  assert _next(mail) == (1, 'here', '')


def test_one_that_is_silent_is_lost_alone():
  run = (
    coordinating.Run(3, heartbeat=50.5 * coordinator.HEARTBEAT_PERIOD, clock=coordinating.Clock())
    .join(0, optional=_ALL)
    .join(1, optional=_ALL)
  )
  with run.raw_rank(2, optional=_ALL):
    run.started()
    mail = _mail(run)
    run.beats(51, silent=[2])
    index, value, why = _next(mail)
    assert (index, value) == (2, None)
    assert why.startswith('rank 2 on node2 has been silent for 3 s')
    assert not run.ended


def test_an_error_of_one_ends_it_alone():
  run, mail = _started(2)
  run.clients[1].fail(termination.FAILED, 'no memory')
  assert run.wait_for_end(1) == [(termination.FAILED, 'no memory', False)]
  assert _next(mail) == (1, None, 'rank 1 on node1 has failed: no memory')
  assert 0 not in run.ended


def test_one_that_leaves_early_is_not_waited_for():
  run, mail = _started(3)
  run.clients[2].leave()
  assert _next(mail) == (2, None, 'rank 2 on node2 has left')
  coordinating.at_once([run.clients[i].close for i in range(2)])
  assert not run.ended


def test_the_others_end_with_rank_0():
  run, _ = _started(2)
  run.clients[0].fail(termination.FAILED, 'bad')
  run.assert_ends([1], termination.FAILED, 'rank 0 on node0: bad')


def test_a_run_begins_without_those_that_it_does_not_need():
  run = coordinating.Run(3, rendezvous=2, clock=coordinating.Clock()).join(0, 2, optional=[1])
  coordinating.wait(lambda: len(run.coordinator._members) == 2)
  run.clock.run(3)
  run.started()
  assert not run.errors and run.clients[2].start.hosts == ('node0', '', 'node2')
  run.join(1, optional=[1]).started()
  assert not run.errors
  coordinating.at_once([run.clients[i].close for i in range(3)])


def test_one_that_does_not_go_with_the_run_is_sent_away_alone():
  run, mail = _started(2)
  run.clients[1]._connection.close()
  assert _next(mail)[0] == 1
  run.join(1, optional=_ALL, versions={'jax': '2'}).started()
  assert str(run.errors.pop(1)).startswith('rank 1 on node1 has jax 2, but rank 0')
  assert not run.errors and 0 not in run.ended


@pytest.mark.parametrize('claimed', [[0, 1, 2], []])
def test_no_process_takes_the_place_of_one_that_rank_0_needs(claimed):
  """Whatever it says of itself."""
  run = coordinating.started(3)
  run.join(1, optional=claimed, host='node7').started()
  text = 'rank 1 on node7 found a run that has begun already'
  assert str(run.errors.pop(1)).startswith(text)
  first = run.clients[1]
  values = []
  coordinating.at_once([lambda c=c: values.append(c.gather(0)) for c in run.clients.values()])
  assert values == [[0, 0, 0]] * 3 and run.clients[1] is first
  assert not run.ended


def test_rank_0_alone_says_who_may_be_lost():
  run = coordinating.Run(3).join(0, optional=[1]).join(2, optional=[2])
  run.join(1, optional=[]).started()
  mail = _mail(run)
  run.clients[1]._connection.close()
  assert _next(mail)[0] == 1 and not {0, 2} & run.ended.keys()
  run.clients[2]._connection.close()
  run.assert_ends([0], 75, 'rank 2 on node2 has gone')
