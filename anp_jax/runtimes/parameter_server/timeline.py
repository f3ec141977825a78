"""The order of reads and updates in simulated time.

An asynchronous run is a function of its log: who read which version, and which
update was made when. Here both follow from the times that workers take, by the same
scheduler that orders a real run; nothing is computed, sent or waited for.
"""

from collections.abc import Iterator
import dataclasses
import heapq
import itertools
from typing import NamedTuple

import ml_collections

from anp_jax.runtimes.parameter_server import log as log_lib, scheduler as scheduler_lib
from anp_jax.system import emulation


class Update(NamedTuple):
  """One update of a simulated run.

  Attributes:
    contributions: by data shard, 'ticket', 'worker', 'reads' (the version that was read)
      and 'seconds', simulated, until the update.
    reads: versions that were read by them and by all gradients under way.
  """

  contributions: list[dict]
  reads: set[int]


@dataclasses.dataclass(eq=False)
class _Flight:
  """A worker's place for one gradient in flight after the other.

  Attributes:
    index: index of the worker.
    process: what happens there, see `Timeline._gradients`.
    counts: numbers of its gradients.
    event: number of the event at which it continues.
    gradient: ticket, and version that was read, of the gradient under way.
    start: seconds at which the worker's device begins with it.
    end: seconds at which the device ends; 0 before that is known.
  """

  index: int
  process: Iterator[float | None] = iter(())
  counts: Iterator[int] = dataclasses.field(default_factory=itertools.count)
  event: int = -1
  gradient: tuple[tuple[int, int], int] | None = None
  start: float = 0.0
  end: float = 0.0


class Timeline:
  """Simulated workers, each between its requests to the servers.

  A worker's pass takes config.strategy.simulate's times; its gradients in
  flight share its one device, first come, first served. Except in mode 'async' an
  update stops the passes that began before it.
  """

  def __init__(
    self, config: ml_collections.ConfigDict, records: list[dict], total: int, version: int
  ):
    """Starts all workers, where the log's last update ended.

    Args:
      config: the run's config, with its batch size.
      records: records of its log; see `log.read`.
      total: updates of the whole run.
      version: version of the state that the run starts from.
    """
    self._config, self._settings = config, config.strategy.simulate
    workers = self._settings.workers
    self._seconds = log_lib.simulated_seconds(records, version)
    data_shards = scheduler_lib.data_shards(config, workers)
    used = log_lib.used_tickets(records, version, data_shards)
    self._scheduler = scheduler_lib.TicketScheduler(config, total, version, used, workers)
    self._images = config.batch_size // data_shards
    self._numbers = itertools.count()  # of events, for those of one time
    self._events: list[tuple[float, int, _Flight]] = []  # heap of (seconds, number, flight)
    self._waiting: list[_Flight] = []  # until the next update
    self._ordered: Update | None = None  # made by the last commit
    self._free_at = [self._seconds] * workers
    synchronous = config.strategy.mode == 'synchronous'
    in_flight = 1 if synchronous else config.strategy.in_flight
    self._flights = [_Flight(index) for _ in range(in_flight) for index in range(workers)]
    for flight in self._flights:
      self._begin(flight)

  def updates(self) -> Iterator[Update]:
    """Yields the updates in order, each as late as possible."""
    while self._events:
      self._seconds, number, flight = heapq.heappop(self._events)
      if number != flight.event:  # another one has replaced it
        continue
      delay = next(flight.process)
      if delay is None:
        self._waiting.append(flight)
      else:
        self._schedule(delay, flight)
      if self._ordered:
        yield self._ordered
        self._ordered = None

  def _begin(self, flight):
    flight.process, flight.gradient, flight.end = self._gradients(flight), None, 0.0
    self._schedule(0.0, flight)

  def _schedule(self, delay, flight):
    flight.event = next(self._numbers)
    heapq.heappush(self._events, (self._seconds + delay, flight.event, flight))

  def _gradients(self, flight):
    """One gradient of a worker after the other.

    Yields:
      Seconds until it continues; None: once the next update has been made.
    """
    index, scheduler = flight.index, self._scheduler
    name = f'worker {index}'
    for count in flight.counts:
      while (ticket := scheduler.take(name)) is None:
        yield None
      version = scheduler.begin_read(name, ticket)
      flight.gradient = ticket, version
      yield self._settings.pull_seconds
      words = (self._config.seed, *ticket, index, count)
      (away,) = emulation.outage_seconds(self._settings, words)
      flight.start = max(self._seconds, self._free_at[index]) + away
      flight.end = flight.start + emulation.pass_seconds(self._settings, self._images, words, index)
      self._free_at[index] = flight.end
      yield flight.end - self._seconds
      yield self._settings.push_seconds
      flight.gradient, flight.end = None, 0.0
      contribution = {'ticket': list(ticket), 'worker': name, 'reads': [version]}
      self._end(scheduler.commit(name, ticket, contribution))

  def _end(self, contributions):
    """Keeps the update that a commit has made, and wakes whoever waits for it."""
    if contributions:
      for contribution in contributions:
        contribution['seconds'] = self._seconds
      reads = {c['reads'][0] for c in contributions} | self._scheduler.reads()
      self._ordered = Update(contributions, reads)
      if self._config.strategy.mode != 'async':
        self._stop_late()
    for flight in self._waiting:
      self._schedule(0.0, flight)
    self._waiting = []

  def _stop_late(self):
    """Begins again where a gradient would be dropped, and frees its device."""
    for flight in self._flights:
      if not flight.gradient or self._scheduler.accepts(*flight.gradient):
        continue
      left = flight.end - max(self._seconds, flight.start)
      if left > 0:
        self._free_at[flight.index] -= left
        for later in self._flights:
          if later.index == flight.index and later.end > flight.end:
            later.start, later.end = later.start - left, later.end - left
            self._schedule(later.end - self._seconds, later)
      self._begin(flight)
