"""A worker's batch queue and pauses, used by several threads, and the log."""

from concurrent import futures
import contextlib
import threading
import types
from unittest import mock

import numpy as np
import pytest

from anp_jax.runtimes.parameter_server import (
  gradient_worker as worker_lib,
  log as log_lib,
  parameter_server_run,
  threads,
)
from tests import launching, serving


def test_rows_are_those_of_the_ticket(config):
  """Whatever is asked for first; after the end any, which nobody uses."""
  tickets = iter([(3, 1), (4, 0), None])
  queue = worker_lib.BatchQueue(lambda: next(tickets), None)
  setup = serving.small_setup(config)
  half = setup.spec.batch_size // 2
  with contextlib.closing(setup.feed(queue.ticket, 2)) as feed:
    rows = [next(feed)['row'].tolist() for _ in range(3)]
  assert rows[:2] == [[*range(half, 2 * half)], [*range(half)]]
  assert len(rows[2]) == half


def test_a_leased_ticket_is_returned_while_the_next_is_waited_for():
  waiting, go_on = threading.Event(), threading.Event()
  tickets = [(0, 0)]

  def take():
    if tickets:
      return tickets.pop()
    waiting.set()
    assert go_on.wait(10)
    return None

  queue = worker_lib.BatchQueue(take, None)
  assert queue.ticket(0) == (0, 0)
  reader = threads.start(lambda: queue.ticket(1), 'reader')
  assert waiting.wait(10)
  assert threads.start(lambda: queue.ticket(0), 'other').result(10) == (0, 0)
  go_on.set()
  assert reader.result(10) is None


@pytest.mark.parametrize('change, expected', [('finish', (1, 0)), ('close', None)])
def test_a_ticket_beyond_the_limit_waits_until_one_is_finished(change, expected):
  steps = iter(range(9))
  queue = worker_lib.BatchQueue(lambda: (next(steps), 0), 1)
  assert queue.ticket(0) == (0, 0)
  reader = threads.start(lambda: queue.ticket(1), 'reader')
  assert not futures.wait([reader], 0.1).done
  getattr(queue, change)()
  assert reader.result(10) == expected


class _Versions:
  """A worker whose weights are the version of the servers."""

  def __init__(self, config):
    self.now, self.pulled = 0, []
    self.worker = worker_lib.Worker(serving.participant(config, ''), None)
    self.worker._program = lambda weights, stats, step, batch: weights

  def pull(self):
    self.pulled.append(self.now)
    return [self.now], self.now, None

  def compute(self, pull):
    """Starts a thread; returns its future."""
    return threads.start(lambda: self.worker.compute(pull, 3, 'batch'), 'gradient')


def test_weights_are_not_read_while_another_scores(config):
  run = _Versions(config)
  with run.worker.paused():
    gradient = run.compute(run.pull)
    assert not futures.wait([gradient], 0.1).done and not run.pulled
    run.now = 7  # the others have gone on
  assert gradient.result(10) == (([7], 7, None), 7) and run.pulled == [7]


def test_weights_read_before_another_scored_are_read_again(config):
  run = _Versions(config)
  reading, go_on = threading.Event(), threading.Event()

  def pull():
    weights = run.pull()
    reading.set()
    assert go_on.wait(10)
    return weights

  gradient = run.compute(pull)
  assert reading.wait(10)
  with run.worker.paused():  # does not wait for weights that are on their way
    go_on.set()
    assert not futures.wait([gradient], 0.1).done
    run.now = 7
  assert gradient.result(10) == (([7], 7, None), 7) and run.pulled == [0, 7]


class _Server:
  """Gives out tickets; a pull is answered when so many are under way."""

  def __init__(self, tickets, together):
    self._tickets, self._count = iter(range(tickets)), tickets
    self.over = threading.Event()
    self._barrier = threading.Barrier(together)
    self._lock = threading.Lock()
    self.now = self.most = self.pulls = 0

  def ask(self, name, **request):
    assert (name, request) == ('take', {'worker': 'a', 'session': 7})
    step = next(self._tickets, None)
    if step is None:
      self.over.wait(10)
      return {'wait': True}
    return {'ticket': (step, 0)}

  def get(self, name, **_):
    with self._lock:
      self.now += 1
      self.pulls += 1
      self.most = max(self.most, self.now)
    self._barrier.wait(10)
    with self._lock:
      self.now -= 1
      if self.pulls == self._count and not self.now:
        self.over.set()
    return {'drop': True}, b''


class _Feed:
  """Batches without data."""

  wait_seconds = 0.0

  def __next__(self):
    return 'batch'

  def close(self):
    pass


@pytest.mark.parametrize(
  'mode, in_flight, together', [('async', 1, 1), ('async', 3, 3), ('synchronous', 2, 1)]
)
def test_a_worker_has_as_many_gradients_in_flight(config, mode, in_flight, together):
  """Fewer would wait at the server's barrier until it breaks."""
  config = serving.config_of(config, **{'strategy.mode': mode, 'strategy.in_flight': in_flight})
  setup = types.SimpleNamespace(config=config, layout=None, feed=lambda *_: _Feed())
  server = _Server(6, together)
  worker = types.SimpleNamespace(
    name='a', progress=0, over=server.over, compute=lambda pull, step, batch: pull()
  )
  worker_lib._WorkerSession(worker, [server], setup, 1, session=7).run()
  assert (server.most, server.pulls) == (together, 6)


def test_ticket_that_is_used_is_not_computed(config):
  run = _Versions(config)
  assert run.worker.compute(lambda: None, 3, 'batch') is None
  assert run.worker.progress == 0


@pytest.mark.parametrize(
  'shards, used',
  [
    (4, {(0, 0), (0, 1), (0, 3), (1, 2)}),
    (8, {(0, 0), (0, 1), (0, 2), (0, 3), (0, 6), (0, 7), (1, 4), (1, 5)}),
    (2, {(0, 0), (0, 1), (1, 1)}),  # with examples that are unused
    (3, {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)}),
    (1, {(0, 0), (1, 0)}),
  ],
)
def test_no_example_is_used_twice_when_a_batch_is_divided_otherwise(shards, used):
  tickets = [[0, 0], [0, 1], [0, 3], [1, 2]]
  records = [{'order': 0, 'parts': [{'ticket': ticket} for ticket in tickets]}]
  assert log_lib.used_tickets(records, 1, shards) == used


@pytest.mark.parametrize('answer', [{}, {'drop': True}])
@pytest.mark.parametrize(
  'keys',
  [{'strategy.mode': 'rennala'}, {'strategy.mode': 'synchronous', 'strategy.backup_workers': 1}],
)
def test_a_gradient_that_would_be_dropped_is_not_sent(config, answer, keys):
  config = serving.config_of(config, **keys)
  setup = types.SimpleNamespace(config=config, feed=lambda *_: _Feed())
  sent = np.zeros(2)
  values = {'finite': 1.0, 'weight': 4.0, 'loss': 0.5}
  worker = types.SimpleNamespace(
    name='a',
    progress=0,
    over=threading.Event(),
    compute=lambda *_: (([5], sent, sent), (sent, sent, values)),
  )
  requests = []

  class Server:
    def ask(self, name, **request):
      requests.append((name, request.get('read')))
      return answer if name == 'check' else {}

    def put(self, request, arrays):
      requests.append(('put', request['ticket']))

  setup.layout = types.SimpleNamespace(slices=[slice(0, 2)])
  session = worker_lib._WorkerSession(worker, [Server()], setup, 1, session=7)
  session._process((7, 0), 'batch', 0.0)
  sending = [] if answer else [('put', (7, 0)), ('commit', None)]
  assert requests == [('check', 5), *sending]


def test_a_worker_knows_the_newest_version_that_it_has_read(config):
  versions = iter([5, 7, 6])  # two gradients in flight read at the same time
  server = types.SimpleNamespace()
  vector = types.SimpleNamespace(dtype=np.dtype(np.float32))
  layout = types.SimpleNamespace(slices=[slice(0, 1)], params=vector, stats=vector)
  server.get = lambda *_, **__: ({'version': next(versions)}, np.zeros(8, np.uint8))
  worker = types.SimpleNamespace(name='a', progress=0, version=3, over=threading.Event())
  setup = types.SimpleNamespace(config=serving.config_of(config), layout=layout)
  setup.feed = lambda *_: _Feed()
  session = worker_lib._WorkerSession(worker, [server], setup, 1, session=7)
  reads_and_versions = []
  for _ in range(3):
    reads, _, _ = session._pull((0, 0))
    reads_and_versions.append((reads, worker.version))
  assert reads_and_versions == [([5], 5), ([7], 7), ([6], 7)]


def test_the_step_of_a_process_is_the_version_that_it_knows(config):
  """Its progress counts requests, and shows that it lives."""
  worker, server = (types.SimpleNamespace(progress=0, version=0) for _ in range(2))
  processes, beats = mock.Mock(**{'vote.return_value': 0}), []
  participant = serving.participant(config, '')
  participant.invited.set_result({})

  def run():
    for progress, version in (1316, 599), (1317, 599), (1318, 600):
      processes.heartbeat.reset_mock()
      worker.version, server.version = 598, version
      worker.progress = progress
      launching.wait_until(lambda: processes.heartbeat.call_args, 10, pause=0.01)
      beats.append(processes.heartbeat.call_args)

  worker.run, server.run = run, lambda: None
  parameter_server_run._wait_for_jobs(processes, participant, [worker, server])
  assert beats == [mock.call('step', v) for v in (599, 599, 600)]


def test_the_mean_of_staleness_counts_the_stalest_as_they_are():
  values = log_lib.staleness_metrics([20, 0, 2, 15, 0])
  assert values == {'staleness': 37 / 5, 'staleness_0': 2, 'staleness_2': 1, 'staleness_15': 2}


def test_log_is_taken_back_to_a_version(tmp_path):
  folder = str(tmp_path)
  contribution = {'ticket': [0, 0], 'worker': 'a', 'reads': [0], 'weight': 1.0}
  log = log_lib.UpdateLog(folder, 0, {'shards': 1})
  for order in range(5):
    log.append(order, 1, [{**contribution, 'ticket': [order + order % 2, 0]}])
  log.close()
  with open(tmp_path / log_lib.NAME, 'a') as f:
    f.write('{"order": 5, "par')  # torn by a crash
  records = log_lib.read(folder)
  assert [r['order'] for r in records[1:]] == [0, 1, 2, 3, 4]
  assert log_lib.used_tickets(records, 4, 1) == {(0, 0), (2, 0), (4, 0)}
  # Updates 5 and 6 were another strategy's.
  assert log_lib.used_tickets(records, 7, 2) == {(n, i) for n in (0, 2, 4, 5, 6) for i in (0, 1)}
  assert log_lib.staleness(records) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
  log_lib.UpdateLog(folder, 2, {'shards': 1}).close()
  records = log_lib.read(folder)
  assert [r.get('start', r.get('order')) for r in records] == [0, 0, 1, 2]
