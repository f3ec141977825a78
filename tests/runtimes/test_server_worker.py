"""A worker's tickets, asked for by several threads."""

import threading

import numpy as np

from anp_jax.runtimes.server import log as log_lib
from anp_jax.runtimes.server import worker


def test_rows_are_those_of_the_ticket():
  given = iter([(3, 1), (4, 0), None])
  tickets = worker.Tickets(lambda: next(given), 2, 8, None)
  step, rows = tickets.where(1)  # asked out of order
  assert step == 4 and rows.tolist() == [0, 1, 2, 3]
  step, rows = tickets.where(0)
  assert step == 3 and rows.tolist() == [4, 5, 6, 7]
  assert tickets.at(2) is None
  assert len(tickets.where(7)[1]) == 4  # any: nobody takes it


def test_known_ticket_is_told_while_the_next_is_waited_for():
  asked, go_on = threading.Event(), threading.Event()
  given = [(0, 0)]

  def take():
    if given:
      return given.pop()
    asked.set()
    assert go_on.wait(10)
    return None

  tickets = worker.Tickets(take, 1, 4, None)
  assert tickets.at(0) == (0, 0)
  reader = threading.Thread(target=tickets.at, args=(1,))
  reader.start()
  assert asked.wait(10)
  found = []
  other = threading.Thread(target=lambda: found.append(tickets.at(0)))
  other.start()
  other.join(10)
  go_on.set()
  reader.join(10)
  assert found == [(0, 0)]


def test_one_in_hand_waits_until_it_is_finished():
  steps = iter(range(9))
  tickets = worker.Tickets(lambda: (next(steps), 0), 1, 4, 1)
  assert tickets.at(0) == (0, 0)
  found = []
  reader = threading.Thread(target=lambda: found.append(tickets.at(1)))
  reader.start()
  reader.join(0.2)
  assert not found
  tickets.finish()
  reader.join(10)
  assert found == [(1, 0)]


def test_closing_frees_who_waits():
  tickets = worker.Tickets(lambda: (0, 0), 1, 4, 1)
  tickets.at(0)
  found = []
  reader = threading.Thread(target=lambda: found.append(tickets.at(1)))
  reader.start()
  tickets.close()
  reader.join(10)
  assert found == [None]
  assert np.array_equal(tickets.where(1)[1], np.arange(4))


class _Versions:
  """A worker whose weights are the version of the servers."""

  def __init__(self):
    self.now, self.pulled = 0, []
    self.worker = worker.Worker(0, None, None, {}, None, 0.0)
    self.worker._program = lambda weights, stats, step, batch: weights

  def pull(self):
    self.pulled.append(self.now)
    return [self.now], self.now, None

  def compute(self, pull):
    """In a thread; gives the list that will hold its answer."""
    made = []
    thread = threading.Thread(
      target=lambda: made.append(self.worker.compute(pull, 3, 'batch'))
    )
    thread.start()
    return thread, made


def test_weights_are_not_read_while_another_scores():
  run = _Versions()
  with run.worker.idle():
    thread, made = run.compute(run.pull)
    thread.join(0.1)
    assert not run.pulled
    run.now = 7  # the others have gone on
  thread.join(10)
  assert run.pulled == [7] and made == [(([7], 7, None), 7)]


def test_weights_read_before_another_scored_are_read_again():
  run = _Versions()
  reading, go_on = threading.Event(), threading.Event()

  def pull():
    weights = run.pull()
    reading.set()
    assert go_on.wait(10)
    return weights

  thread, made = run.compute(pull)
  assert reading.wait(10)
  with run.worker.idle():  # does not wait for weights that are on their way
    go_on.set()
    thread.join(0.1)
    assert not made
    run.now = 7
  thread.join(10)
  assert run.pulled == [0, 7] and made == [(([7], 7, None), 7)]


def test_ticket_that_is_used_is_not_computed():
  run = _Versions()
  assert run.worker.compute(lambda: None, 3, 'batch') is None
  assert run.worker.done == 0


def test_log_is_taken_back_to_a_version(tmp_path):
  folder = str(tmp_path)
  part = {'ticket': [0, 0], 'worker': 'a', 'reads': [0], 'weight': 1.0}
  log = log_lib.Log(folder, 0, {'shards': 1})
  for order in range(5):
    log.append(order, 1, [{**part, 'ticket': [order + order % 2, 0]}])
  log.close()
  with open(tmp_path / log_lib.NAME, 'a') as f:
    f.write('{"order": 5, "par')  # torn by a crash
  records = log_lib.read(folder)
  assert [r['order'] for r in records[1:]] == [0, 1, 2, 3, 4]
  assert log_lib.applied(records, 4) == {0, 2, 4}
  # Updates 5 and 6 were another strategy's.
  assert log_lib.applied(records, 7) == {0, 2, 4, 5, 6}
  assert log_lib.staleness(records) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
  log_lib.Log(folder, 2, {'shards': 1}).close()
  records = log_lib.read(folder)
  assert [r.get('start', r.get('order')) for r in records] == [0, 0, 1, 2]
