"""The order of reads and updates in simulated time.

An asynchronous run is a function of its log: who read which version, and which
update was made when. Here both follow from the times that workers take, by the same
scheduler that orders a real run; nothing is computed, sent or waited for.
"""

from collections.abc import Iterator
import heapq
import itertools
from typing import NamedTuple

import ml_collections

from anp_jax.runtimes.parameter_server import log as log_lib, scheduler as scheduler_lib
from anp_jax.system import emulation

_ENDED = object()


class Update(NamedTuple):
  """One update of a simulated run.

  Attributes:
    contributions: by data shard, 'ticket', 'worker', 'reads' (the version that was read)
      and 'seconds', simulated, until the update.
    reads: versions that were read by them and by all gradients under way.
  """

  contributions: list[dict]
  reads: set[int]


class Timeline:
  """Simulated workers, each between its requests to the servers.

  A worker's pass takes config.strategy.simulate's times; its gradients in
  flight share its one device, first come, first served.
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
    used = log_lib.used_steps(records, version)
    self._scheduler = scheduler_lib.TicketScheduler(config, total, version, used, workers)
    self._images = config.batch_size // self._scheduler.data_shards
    self._numbers = itertools.count()  # of events, for those of one time
    self._events: list[tuple[float, int, Iterator]] = []  # heap of (seconds, number, process)
    self._waiting: list[Iterator] = []  # processes, until the next update
    self._ordered: Update | None = None  # made by the last commit
    self._free_at = [self._seconds] * workers
    synchronous = config.strategy.mode == 'synchronous'
    in_flight = 1 if synchronous else config.strategy.in_flight
    for _ in range(in_flight):
      for index in range(workers):
        self._schedule(0.0, self._gradients(index))

  def updates(self) -> Iterator[Update]:
    """Yields the updates in order, each as late as possible."""
    while self._events:
      self._seconds, _, process = heapq.heappop(self._events)
      delay = next(process, _ENDED)
      if delay is None:
        self._waiting.append(process)
      elif delay is not _ENDED:
        self._schedule(delay, process)
      if self._ordered:
        yield self._ordered
        self._ordered = None

  def _schedule(self, delay, process):
    event = self._seconds + delay, next(self._numbers), process
    heapq.heappush(self._events, event)

  def _gradients(self, index):
    """One gradient in flight of a worker after the other.

    Yields:
      Seconds until it continues; None: once the next update has been made.
    """
    name, scheduler = f'worker {index}', self._scheduler
    for count in itertools.count():
      ticket = yield from self._answer(scheduler.take, name)
      version = yield from self._answer(scheduler.begin_read, name, ticket)
      if version == scheduler_lib.DROP:
        continue
      yield self._settings.pull_seconds
      seconds = self._pass_seconds(index, ticket, count)
      end = max(self._seconds, self._free_at[index]) + seconds
      self._free_at[index] = end
      yield end - self._seconds
      yield self._settings.push_seconds
      contribution = {'ticket': list(ticket), 'worker': name, 'reads': [version]}
      answer = yield from self._answer(scheduler.commit, name, ticket, contribution)
      self._end(answer)

  def _answer(self, request, *arguments):
    """Makes a request until the answer is not WAIT."""
    while (answer := request(*arguments)) == scheduler_lib.WAIT:
      yield None
    return answer

  def _pass_seconds(self, index, ticket, count):
    words = (self._config.seed, *ticket, index, count)
    return emulation.pass_seconds(self._settings, self._images, words, index)

  def _end(self, contributions):
    """Keeps the update that a commit has made, and wakes whoever waits for it."""
    if isinstance(contributions, list) and contributions:
      for contribution in contributions:
        contribution['seconds'] = self._seconds
      reads = {c['reads'][0] for c in contributions} | self._scheduler.reads()
      self._ordered = Update(contributions, reads)
    for process in self._waiting:
      self._schedule(0.0, process)
    self._waiting = []
