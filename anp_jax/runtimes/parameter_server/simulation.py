"""Simulated workers: one process computes all their gradients, in their order.

The weights are those of a real run with the same log, bit for bit.
"""

import contextlib
import threading

import jax
import numpy as np

from anp_jax.runtimes.parameter_server import (
  gradient as gradient_lib,
  scheduler,
  timeline as timeline_lib,
)

_PATIENCE = 1.0  # seconds, between two looks at whether the run has failed


class Simulation:
  """Stands in for the workers of a run; see `gradient_worker.Worker`."""

  def __init__(self, config, setup, session, records: list[dict]):
    """Compiles the gradient.

    Args:
      config: of the run, with its batch size.
      setup: `setup.Setup` of one server.
      session: `session.ChiefSession`, which has begun.
      records: of the run's log until then.
    """
    settings = config.strategy.simulate
    self._setup, self._session = setup, session
    self._version = session.store.version
    data_shards = scheduler.data_shards(config, settings.workers)
    self._slices = setup.layout.params.slices(config.strategy.servers)
    timeline = timeline_lib.Timeline(config, records, setup.total, self._version)
    self._updates = _Lookahead(timeline)
    self._program = setup.gradient_program(data_shards)
    self._feed = setup.feed(self._updates.ticket, data_shards)
    self._computing = threading.Lock()
    self._closed = False
    self._sent = {}  # version -> weights and statistics that servers sent

  def run(self) -> None:
    """Computes and applies updates until the run is over."""
    try:
      for update in self._updates:
        if not self._apply(update):
          return
        self._version += 1
      if self._version < self._session.scheduler.limit:
        self._session.fail(f'no update from version {self._version} is ordered')
    finally:
      self._updates.close()
      self._feed.close()

  @contextlib.contextmanager
  def paused(self):
    """Within it, no gradient is computed."""
    with self._computing:
      yield

  def close(self) -> None:
    """Makes `run` return soon."""
    self._closed = True

  def _apply(self, update):
    """Makes one update; returns whether the run goes on."""
    version = self._version
    read = {v for c in update.contributions for v in c['reads']}
    needed = read | update.versions
    if version in needed and not self._note_weights(version):
      return False
    self._sent = {v: sent for v, sent in self._sent.items() if v in needed}
    contributions = [self._contribution(c) for c in update.contributions]
    return None not in contributions and self._session.order(
      contributions, jax.local_device_count()
    )

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
    reads, ticket = contribution['reads'], tuple(contribution['ticket'])
    weights, stats = self._sent[reads[0]]
    if len(set(reads)) > 1:
      weights = np.concatenate([self._sent[v][0][part] for part, v in zip(self._slices, reads)])
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


def describe(config, layout) -> str:
  """Returns what is simulated, and what it holds, in one line."""
  settings = config.strategy.simulate
  # Of several servers, a gradient's weights are of two versions at the most.
  reads = min(config.strategy.servers, 2)
  versions = settings.workers * config.strategy.in_flight * reads
  megabytes = layout.params.size * layout.params.dtype.itemsize / 1e6
  spread = f', spread {100 * settings.spread:g} %' if settings.spread else ''
  slow = ''.join(f', worker {i} x {x:g}' for i, x in settings.slow)
  return (
    f'simulated, a pass of {settings.step_seconds:g} s and {settings.image_seconds:g} s '
    f'an image{spread}{slow}, pull {settings.pull_seconds:g} s, push '
    f'{settings.push_seconds:g} s; at most {versions} versions of the weights are kept, '
    f'{versions * megabytes:.3g} MB'
  )


class _Lookahead:
  """Updates in order, whose tickets the data stream asks for ahead."""

  def __init__(self, updates):
    self._source = iter(updates)
    self._updates, self._tickets = [], []
    self._lock = threading.Lock()
    self._closed = False

  def __iter__(self):
    while True:
      with self._lock:
        if not self._updates and not self._extend():
          return
        update = self._updates.pop(0)
      yield update

  def ticket(self, count: int) -> tuple[int, int]:
    """Returns the ticket of a gradient; after the end any, which none uses."""
    with self._lock:
      while count >= len(self._tickets):
        if self._closed or not self._extend():
          return 0, 0
      return self._tickets[count]

  def close(self) -> None:
    """Looks no further ahead."""
    with self._lock:
      self._closed = True

  def _extend(self):
    update = next(self._source, None)
    if update is not None:
      self._updates.append(update)
      self._tickets += [tuple(c['ticket']) for c in update.contributions]
    return update is not None
