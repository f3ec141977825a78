"""A worker: takes tickets, pulls weights, pushes gradients."""

from concurrent import futures
import contextlib
import threading
import time

from absl import logging
import jax
import numpy as np
from pyarrow import flight

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.runtimes.server import rendezvous

_RETRY = 0.3  # seconds between two attempts to reach the servers
_STARTED = time.time_ns()
# What a call raises when a server is gone, or has begun another term.
BROKEN = (flight.FlightError, OSError, EOFError)


def line(e: Exception) -> str:
  """What it is, for a log."""
  text = str(e).strip().splitlines()
  return f'{type(e).__name__}: {text[0] if text else ""}'[:300]


class Tickets:
  """The tickets of a worker, by count, as its data stream asks for them."""

  def __init__(self, take, shards: int, batch_size: int, ahead: int | None):
    """Makes it; nothing is asked for yet.

    Args:
      take: () -> (step, shard), None at the end.
      shards: of a batch.
      batch_size: images of a batch.
      ahead: tickets that may be in hand at a time; None: as the stream likes.
    """
    self._take = take
    self._rows = np.arange(batch_size).reshape(shards, -1)
    self._ahead = ahead
    self._tickets = []
    self._finished = 0
    self._closed = False
    self._changed = threading.Condition()
    self._taking = threading.Lock()

  def where(self, count: int) -> tuple[int, np.ndarray]:
    """Step and rows of a batch; of step 0 after the end: nobody takes it."""
    step, shard = self.at(count) or (0, 0)
    return step, self._rows[shard]

  def at(self, count: int):
    """The ticket of this count; None after the end."""
    # One that is known is told also while the next is waited for.
    if count >= len(self._tickets):
      with self._taking:
        while len(self._tickets) <= count:
          with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_take())
          if self._closed or None in self._tickets[-1:]:
            return None
          self._tickets.append(self._take())
    return self._tickets[count]

  def finish(self) -> None:
    """One of the tickets is done with."""
    with self._changed:
      self._finished += 1
      self._changed.notify_all()

  def close(self) -> None:
    """Asks for no more."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()

  def _may_take(self):
    in_hand = len(self._tickets) - self._finished
    return self._ahead is None or in_hand < self._ahead


class Worker:
  """Computes until the run is over, whoever else comes or goes.

  Attributes:
    name: of this start of its process: when that is gone, others take over.
    done: answers heard and gradients computed: while it grows, this one lives.
  """

  def __init__(self, rank: int, config, connect, card: dict, prepare, launched):
    """Makes the worker.

    Args:
      rank: of this process in its run.
      config: the run's config.
      connect: address, or None for server 0 -> `wire.Client`; OSError where
        there is none yet.
      card: of this process, see `cluster.process_info`.
      prepare: what server 0 says -> `setup.Setup`.
      launched: see `meeting.launched`.
    """
    self.name = f'{rank}.{_STARTED:x}'
    self.done = 0
    self.closed = threading.Event()
    self._config = config
    self._connect = connect
    self._card = card
    self._prepare = prepare
    self._launched = launched
    self._computing = threading.Lock()
    self._rest = threading.Lock()
    self._rests = 0
    self._setup = self._program = None
    self._has_met = False  # server 0, in this run

  def run(self) -> None:
    """Works until the run is over, or `close`.

    Raises:
      ConfigError: if this process does not go with server 0.
      cluster.Lost: if no server has answered for
        config.cluster.rendezvous_timeout.
      cluster.Failed: if the run has failed, or a server refuses what it gets.
    """
    while not self.closed.is_set():
      hello, servers = self._come()
      if hello is None:
        return
      try:
        if self._program is None:
          self._setup = self._prepare(hello)
          self._program = self._setup.program(hello['shards'])
        _Turn(self, hello, servers, self._setup, self._program).run()
        return
      except BROKEN as e:
        if 'refused:' in str(e):
          raise cluster.Failed(line(e)) from e
        logging.warning('worker %s comes anew: %s', self.name, line(e))
        time.sleep(_RETRY)
      finally:
        for server in servers:
          server.close()

  def close(self) -> None:
    """Works no more; `run` returns soon."""
    self.closed.set()

  @contextlib.contextmanager
  def idle(self):
    """In here, no gradient is computed in this process.

    Those that follow are of weights that are read after it.
    """
    with self._rest, self._computing:
      self._rests += 1
      yield

  def compute(self, pull, step, batch):
    """One gradient, of weights that were read since the last `idle`.

    No lock is held while weights are waited for: they may need updates that
    wait for the thread which is about to enter `idle`.

    Args:
      pull: () -> (versions read, weights, statistics), or None.
      step: of the ticket.
      batch: see `gradient.Program`.

    Returns:
      What `pull` gave and what `gradient.Program` did; None where it gave none.
    """
    while True:
      with self._rest:
        rests = self._rests
      pulled = pull()
      if pulled is None:
        return None
      with self._computing:
        if rests != self._rests:
          continue
        made = self._program(*pulled[1:], step, batch)
      self.done += 1
      return pulled, made

  def _come(self):
    """Says hello until all servers are there."""
    start = time.monotonic()
    patience = self._config.cluster.rendezvous_timeout
    why = ''
    while time.monotonic() - start < patience:
      if self.closed.is_set():
        return None, []
      try:
        desk = self._connect(None)
        hello = desk.ask(
          'hello', worker=self.name, card=self._card,
          devices=jax.local_device_count(),
        )  # fmt: skip
        if 'problem' in hello:
          raise config_lib.ConfigError(hello['problem'])
        self.done += 1
        self._has_met = True
        if 'term' in hello:
          others = [self._connect(a) for a in hello['servers'][1:]]
          return hello, [desk, *others]
        desk.close()
        why = 'not all servers are there'
      except BROKEN as e:
        # One that has just been started waits: that was the run before.
        if rendezvous.is_over(e, 0 if self._has_met else self._launched):
          return None, []
        why = line(e)
      time.sleep(_RETRY)
    raise cluster.Lost(
      f'worker {self.name}: nothing to do for {patience:g} s: {why}'
    )


class _Turn:
  """A worker's time with the servers, until they begin another term."""

  def __init__(self, worker, hello, servers, setup, program):
    self._worker = worker
    self._term = hello['term']
    self._servers = servers
    self._cuts = [slice(part.start, part.stop) for part in setup.slices]
    self._program = program
    synchronous = setup.config.strategy.mode == 'synchronous'
    self._lanes = 1 if synchronous else setup.config.strategy.lanes
    self._tickets = Tickets(
      self._take,
      hello['shards'],
      setup.config.batch_size,
      # One that is still at work on what others have done must not hold a part
      # of the next update.
      1 if synchronous else None,
    )
    self._ended = False
    self._errors = []
    self._count = 0
    self._taking = threading.Lock()
    self._travel = futures.ThreadPoolExecutor(self._lanes * len(servers))
    # Last: it asks for tickets at once.
    self._feed = setup.feed(self._tickets.where, hello['shards'])

  def run(self):
    """Lanes side by side; raises what one of them raises."""
    lanes = [
      threading.Thread(target=self._lane, name=f'lane {i}', daemon=True)
      for i in range(self._lanes)
    ]
    for lane in lanes:
      lane.start()
    try:
      for lane in lanes:
        lane.join()
    finally:
      self._end()
      self._feed.close()
      self._travel.shutdown(wait=False)
    if self._errors:
      raise self._errors[0]

  def _end(self):
    self._ended = True
    self._tickets.close()

  def _over(self):
    return self._ended or self._worker.closed.is_set()

  def _lane(self):
    try:
      while not self._over():
        found = self._next()
        if found is None:
          return
        self._one(*found)
        self._tickets.finish()
    except BaseException as e:  # noqa: BLE001 - raised by `run`
      self._errors.append(e)
      self._end()

  def _take(self):
    while not self._over():
      found = self._ask('take', worker=self._worker.name)
      if 'failed' in found:
        raise cluster.Failed(found['failed'])
      if 'over' in found:
        return None
      if 'ticket' in found:
        return tuple(found['ticket'])
    return None

  def _next(self):
    """The next ticket, its batch and the seconds it was waited for."""
    with self._taking:
      before = self._feed.waited
      batch = next(self._feed)
      ticket = self._tickets.at(self._count)
      self._count += 1
    return ticket and (ticket, batch, self._feed.waited - before)

  def _one(self, ticket, batch, waited):
    made = self._worker.compute(lambda: self._pull(ticket), ticket[0], batch)
    if made is None:
      return
    (reads, weights, stats), (gradient, term, values) = made
    del values['vote']
    if not values.pop('finite'):
      weight = max(values['weight'], 1)
      self._ask(
        'fail',
        text=f'the gradient of step {ticket[0]} is not finite: loss '
        f'{values["loss"] / weight}, gradient norm {values["grad_norm"]}; '
        'nothing of it was applied',
      )
      return
    self._push(ticket, gradient, term)
    moved = weights.nbytes + stats.nbytes + gradient.nbytes + term.nbytes
    part = {
      'ticket': ticket,
      'reads': reads,
      'weight': values.pop('weight'),
      'values': {**values, 'waited': waited, 'bytes': moved},
    }
    while not self._over():
      found = self._ask('commit', worker=self._worker.name, part=part)
      if 'wait' not in found:
        return

  def _pull(self, ticket):
    """Versions read, weights, statistics; None for a ticket that is used."""
    first = self._weights(
      self._servers[0], worker=self._worker.name, ticket=ticket
    )
    if first is None:
      return None
    version, data = first
    found = [
      self._travel.submit(self._weights, server, at_least=version)
      for server in self._servers[1:]
    ]
    cut = self._cuts[0].stop * self._program.wire.itemsize
    reads, parts = [version], [data[:cut]]
    for one in found:
      if one.result() is None:
        return None
      reads.append(one.result()[0])
      parts.append(one.result()[1])
    whole = np.concatenate(parts) if found else parts[0]
    stats = data[cut:].view(self._program.dtype)
    return reads, whole.view(self._program.wire), stats

  def _weights(self, server, **request):
    """(version, bytes) of a server's slice; None if they are not wanted."""
    while not self._over():
      said, data = server.get('weights', term=self._term, **request)
      self._worker.done += 1
      if 'version' in said:
        return said['version'], data
      if 'drop' in said:
        return None
    return None

  def _push(self, ticket, gradient, term):
    """Sends each server its slice."""
    request = {
      'term': self._term,
      'worker': self._worker.name,
      'ticket': ticket,
      'dtype': str(gradient.dtype),
    }
    jobs = [
      self._travel.submit(
        server.put, request, [gradient[cut], term if not i else term[:0]]
      )
      for i, (server, cut) in enumerate(zip(self._servers, self._cuts))
    ]
    for job in jobs:
      job.result()
    self._worker.done += 1

  def _ask(self, name, **request):
    answer = self._servers[0].ask(name, term=self._term, **request)
    self._worker.done += 1
    return answer
