"""A worker: leases tickets, pulls weights, pushes gradients."""

from collections.abc import Callable, Iterator
from concurrent import futures
import contextlib
import functools
import threading

from absl import logging
import numpy as np

from anp_jax import cluster
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  gradient as gradient_lib,
  participant as participant_lib,
  setup as setup_lib,
  threads,
)
from anp_jax.system import error_lines


class BatchQueue:
  """The tickets of a worker, by count, as its data stream asks for them."""

  def __init__(self, take: Callable[[], tuple[int, int] | None], limit: int | None):
    """Starts without tickets; none is leased yet.

    Args:
      take: () -> (step, data shard), None at the end.
      limit: tickets that may be leased at a time; None: the stream's read-ahead
        decides.
    """
    self._take = take
    self._limit = limit
    self._tickets: list[tuple[int, int] | None] = []
    self._finished = 0
    self._closed = False
    self._changed = threading.Condition()
    self._taking = threading.Lock()

  def ticket(self, count: int) -> tuple[int, int] | None:
    """Returns the ticket of this count; None after the end."""
    # A leased ticket is returned also while the next is waited for.
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
    """Marks one of the tickets as finished."""
    with self._changed:
      self._finished += 1
      self._changed.notify_all()

  def close(self) -> None:
    """Leases no more tickets."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()

  def _may_take(self):
    leased = len(self._tickets) - self._finished
    return self._limit is None or leased < self._limit


class Worker:
  """Computes gradients until the run is over, as processes join and leave.

  Attributes:
    name: name of this start of its process; others take over when that is gone.
    progress: requests made and gradients computed; grows while it lives.
    version: newest version of the weights that it knows.
    over: set when it is to end.
  """

  def __init__(
    self, participant: participant_lib.Participant, prepare: Callable[[dict], setup_lib.Setup]
  ):
    """Prepares the worker; `run` connects.

    Args:
      participant: this process.
      prepare: server 0's settings -> setup.
    """
    self.name = participant.name
    self.progress = self.version = 0
    self.over = participant.over
    self._participant = participant
    self._prepare = prepare
    self._computing = threading.Lock()
    self._pausing = threading.Lock()
    self._pauses = 0
    self._program: gradient_lib.GradientProgram | None = None

  def run(self) -> None:
    """Computes until the run is over.

    Raises:
      ConfigError: if this process's devices or data are not the others'.
      cluster.RunFailedError: if a server refuses a request.
    """
    invitation = self._participant.invitation()
    if invitation is None:
      return
    setup = self._prepare(invitation)
    self._program = setup.gradient_program(invitation['data_shards'])
    with contextlib.ExitStack() as stack:
      servers = []
      for endpoint in invitation['servers']:
        servers.append(self._participant.connect(endpoint))
        stack.callback(servers[-1].close)
      while not self.over.is_set():
        try:
          answer = servers[0].ask('release', worker=self.name)
          self.version = answer['version']
          _WorkerSession(self, servers, setup, invitation['data_shards'], answer['session']).run()
        except transport.CONNECTION_ERRORS as e:
          if 'refused:' in str(e):
            raise cluster.RunFailedError(error_lines.typed_line(e)) from e
          if not self.over.wait(participant_lib.RETRY):
            logging.warning('worker %s reconnecting: %s', self.name, error_lines.typed_line(e))

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Within it, no gradient is computed in this process.

    Later gradients use weights that were read after it.
    """
    with self._pausing, self._computing:
      self._pauses += 1
      yield

  def compute(
    self, pull: Callable[[], tuple | None], step: int, batch: dict
  ) -> tuple[tuple, tuple] | None:
    """Computes a gradient, of weights that were read since the last pause.

    No lock is held while weights are waited for: they may need updates that
    wait for the thread which is about to enter `paused`.

    Args:
      pull: () -> (versions read, weights, statistics), or None.
      step: step of the ticket.
      batch: arrays, see `gradient.GradientProgram`.

    Returns:
      The results of `pull` and of `gradient.GradientProgram`; None where `pull`
      returned none.
    """
    assert self._program is not None  # `run` compiles it
    while True:
      with self._pausing:
        pauses = self._pauses
      pulled = pull()
      if pulled is None:
        return None
      with self._computing:
        if pauses != self._pauses:
          continue
        _, weights, stats = pulled
        result = self._program(weights, stats, step, batch)
      self.progress += 1
      return pulled, result


class _WorkerSession:
  """A worker's time with the servers, until the run is over or a connection breaks."""

  def __init__(self, worker, servers, setup, data_shards, session):
    self._worker = worker
    self._session = session
    self._servers = servers
    self._layout = setup.layout
    s = setup.config.strategy
    synchronous = s.mode == 'synchronous'
    self._drops = s.mode == 'rennala' or s.backup_workers > 0
    self._in_flight = 1 if synchronous else s.in_flight
    self._queue = BatchQueue(
      self._take,
      # A worker that still computes what others have finished must not hold a
      # part of the next update.
      1 if synchronous else None,
    )
    self._closed = False
    self._count = 0
    self._taking = threading.Lock()
    self._transfers = futures.ThreadPoolExecutor(self._in_flight * len(servers))
    # Last: it asks for tickets at once.
    self._feed = setup.feed(self._queue.ticket, data_shards)

  def run(self):
    """Runs a thread for each gradient in flight; raises their first error."""
    jobs = [threads.start(self._run, f'gradient {i}') for i in range(self._in_flight)]
    try:
      done, _ = futures.wait(jobs, return_when=futures.FIRST_EXCEPTION)
    finally:
      self._closed = True
      self._queue.close()
      futures.wait(jobs)
      self._feed.close()
      self._transfers.shutdown(wait=False)
    for job in done:
      job.result()

  def _is_over(self):
    return self._closed or self._worker.over.is_set()

  def _run(self):
    while not self._is_over():
      ticket, batch, waited = self._next()
      if ticket is None:
        return
      self._process(ticket, batch, waited)
      self._queue.finish()

  def _take(self):
    while not self._is_over():
      answer = self._ask('take', worker=self._worker.name, session=self._session)
      if 'ticket' in answer:
        return tuple(answer['ticket'])
    return None

  def _next(self):
    """The next ticket, its batch and the seconds it was waited for."""
    with self._taking:
      before = self._feed.wait_seconds
      batch = next(self._feed)
      ticket = self._queue.ticket(self._count)
      self._count += 1
    return ticket, batch, self._feed.wait_seconds - before

  def _process(self, ticket, batch, waited):
    """Pulls weights, computes a ticket's gradient, pushes and commits it."""
    result = self._worker.compute(lambda: self._pull(ticket), ticket[0], batch)
    if result is None:
      return
    (reads, weights, stats), (gradient, stats_delta, values) = result
    if failure := gradient_lib.failure(ticket[0], values):
      self._ask('fail', text=failure)
      return
    if self._drops and 'drop' in self._ask('check', ticket=ticket, read=reads[0]):
      return
    self._push(ticket, gradient, stats_delta)
    arrays = (weights, stats, gradient, stats_delta)
    contribution = {'ticket': ticket, 'reads': reads}
    contribution |= gradient_lib.measured(values, waited, arrays)
    self._ask('commit', worker=self._worker.name, contribution=contribution)

  def _pull(self, ticket):
    """Versions read, weights, statistics; None for a ticket that is used."""
    request = {'worker': self._worker.name, 'ticket': ticket}
    answer = self._weights(self._servers[0], **request)
    if answer is None:
      return None
    version, data = answer
    self._worker.version = max(version, self._worker.version)
    weights = functools.partial(self._weights, at_least=version, **request)
    answers = [*self._transfers.map(weights, self._servers[1:])]
    if None in answers:
      return None
    dtype = self._layout.params.dtype
    size = self._layout.slices[0].stop * dtype.itemsize
    weights, stats = data[:size], data[size:].view(self._layout.stats.dtype)
    if answers:
      weights = np.concatenate([weights, *(data for _, data in answers)])
    reads = [version, *(version for version, _ in answers)]
    return reads, weights.view(dtype), stats

  def _weights(self, server, **request):
    """(version, bytes) of a server's slice; None if they are not wanted."""
    while not self._is_over():
      answer, data = server.get('weights', **request)
      self._worker.progress += 1
      if 'version' in answer:
        return answer['version'], data
      if 'drop' in answer:
        return None
    return None

  def _push(self, ticket, gradient, stats_delta):
    """Sends each server its slice."""
    request = {'worker': self._worker.name, 'ticket': ticket}
    deltas = [stats_delta] + [stats_delta[:0]] * (len(self._servers) - 1)
    arrays = zip((gradient[part] for part in self._layout.slices), deltas, strict=True)
    list(self._transfers.map(lambda server, pair: server.put(request, pair), self._servers, arrays))
    self._worker.progress += 1

  def _ask(self, name, **request):
    answer = self._servers[0].ask(name, **request)
    self._worker.progress += 1
    return answer
