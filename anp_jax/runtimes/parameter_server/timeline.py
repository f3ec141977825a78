"""The order of reads and updates in simulated time.

An asynchronous run is a function of its log: who read which version, and which
update came when. Here both follow from the times that workers take, by the same
scheduler that orders a real run; nothing is computed, sent or waited for.
"""

from collections.abc import Collection, Iterator
import dataclasses
import heapq
import itertools

from anp_jax.runtimes.parameter_server import log as log_lib, scheduler as scheduler_lib
from anp_jax.system import emulation

_ENDED = object()


@dataclasses.dataclass(frozen=True)
class Update:
  """An update of the weights.

  Attributes:
    contributions: by data shard: 'ticket', 'worker', 'reads' (the version that
      was read from each server) and 'seconds', simulated, of the update.
    versions: that gradients of later updates were read from, so far.
  """

  contributions: list[dict]
  versions: Collection[int]


class Timeline:
  """Simulated workers, each between its requests to the servers.

  A worker's pass takes config.strategy.simulate's times; its gradients in
  flight share its one device, first come, first served. Of several servers, the
  first answers after its share of the pull, and the others are read then.
  """

  def __init__(self, config, records: list[dict], total: int, version: int):
    """Starts all workers, where the log's last update ended.

    Args:
      config: of the run, with its batch size.
      records: of its log; see `log.read`.
      total: updates of the whole run.
      version: of the state that the run starts from.
    """
    self._config, self._settings = config, config.strategy.simulate
    workers = self._settings.workers
    self._seconds = log_lib.simulated_seconds(records, version)
    used = log_lib.used_steps(records, version)
    # Nobody dies, so no lease ever ends.
    self._scheduler = scheduler_lib.TicketScheduler(
      config, total, version, used, workers, clock=float
    )
    self._images = config.batch_size // self._scheduler.data_shards
    self._numbers = itertools.count()  # of events, for those of one time
    self._events = []  # heap of (seconds, number, process)
    self._waiting = []  # processes, until the next update
    self._reads = {}  # process's name and ticket -> versions
    self._updates = []
    self._free_at = [self._seconds] * workers
    synchronous = config.strategy.mode == 'synchronous'
    in_flight = 1 if synchronous else config.strategy.in_flight
    for _ in range(in_flight):
      for index in range(workers):
        self._schedule(0.0, self._gradients(index))

  def __iter__(self) -> Iterator[Update]:
    """Yields the updates in order, as far ahead of the weights as asked."""
    while self._events:
      self._seconds, _, process = heapq.heappop(self._events)
      delay = next(process, _ENDED)
      yield from self._updates
      self._updates.clear()
      if delay is None:
        self._waiting.append(process)
      elif delay is not _ENDED:
        self._schedule(delay, process)

  def _schedule(self, delay, process):
    event = self._seconds + delay, next(self._numbers), process
    heapq.heappush(self._events, event)

  def _gradients(self, index):
    """One gradient in flight of a worker after the other.

    Yields:
      Seconds until it goes on; None: once the next update has been made.
    """
    name, scheduler = f'worker {index}', self._scheduler
    for count in itertools.count():
      ticket = yield from self._answer(scheduler.take, name)
      if ticket == scheduler_lib.OVER:
        return
      version = yield from self._answer(scheduler.begin_read, name, ticket)
      if version == scheduler_lib.DROP:
        continue
      reads = self._reads[name, ticket] = [version]
      yield from self._pull(reads)
      seconds = self._pass_seconds(index, ticket, count)
      end = max(self._seconds, self._free_at[index]) + seconds
      self._free_at[index] = end
      yield end - self._seconds
      yield self._settings.push_seconds
      contribution = {'ticket': list(ticket), 'worker': name, 'reads': reads}
      answer = yield from self._answer(scheduler.commit, name, ticket, contribution)
      self._end(name, ticket, answer)

  def _answer(self, request, *arguments):
    """Makes a request until the answer is not WAIT."""
    while (answer := request(*arguments)) == scheduler_lib.WAIT:
      yield None
    return answer

  def _pull(self, reads):
    pull, servers = self._settings.pull_seconds, self._config.strategy.servers
    yield pull / servers
    if servers > 1:
      reads += [self._scheduler.version] * (servers - 1)
      yield pull - pull / servers

  def _pass_seconds(self, index, ticket, count):
    words = (self._config.seed, *ticket, index, count)
    return emulation.pass_seconds(self._settings, self._images, words, index)

  def _end(self, name, ticket, answer):
    """Notes what a commit has changed, and wakes whoever waits for it."""
    del self._reads[name, ticket]
    if isinstance(answer, list) and answer:
      for contribution in answer:
        contribution['seconds'] = self._seconds
      versions = {v for reads in self._reads.values() for v in reads}
      self._updates.append(Update(answer, versions))
    for process in self._waiting:
      self._schedule(0.0, process)
    self._waiting = []
