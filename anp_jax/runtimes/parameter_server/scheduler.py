"""Server 0's scheduler: which worker computes what, and the order of updates.

Nothing here waits, sends or computes: its methods are called with a lock held,
and return what to do. A ticket is (step, data shard): the batch of that step,
or one of the equal parts of it that a synchronous update is made of. Version n
is the weights after n updates.
"""

import heapq
import itertools
import math

import ml_collections

from anp_jax import config as config_lib

WAIT, DROP = 'wait', 'drop'


class TicketScheduler:
  """Tickets, reads and the order of updates.

  Attributes:
    version: updates ordered so far.
    limit: version at which the run ends; `stop` brings it forward.
    data_shards: parts of a batch that an update is made of.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    total: int,
    version: int,
    used: set[int],
    workers: int = 1,
  ):
    """Starts from a version, with no ticket leased.

    Args:
      config: the run's config.
      total: updates of the whole run.
      version: version of the state that the run starts from.
      used: steps whose batches are in that state.
      workers: workers of the run; in mode 'synchronous' an update is made of as
        many data shards, less config.strategy.backup_workers.
    """
    s = config.strategy
    # A run may be resumed with a shorter duration than it has had.
    self.version, self.limit = version, max(total, version)
    self.data_shards = data_shards(config, workers)
    self._settings = s
    # Not the updates of the run: more workers than these may read one version.
    self._bound = s.max_staleness if s.mode == 'bounded' else math.inf
    self._spares = s.backup_workers if self._is_synchronous else total
    unused = (step for step in itertools.count() if step not in used)
    self._steps = itertools.islice(unused, self.limit - version)  # batches not leased yet
    self._free: list[tuple[int, int]] = []  # heap of tickets that wait for a worker
    # Ticket -> {worker: version that it read, or None}
    self._leases: dict[tuple[int, int], dict[str, int | None]] = {}
    # Data shard -> worker and contribution, of the update being made
    self._committed: dict[int, tuple[str, dict]] = {}

  @property
  def _is_synchronous(self):
    return self._settings.mode == 'synchronous'

  def take(self, worker: str) -> tuple[int, int] | str:
    """Leases a ticket; WAIT if there is none now, or no more."""
    if self.version >= self.limit:
      return WAIT
    needs_batch = not self._free
    if self._is_synchronous:
      if any(worker in lease for lease in self._leases.values()):
        return WAIT
      needs_batch = not (self._free or self._leases or self._committed)
    if needs_batch and (step := next(self._steps, None)) is not None:
      self._free = [(step, shard) for shard in range(self.data_shards)]
    ticket = heapq.heappop(self._free) if self._free else self._spare(worker)
    if ticket is None:
      return WAIT
    self._leases.setdefault(ticket, {})[worker] = None
    return ticket

  def begin_read(self, worker: str, ticket: tuple[int, int]) -> int | str:
    """Returns the version to read for a ticket, or WAIT or DROP."""
    if worker not in self._leases.get(ticket, ()):
      return DROP
    reads = [*self._other_reads(worker, ticket), self.version]
    if not self._keeps_bound(reads, self.version):
      return WAIT
    self._leases[ticket][worker] = self.version
    return self.version

  def commit(self, worker: str, ticket: tuple[int, int], contribution: dict) -> list[dict] | str:
    """Accepts a gradient that all servers hold, unless its ticket is used.

    Args:
      worker: name of the worker that computed it.
      ticket: its ticket.
      contribution: record for the log; it has 'reads'.

    Returns:
      WAIT (call again), DROP, or the contributions of the update that is
      complete now, by data shard; [] where some are missing.
    """
    is_open = ticket in self._leases or ticket in self._free
    if not is_open or self.version >= self.limit:
      return DROP
    stale = self.version - contribution['reads'][0]
    if stale > self._bound:  # this worker's lease was given to another
      return DROP
    if not self._is_synchronous and not self._keeps_bound(
      self._other_reads(worker, ticket), self.version + 1
    ):
      return WAIT
    self._leases.pop(ticket, None)
    if ticket in self._free:  # the lease was released, and yet it is the first
      self._free.remove(ticket)
      heapq.heapify(self._free)
    self._committed[ticket[1]] = worker, contribution
    if len(self._committed) < self.data_shards:
      return []
    contributions = [self._committed[i][1] for i in range(self.data_shards)]
    self._committed = {}
    self.version += 1
    return contributions

  def release(self, worker: str) -> None:
    """Gives a worker's tickets to others."""
    for ticket, lease in list(self._leases.items()):
      if worker in lease:
        del lease[worker]
        if not lease:
          del self._leases[ticket]
          heapq.heappush(self._free, ticket)

  def reads(self) -> set[int]:
    """Returns the versions that the gradients under way have read."""
    leases = self._leases.values()
    return {read for lease in leases for read in lease.values() if read is not None}

  def stop(self) -> None:
    """Ends the run at the version that it has."""
    self.limit = min(self.limit, self.version)

  def _spare(self, worker):
    """A ticket that another worker has had for longest, to be quicker."""
    # One that began now would still compute when the next update begins, and
    # that one would lack a worker: a second pass takes as long as the first.
    if worker in [contributor for contributor, _ in self._committed.values()]:
      return None
    twice = sum(len(lease) > 1 for lease in self._leases.values())
    if twice >= self._spares:
      return None
    alone = (
      ticket for ticket, lease in self._leases.items() if len(lease) == 1 and worker not in lease
    )
    return next(alone, None)

  def _other_reads(self, worker, ticket):
    """The versions that all other leases have read."""
    return [
      version
      for other_ticket, lease in self._leases.items()
      for holder, version in lease.items()
      if version is not None and (other_ticket, holder) != (ticket, worker)
    ]

  def _keeps_bound(self, reads, version):
    """Whether gradients of these reads can all count in time from `version`.

    The oldest first is the best order, and each waits for those before it.
    """
    return all(version + place - read <= self._bound for place, read in enumerate(sorted(reads)))


def data_shards(config: ml_collections.ConfigDict, workers: int) -> int:
  """Returns the number of parts of a batch that an update is made of.

  Raises:
    ConfigError: if there are as many backup workers as workers.
  """
  s = config.strategy
  if s.mode != 'synchronous':
    return 1
  if s.backup_workers >= workers:
    raise config_lib.ConfigError(
      f'config.strategy.backup_workers={s.backup_workers}: expected less than the {workers} workers'
    )
  return workers - s.backup_workers
