"""Simulated workers: one process computes all their gradients, in their order.

The weights are those of a real run with the same log, bit for bit.
"""

import collections
from collections.abc import Iterator
import contextlib
import threading

import jax
import ml_collections
import numpy as np

from anp_jax.runtimes.parameter_server import (
  gradient as gradient_lib,
  gradient_worker,
  layout as layout_lib,
  scheduler,
  session as session_lib,
  setup as setup_lib,
  timeline as timeline_lib,
)
from anp_jax.system import emulation

_PATIENCE = 1.0  # seconds, between two looks at whether the run has failed


class Simulation:
  """Stands in for the workers of a run; see `gradient_worker.Worker`."""

  def __init__(
    self, setup: setup_lib.Setup, session: session_lib.ChiefSession, records: list[dict]
  ):
    """Compiles the gradient.

    Args:
      setup: setup of the run, which has one server.
      session: session, which has begun.
      records: records of the run's log until then.
    """
    config = setup.config
    self._setup, self._session = setup, session
    self._version = session.store.version
    data_shards = scheduler.data_shards(config, config.strategy.simulate.workers)
    timeline = timeline_lib.Timeline(config, records, setup.spec.total_steps, self._version)
    self._ordered: collections.deque[timeline_lib.Update] = collections.deque()
    tickets = self._tickets(timeline)
    self._queue = gradient_worker.BatchQueue(lambda: next(tickets, None), None)
    self._program = setup.gradient_program(data_shards)
    self._feed = setup.feed(self._queue.ticket, data_shards)
    self._computing = threading.Lock()
    self._closed = False
    # Version -> weights and statistics that the server sent.
    self._sent: dict[int, tuple[np.ndarray, np.ndarray]] = {}

  def run(self) -> None:
    """Computes and applies updates until the run is over."""
    count = 0
    try:
      while self._queue.ticket(count):
        update = self._ordered.popleft()
        if not self._apply(update):
          return
        self._version += 1
        count += len(update.contributions)
      if not self._closed and self._version < self._session.scheduler.limit:
        self._session.fail(f'no update of version {self._version} is ordered')
    finally:
      self._feed.close()

  def _tickets(self, timeline):
    """Yields the ticket of each gradient, once its update is ordered."""
    for update in timeline.updates():
      self._ordered.append(update)
      for contribution in update.contributions:
        yield tuple(contribution['ticket'])

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Within it, no gradient is computed."""
    with self._computing:
      yield

  def close(self) -> None:
    """Makes `run` return soon."""
    self._closed = True

  def _apply(self, update):
    """Makes one update; returns whether the run continues."""
    if self._version in update.reads and not self._note_weights(self._version):
      return False
    self._sent = {v: sent for v, sent in self._sent.items() if v in update.reads}
    reported = [self._contribution(c) for c in update.contributions]
    return None not in reported and self._session.order(reported, jax.local_device_count())

  def _note_weights(self, version):
    """Keeps what servers send of the newest version; False if it fails."""
    session = self._session
    while not (self._closed or session.failed or session.store.error):
      with contextlib.suppress(TimeoutError):
        _, state = session.store.read(version, _PATIENCE)
        (optimizer,) = self._setup.optimizers
        weights = np.concatenate(optimizer.weights(state))
        self._sent[version] = weights, np.asarray(state.stats)
        return True
    return False

  def _contribution(self, contribution):
    """Computes a gradient; returns it as a worker reports it, None if it fails.

    Its ticket and its gradient are then with the parameter store.
    """
    ticket = tuple(contribution['ticket'])
    weights, stats = self._sent[contribution['reads'][0]]
    before = self._feed.waited
    batch = next(self._feed)
    with self._computing:
      gradient, stats_delta, values = self._program(weights, stats, ticket[0], batch)
    if failure := gradient_lib.failure(ticket[0], values):
      self._session.fail(failure)
      return None
    store, worker = self._session.store, contribution['worker']
    store.enqueue_gradient(ticket, worker, gradient, stats_delta)
    arrays = (weights, stats, gradient, stats_delta)
    waited = self._feed.waited - before
    return contribution | gradient_lib.measured(values, waited, arrays)


def describe(config: ml_collections.ConfigDict, layout: layout_lib.Layout) -> str:
  """Returns what is simulated, and what it holds, in one line."""
  settings = config.strategy.simulate
  versions = settings.workers * config.strategy.in_flight
  megabytes = layout.params.size * layout.params.dtype.itemsize / 1e6
  passes = ', '.join(emulation.describe_pass(settings, 'worker'))
  return (
    f'simulated, {passes}, pull {settings.pull_seconds:g} s, push '
    f'{settings.push_seconds:g} s; at most {versions} versions of the weights are kept, '
    f'{versions * megabytes:.3g} MB'
  )
