"""The coordinator of an elastic run: who goes on, and when all restart."""

import asyncio
import contextlib
import json
import os
import queue
import socket
import threading
import types

import pytest

from anp_jax.cluster import (
  client as client_lib,
  coordinator,
  generation,
  members,
  process_info,
  regrouping,
  termination,
)
from tests import coordinating, launching

pytestmark = pytest.mark.usefixtures('short_waits')

_SPARE = 'this process is a spare: it waits until another one is lost\n'
_ADDRESSES = {rank: ('127.0.0.1', 1000 + rank) for rank in range(5)}


class _Run(coordinating.Run):
  """A run whose clients note the generation in which they would restart."""

  def __init__(self, count, **values):
    self.restarts = queue.Queue()
    super().__init__(count, **values)

  def _join(self, index, values):
    values = {'elastic': True, 'address': _ADDRESSES[index], **values}
    super()._join(index, values, restart=lambda g: self.restarts.put((index, g)))

  def next_generations(self, count):
    return dict(self.restarts.get(timeout=coordinating.SOON) for _ in range(count))


def _started(count, **values):
  run = _Run(count, **values).join(*range(count)).started()
  assert not run.errors
  return run


def test_a_lost_process_is_named_and_left_out():
  run = _started(3)
  run.clients[0].set_sizes([1, 2])
  run.clients[1]._connection.close()
  restarts = run.next_generations(3)
  assert restarts.pop(1).lost.keys() == {0}  # which it alone has lost
  for rank, new in restarts.items():
    assert (new.number, new.rank, new.coordinator) == (1, rank, 0)
    assert new.addresses == {rank: _ADDRESSES[rank] for rank in range(3)}  # its port tells
    assert new.lost == {1: 'rank 1 on node1 has gone: its process was ended, or its host'}
    assert new.sizes == (1, 2)
  assert not run.ended


def _end_coordinator(run):
  for member in run.coordinator._members.values():
    member.left = True  # nobody is told by a coordinator that is dead
  run.close_connections()


@pytest.fixture
def compiling():
  """A client of a run that goes on from step 12 without rank 3, and what ends its generation."""
  before = generation.Interruption(5.0, 12, {rank: f'rank {rank} on a' for rank in range(4)})
  new = _generation(0, 1, 2)._replace(lost={3: 'rank 3 is late'}, interruption=before)
  run = _members(0, (0, 1, 2), new)
  run.begin(99, least=1)
  settings = types.SimpleNamespace(heartbeat_timeout=coordinating.SOON)
  ours, zero = socket.socketpair()
  restarts = queue.Queue()
  with ours, zero:

    def say(message):
      zero.sendall(json.dumps(message).encode() + b'\n')

    def next_generation(is_told):
      if is_told:
        say({'regroup': run.next_generation({1: 'rank 1 is gone'})})
      else:
        zero.shutdown(socket.SHUT_RDWR)
      return restarts.get(timeout=coordinating.SOON)

    say({'go': run.start_of(run[2])})
    old = new._replace(lost={})  # it was not told
    client = client_lib.CoordinatorClient(
      ours, {'elastic': True}, settings, old, restart=restarts.put
    )
    yield client, next_generation


@pytest.mark.parametrize('is_told', [True, False])
def test_a_loss_before_the_next_step_adds_to_the_one_before(compiling, is_told):
  """Also where the coordinator is lost, which cannot tell."""
  started, next_generation = compiling
  new = next_generation(is_told)
  gone = 'rank 0 on node0 has gone: its process was ended, or its host'
  lost = {1: 'rank 1 is gone'} if is_told else {0: gone}
  assert new.lost == {3: 'rank 3 is late', **lost} and new.number == 2
  assert new.interruption == started.generation.interruption
  assert new.interruption[:2] == (5.0, 12)


def test_a_loss_after_a_step_is_another_one(compiling):
  started, next_generation = compiling
  started.attach(lambda order: None, lambda: 14)
  new = next_generation(is_told=True)
  assert new.lost == {1: 'rank 1 is gone'} and new.interruption.at > 5.0
  names = {rank: f'rank {rank} on node{rank}' for rank in range(3)}
  assert (new.interruption.step, new.interruption.names) == (14, names)


def test_one_that_is_lost_with_another_is_named_too():
  """Nobody was told, as all were restarting; it is not where it comes to the next restart."""
  names = {rank: f'rank {rank} on a' for rank in range(4)}
  before = generation.Interruption(step=12, names=names)
  new = _generation(0, 1, 2)._replace(lost={3: 'rank 3 is late'}, interruption=before)
  run = _members(0, (0, 2), new)
  run.begin(99, least=1)
  lost = run.start_of(run[2])['lost']
  assert list(lost) == [3, 1] and lost[1].startswith('rank 1 on a did not come to the restart: ')
  again = _members(0, (0, 1, 2), new._replace(lost=lost))
  again.begin(99, least=1)
  assert again.start_of(again[2])['lost'] == {3: 'rank 3 is late'}
  assert again.losses() == ['rank 3 is late, at step 12']


def test_a_silent_process_may_still_live():
  run = _Run(3, heartbeat=9.5 * coordinator.HEARTBEAT_PERIOD, clock=coordinating.Clock())
  run.join(0, 2)
  with run.raw_rank(1, {'elastic': True, 'address': _ADDRESSES[1]}):
    run.started()
    run.beats(8, silent=[1])
    run.clock.run(4 * coordinator.HEARTBEAT_PERIOD)
    for new in run.next_generations(2).values():
      assert new.addresses.keys() == {0, 1, 2} and new.lost.keys() == {1}


def test_without_the_coordinator_the_others_look_for_another():
  run = _started(3)
  _end_coordinator(run)
  for rank, new in run.next_generations(3).items():
    if rank:
      assert new.coordinator == -1 and new.lost.keys() == {0}


@pytest.mark.parametrize(
  'signalled, least, stops', [((0, 1, 2), 1, True), ((1,), 2, False), ((1,), 3, True)]
)
def test_signals_to_all_stop_the_run_and_one_to_one_only_pauses_it(
  monkeypatch, signalled, least, stops
):
  """Unless fewer than config.cluster.min_processes would be left."""
  monkeypatch.setattr(regrouping, 'TOLD_WITHIN', 0.1)
  run, orders = _started(3), queue.Queue()
  run.coordinator._members._least = least
  for rank, client in run.clients.items():
    client.attach(lambda order, rank=rank: orders.put((rank, order)), lambda: 17)
  for rank in signalled:
    run.clients[rank].tell()
  received = {orders.get(timeout=coordinating.SOON) for _ in range(3)}
  assert received == {(rank, 'stop' if stops else 'pause') for rank in range(3)}
  if stops:
    return
  for client in run.clients.values():
    threading.Thread(target=client.wait_for_restart, daemon=True).start()
  restarts = run.next_generations(2)
  assert restarts.keys() == {0, 2}
  assert restarts[0].lost == {1: 'rank 1 on node1 was told to leave'}
  assert restarts[0].interruption.step == 17 and restarts[0].addresses.keys() == {0, 2}
  assert run.wait_for_end(1) == [(0, 'the other processes go on with the run', False)]


@pytest.mark.parametrize('newcomers, survivors', [((2,), (1, 0)), ((2, 3), (0,))])
def test_newcomers_with_another_config_are_sent_away_even_if_they_are_first(newcomers, survivors):
  """However many they are."""
  run = _Run(3, generation=_generation(*survivors))
  for rank in (*newcomers, *survivors):
    run.join(rank, config={'seed': str(rank > 1)})
    coordinating.wait(lambda rank=rank: {rank} & {*run.coordinator._members, *run.errors})
  run.started()
  assert run.clients.keys() == {*survivors}
  assert run.clients[0].start.ranks == sorted(survivors)
  assert all('config.seed' in str(run.errors[rank]) for rank in newcomers)


def test_the_coordinators_process_is_the_last_to_hear_that_it_ends():
  sent = []
  run = _members(0, (0, 1, 2), _generation(0, 1, 2))
  regroup = regrouping.Regrouping(
    run, lambda rank, message: sent.append((rank, *message)), None, ''
  )
  regroup._told = {0}
  for rank in run.ranks:
    regroup.note_ready(rank)
  assert sent == [(1, 'regroup'), (2, 'regroup'), (0, 'end')]


@pytest.mark.parametrize(
  'has_state, ends_alone', [((1, 0), True), ((1, 1), False), ((0, 0), False)]
)
def test_a_newcomer_that_fails_ends_alone(has_state, ends_alone):
  """If others have a copy of the state."""
  run = _Run(3).join(0, 1, has_state=has_state[0]).join(2, has_state=has_state[1]).started()
  run.coordinator._members._generation = _generation(0, 1)
  run.clients[2].fail(termination.BAD_INPUT, 'it has 1 devices')
  text = 'rank 2 on node2: it has 1 devices'
  if not ends_alone:
    assert {end[:2] for end in run.wait_for_end(0, 1)} == {(termination.BAD_INPUT, text)}
    return
  assert [new.lost for new in run.next_generations(2).values()] == [{2: text}] * 2
  assert not run.ended.keys() & {0, 1}


def test_a_newcomer_pauses_a_run_that_it_makes_larger(capsys):
  run, orders = _started(2), queue.Queue()
  run.clients[0].attach(orders.put, int)
  run.clients[0].set_sizes([1, 2])
  run.join(4, count=9)
  coordinating.wait(lambda: 4 in run.coordinator._members)
  assert orders.empty()  # three processes do not divide the batch
  coordinating.wait(lambda: capsys.readouterr().out == _SPARE)
  run.clients[0].set_sizes([1, 2, 3])
  assert orders.get(timeout=coordinating.SOON) == 'pause'
  run.join(3, count=9)
  coordinating.wait(lambda: 3 in run.coordinator._members)
  _end_coordinator(run)
  run.next_generations(4)
  assert capsys.readouterr().out == ''  # the last one is no spare


@pytest.mark.parametrize('comes_before', [True, False])
def test_a_spare_knows_over_how_many_processes_the_batch_divides(comes_before):
  # It may coordinate the next generation, or train in it.
  run = _started(2)
  steps = [lambda: run.join(4, count=9), lambda: run.clients[0].set_sizes([1, 2, 4])]
  conditions = [lambda: 4 in run.coordinator._members, lambda: run.coordinator._members.sizes]
  for step, condition in [*zip(steps, conditions)][:: 1 if comes_before else -1]:
    step()
    coordinating.wait(condition)
  _end_coordinator(run)
  assert run.next_generations(3)[4].sizes == (1, 2, 4)


def _generation(*ranks, lost=(), sizes=()):
  addresses = {rank: _ADDRESSES[rank] for rank in ranks}
  return generation.Generation(1, addresses=addresses, lost=dict.fromkeys(lost, ''), sizes=sizes)


def _members(first, here, new, **states):
  result = members.Members(4, 'job', first, new)
  for rank in here:
    info = coordinating.info(
      rank, 4, {'elastic': True, 'has_state': True, **states.get(f'r{rank}', {})}
    )
    result.take_in(members.Member(info, writer=None, last_heard=0.0))
  return result


def test_a_coordinator_that_missed_its_own_words_waits_for_itself():
  """Else it begins without any process, and ends."""
  run = members.Members(4, 'job', 2, _generation(2, lost=(2,)))
  assert not run.are_complete()
  run = _members(2, (0, 1, 2), _generation(0, 1, 2)._replace(lost={2: 'rank 2 is silent'}))
  run.begin(99, least=1)
  assert run.start_of(run[2])['lost'] == {} and run.losses() == []


@pytest.mark.parametrize(
  'here, sizes, ranks',
  [
    ((1, 2, 3), (1, 2, 3, 4), [1, 2, 3]),
    ((1, 2, 3), (1, 2, 4), [1, 2]),
    ((1, 2, 3), (), [1, 2, 3]),
    ((1,), (1, 2), [1]),
  ],
)
def test_the_largest_number_that_divides_the_batch_goes_on(here, sizes, ranks):
  run = _members(1, here, _generation(*here, sizes=sizes))
  run.begin(99, least=1)
  assert run.ranks == ranks
  assert run.spares() == [rank for rank in here if rank not in ranks]
  assert run.start_of(run[1])['hosts'] == [f'node{rank}' for rank in ranks]


def test_those_that_have_the_state_come_first():
  new = _generation(0, 1, 2, 3, sizes=(1, 3))
  run = _members(1, (0, 1, 2, 3), new, r0={'has_state': False})
  run.begin(99, least=1)
  assert run.ranks == [1, 2, 3]


@pytest.mark.parametrize(
  'here, everyone, goes_on',
  [
    ((1, 2), (0, 1, 2), True),
    ((0,), (0, 1, 2), False),
    ((0, 1), (0, 1, 2, 3), True),  # the half with the lowest rank
    ((2, 3), (0, 1, 2, 3), False),
  ],
)
def test_of_two_halves_that_lost_each_other_one_goes_on(here, everyone, goes_on):
  run = _members(here[0], here, _generation(*everyone, lost=set(everyone) - set(here)))
  if goes_on:
    run.begin(99, least=1)
  else:
    with pytest.raises(termination.PeerLostError, match='may go on without'):
      run.begin(99, least=1)


def test_a_dead_process_is_noticed_while_many_do_not_answer(monkeypatch):
  monkeypatch.setattr(regrouping.handshake, 'WITHIN', 60.0)
  with contextlib.ExitStack() as stack:
    ports = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(40)]
    addresses = {rank: port.getsockname() for rank, port in enumerate(ports, 1)}
    addresses[41] = '127.0.0.1', launching.free_port()
    run = members.Members(42, 'job', 0, generation.Generation(1, addresses=addresses))
    regroup = regrouping.Regrouping(run, None, None, coordinating.SECRET)
    looking = threading.Thread(target=lambda: asyncio.run(regroup.look_around(lambda: None)))
    looking.start()
    coordinating.wait(lambda: 41 not in run.addresses)
    regroup.has_begun = True
  looking.join(coordinating.SOON)
  assert not looking.is_alive() and run.addresses.keys() == {*range(1, 41)}


def test_too_few_processes_do_not_go_on():
  run = _members(0, (0,), _generation(0, sizes=(1, 2, 4)))
  with pytest.raises(termination.PeerLostError, match='config.cluster.min_processes=2'):
    run.begin(99, least=2)


def test_a_generation_is_the_same_after_its_restart(monkeypatch):
  calls = []
  monkeypatch.setattr(generation.os, 'execve', lambda *call: calls.append(call))
  monkeypatch.setattr(generation, '_descriptors', {})
  interruption = generation.Interruption(5.5, 17, {1: 'rank 1 on a', 2: 'rank 2 on b'})
  old = generation.Generation(3, 1, _ADDRESSES, {2: 'why'}, 0, (1, 2), interruption=interruption)
  # A copy of the state that this program inherited and has not read yet.
  copy = os.memfd_create('copy')
  old = old._replace(descriptors={'copy': copy})
  generation.restart(old)
  assert os.get_inheritable(copy)
  os.close(copy)
  ((program, arguments, environment),) = calls
  assert arguments[0] == program
  new = generation.current(environment)
  assert new == old
  assert generation.current({}) == generation.FIRST


def test_all_that_are_told_while_they_pause_stop_after_the_restart():
  run = _started(2)
  for rank in (0, 1):
    run.coordinator._regrouping._told.add(rank)
  for client in run.clients.values():
    threading.Thread(target=client.wait_for_restart, daemon=True).start()
  for new in run.next_generations(2).values():
    assert new.stops and not new.lost
  assert not run.ended


@pytest.mark.parametrize(
  'devices, gpus, want',
  [
    ([[0], [2], [3]], 4, [[0], [2], [3]]),
    ([[0], None, [3]], 4, [[0], [1], [3]]),
    ([None, None], 0, [None, None]),
  ],
)
def test_a_process_that_goes_on_keeps_its_gpus(devices, gpus, want):
  """What was lost may be the GPU of another one."""
  infos = [
    {'host': 'a', 'devices': value, 'gpus': [f'g{i}' for i in range(gpus)]} for value in devices
  ]
  process_info.assign_free_gpus(infos)
  assert [info['devices'] for info in infos] == want
