"""Processes meet at a coordinator, hear of each other and end together."""

import json
import threading
import time

import pytest

from anp_jax import config as config_lib
from anp_jax.cluster import coordinator
from tests import coordinating

pytestmark = pytest.mark.usefixtures('short_waits')


@pytest.mark.parametrize('count', [1, 3, 128])
def test_all_start_gather_and_leave(count):
  run = coordinating.started(count)
  hosts = tuple(f'node{i}' for i in range(count))
  assert all(client.start.hosts == hosts for client in run.clients.values())
  assert len({client.start.port for client in run.clients.values()}) == 1
  values = {}

  def gather(index):
    client = run.clients[index]
    values[index] = [client.gather({'rank': index}), client.gather(index == 0)]
    client.close()

  coordinating.at_once([lambda i=i: gather(i) for i in range(count)])
  want = [[{'rank': i} for i in range(count)], [i == 0 for i in range(count)]]
  assert values == {i: want for i in range(count)}
  time.sleep(0.2)
  assert not run.ended


@pytest.mark.parametrize(
  'odd, text',
  [
    ({'versions': {'jax': '2'}}, 'rank 1 on node1 has jax 2, but rank 0 on node0 has 1'),
    ({'count': 4}, 'rank 1 on node1 expects 4 processes, rank 0 3'),
  ],
)
def test_one_that_does_not_go_with_the_others_stops_all(odd, text):
  run = coordinating.Run(3).join(0, 2)
  coordinating.wait(lambda: len(run.coordinator._members) == 2)
  run.join(1, **odd).started()
  assert run.errors.keys() == {0, 1, 2}
  for error in run.errors.values():
    assert isinstance(error, config_lib.ConfigError)
    assert str(error).startswith(text)


def test_one_of_another_job_is_sent_away_alone():
  run = coordinating.Run(2)
  run.join(1, token='jobs').started()
  text = 'rank 1 on node1 belongs to another job than rank 0'
  assert str(run.errors.pop(1)) == text
  run.join(0, 1).started()
  assert not run.errors


def test_a_missing_rank_is_named_while_waiting_and_after():
  run = coordinating.Run(3, rendezvous=9, clock=coordinating.Clock()).join(0, 2)
  coordinating.wait(lambda: len(run.coordinator._members) == 2)
  run.clock.run(3)
  line = 'waiting: rank 1 has not come yet (2 of 3 are here); 6 s left'
  coordinating.wait(lambda: line in run.lines)
  run.clock.run(7)
  run.started()
  for index in (0, 2):
    assert run.errors[index].status == 69
    text = 'rank 1 has not come within 9 s (2 of 3 are here)'
    assert str(run.errors[index]).startswith(text)
  # One that comes now hears the same.
  run.join(1).started()
  assert str(run.errors[1]) == str(run.errors[0])


def test_a_rank_that_goes_while_waiting_may_come_again():
  run = coordinating.Run(2)
  run.raw_rank(1).close()
  coordinating.wait(lambda: not run.coordinator._members)
  run.join(0, 1).started()
  assert not run.errors


def test_a_dead_rank_ends_the_others():
  run = coordinating.Run(3).join(0, 2)
  with run.raw_rank(1):
    run.started()
  end = (75, 'rank 1 on node1 has gone: its process was ended, or its host')
  assert set(run.wait_for_end(0, 2)) == {(*end, False)}


@pytest.mark.parametrize('steps, pause', [(0, 0), (2, 0), (2, 600)])
def test_a_rank_that_falls_silent_ends_the_others(steps, pause):
  """Also after a pause of process 0."""
  period = coordinator.HEARTBEAT_PERIOD
  run = coordinating.Run(3, heartbeat=50.5 * period, clock=coordinating.Clock()).join(0, 2)
  with run.raw_rank(1) as rank:
    run.started()
    for step in range(1, steps + 1):
      rank.sendall(json.dumps({'heartbeat': _at('step', step)}).encode() + b'\n')
    coordinating.wait(lambda: run.coordinator._members[1].state.get('step', 0) == steps)
    run.clock.move(pause or period)
    run.beats(47, silent=[1])
    assert not run.ended
    run.clock.run(4 * period)
    run.assert_ends([0, 2], 75, 'rank 1 on node1 has been silent for 3 s')


def test_no_rank_is_silent_that_only_waits_nor_in_a_pause_of_process_0():
  """While JAX is imported and started, which may take a minute."""
  run = coordinating.started(
    2, heartbeat=9.5 * coordinator.HEARTBEAT_PERIOD, clock=coordinating.Clock()
  )
  run.beats(20)
  run.clock.move(1000)  # until the next pulse
  run.beats(20)
  assert not run.ended


def test_a_pause_of_process_0_is_no_time_to_come_in():
  run = coordinating.Run(2, rendezvous=9, clock=coordinating.Clock()).join(0)
  coordinating.wait(lambda: run.coordinator._members)
  run.clock.run(2)
  run.clock.move(600)
  run.clock.run(6)
  run.join(1).started()
  assert not run.errors and run.clients.keys() == {0, 1}


def test_process_0_is_told_last(monkeypatch):
  """It ends as soon as it is told to, and the coordinator with it."""
  order, send = [], coordinator._send

  def noted(writer, message):
    if 'end' in message:
      order.append(writer.get_extra_info('peername')[1])
    send(writer, message)

  monkeypatch.setattr(coordinator, '_send', noted)
  run = coordinating.Run(3)
  with run.raw_rank(0) as zero, run.raw_rank(2) as two:
    coordinating.wait(lambda: len(run.coordinator._members) == 2)
    with run.raw_rank(1, count=4) as other:
      ports = [c.getsockname()[1] for c in (zero, two, other)]
      # The coordinator of a test before this one may send something, too.
      coordinating.wait(lambda: set(ports) <= set(order))
    assert [port for port in order if port in ports][-1] == ports[0]


def _at(phase, step):
  return {'phase': phase, 'step': step, 'seconds': 130.0}


def test_a_stall_names_who_is_late():
  run = coordinating.started(3, clock=coordinating.Clock())
  states = [_at('step', 9), _at('input', 9), _at('step', 9)]
  for index, state in enumerate(states):
    run.clients[index].heartbeat(state)
  coordinating.wait(lambda: [run.coordinator._members[i].state for i in range(3)] == states)
  run.clients[0].stalled()
  run.wait_for_delayed_call()
  run.clock.move(coordinator._REPORTS_WITHIN)
  ends = run.wait_for_end(0, 1, 2)
  assert len(set(ends)) == 1
  code, text, stacks = ends[0]
  assert code == 75 and stacks
  assert text == 'nothing has moved for 130 s: rank 1 on node1 is late (input 9)'


@pytest.mark.parametrize('rank, code', [(1, 2), (0, 1)])
def test_a_failure_ends_all_with_its_status(rank, code):
  run = coordinating.started(3)
  run.clients[rank].fail(code, 'ValueError: no')
  assert run.clients[rank]._ended.is_set()  # not for want of an answer
  text = f'rank {rank} on node{rank}: ValueError: no'
  assert set(run.wait_for_end(0, 1, 2)) == {(code, text, False)}


def test_an_error_that_follows_from_a_loss_does_not_hide_it():
  """A collective fails at once; the dead rank is seen a moment later."""
  run = coordinating.Run(3, clock=coordinating.Clock()).join(0, 2)
  with run.raw_rank(1):
    run.started().clients[2]._connection.send({'fail': [1, 'ValueError: Gloo failed']})
    run.wait_for_delayed_call()
  run.assert_ends([0, 2], 75, 'rank 1 on node1 has gone')


def test_a_broken_connection_is_explained_by_a_rank_that_falls_silent():
  """A save is cut off by a node whose network is gone, too."""
  period, clock = coordinator.HEARTBEAT_PERIOD, coordinating.Clock()
  run = coordinating.Run(3, heartbeat=8.5 * period, clock=clock).join(0, 2)
  with run.raw_rank(1):
    text = 'a checkpoint could not be written: Gloo AllGather failed'
    run.started().clients[2]._connection.send({'fail': [1, text]})
    coordinating.wait(lambda: len(clock._sleepers) == 2)
    run.beats(9, silent=[1])
    run.assert_ends([0, 2], 75, 'rank 1 on node1 has been silent for')


def test_a_broken_connection_ends_all_if_none_is_lost():
  period, clock = coordinator.HEARTBEAT_PERIOD, coordinating.Clock()
  heartbeat = 4.5 * period
  run = coordinating.Run(2, heartbeat=heartbeat, clock=clock)
  run.join(0, 1).started()
  run.clients[1]._connection.send({'fail': [1, 'Connection reset by peer']})
  coordinating.wait(lambda: len(clock._sleepers) == 2)
  within = heartbeat + coordinator._LOSS_SEEN_WITHIN
  run.beats(int(within / period))
  assert not run.ended
  clock.move(period)
  assert run.wait_for_end(0, 1)[0][0] == 1


@pytest.mark.parametrize(
  'rendezvous, leave', [(99, 0.9), (9, 0)], ids=['as long as a stall', 'without a limit of stalls']
)
def test_one_that_does_not_come_to_the_end_is_named(rendezvous, leave):
  run = coordinating.started(3, rendezvous=rendezvous, leave=leave, clock=coordinating.Clock())
  run.clients[1].heartbeat(_at('saving', 8))
  coordinating.wait(lambda: run.coordinator._members[1].state)
  for index in (0, 2):
    threading.Thread(target=run.clients[index].close, daemon=True).start()
  coordinating.wait(lambda: len(run.coordinator._gathered.get(coordinator.LEAVE, {})) == 2)
  run.clock.run(10)
  text = 'rank 1 on node1 has not come to the end within 9 s of the others'
  run.assert_ends([0, 1, 2], 75, text)
  assert all(line.endswith('(saving 8)') for _, line, _ in run.ended.values())
