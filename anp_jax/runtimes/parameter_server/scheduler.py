"""Server 0's scheduler: which worker computes what, and the order of updates.

Nothing here waits, sends or computes: its methods are called with a lock held,
and return what to do. A ticket is (step, data shard): the batch of that step, or one
of its equal parts; an update is made of as many. Version n is the weights after n
updates.
"""

import heapq
import itertools

import ml_collections

from anp_jax import config as config_lib


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
    used: set[tuple[int, int]],
    workers: int = 1,
  ):
    """Starts from a version, with no ticket leased.

    Args:
      config: the run's config.
      total: updates of the whole run.
      version: version of the state that the run starts from.
      used: tickets whose examples are in that state.
      workers: workers of the run; see `data_shards`.
    """
    s = config.strategy
    # A run may be resumed with a shorter duration than it has had.
    self.version, self.limit = version, max(total, version)
    self.data_shards = data_shards(config, workers)
    self._is_synchronous = s.mode == 'synchronous'
    self._drops_late = s.mode != 'async'
    self._workers = workers
    tickets = (divmod(number, self.data_shards) for number in itertools.count())
    unused = (ticket for ticket in tickets if ticket not in used)
    # Those not leased yet
    self._tickets = itertools.islice(unused, (self.limit - version) * self.data_shards)
    self._free: list[tuple[int, int]] = []  # heap of tickets that wait for a worker
    # Ticket -> {worker: version that it read, or None}
    self._leases: dict[tuple[int, int], dict[str, int | None]] = {}
    # Ticket -> worker and contribution, of the update being made
    self._committed: dict[tuple[int, int], tuple[str, dict]] = {}

  def take(self, worker: str) -> tuple[int, int] | None:
    """Leases a ticket; None if there is none now, or no more."""
    if self.version >= self.limit:
      return None
    if self._is_synchronous and not self._may_contribute(worker):
      return None
    if not self._free:
      self._free = list(itertools.islice(self._tickets, self.data_shards))
    ticket = heapq.heappop(self._free) if self._free else self._spare(worker)
    if ticket is not None:
      self._leases.setdefault(ticket, {})[worker] = None
    return ticket

  def begin_read(self, worker: str, ticket: tuple[int, int]) -> int | None:
    """Returns the version to read for a ticket; None if that is not the worker's any more."""
    if worker not in self._leases.get(ticket, ()):
      return None
    self._leases[ticket][worker] = self.version
    return self.version

  def accepts(self, ticket: tuple[int, int], read: int) -> bool:
    """Returns whether a gradient of a ticket and a version still counts."""
    is_open = ticket in self._leases or ticket in self._free
    is_late = self._drops_late and read < self.version
    return is_open and self.version < self.limit and not is_late

  def commit(self, worker: str, ticket: tuple[int, int], contribution: dict) -> list[dict] | None:
    """Takes a gradient that all servers hold, if `accepts` says so.

    Args:
      worker: name of the worker that computed it.
      ticket: its ticket.
      contribution: record for the log; it has 'reads'.

    Returns:
      The contributions of the update that is complete now, by ticket; [] where some
      are missing; None if the gradient is dropped.
    """
    if not self.accepts(ticket, contribution['reads'][0]):
      return None
    self._leases.pop(ticket, None)
    if ticket in self._free:  # the lease was released, and yet it is the first
      self._free.remove(ticket)
      heapq.heapify(self._free)
    self._committed[ticket] = worker, contribution
    if len(self._committed) < self.data_shards:
      return []
    contributions = [self._committed[t][1] for t in sorted(self._committed)]
    self._committed = {}
    self.version += 1
    if self._drops_late:
      self._release(lambda _, read: read is not None and read < self.version)
    return contributions

  def release(self, worker: str) -> None:
    """Gives a worker's tickets to others."""
    self._release(lambda holder, _: holder == worker)

  def reads(self) -> set[int]:
    """Returns the versions that the gradients under way have read."""
    leases = self._leases.values()
    return {read for lease in leases for read in lease.values() if read is not None}

  def stop(self) -> None:
    """Ends the run at the version that it has."""
    self.limit = min(self.limit, self.version)

  def _release(self, is_given_up):
    """Ends leases of (worker, version that it read)."""
    for ticket, lease in list(self._leases.items()):
      self._leases[ticket] = {w: read for w, read in lease.items() if not is_given_up(w, read)}
      if not self._leases[ticket]:
        del self._leases[ticket]
        heapq.heappush(self._free, ticket)

  def _may_contribute(self, worker):
    """Whether a synchronous update takes one gradient more from a worker."""
    if any(worker in lease for lease in self._leases.values()):
      return False
    # Who has contributed computes again only if too few others are there, or if no other
    # update follows that its second pass would delay.
    has_contributed = any(worker == contributor for contributor, _ in self._committed.values())
    is_last = self.version == self.limit - 1
    most = self.data_shards if has_contributed and not is_last else self._workers
    return len(self._leases) + len(self._committed) < most

  def _spare(self, worker):
    """A ticket that one other worker has had for longest, to be quicker."""
    alone = (t for t, lease in self._leases.items() if len(lease) == 1 and worker not in lease)
    return next(alone, None)


def check_batch(config: ml_collections.ConfigDict, data_shards: int) -> None:
  """Refuses a batch size that the parts of an update do not divide.

  Raises:
    ConfigError: naming the batch size.
  """
  if config.batch_size % data_shards:
    hint = '; config.strategy.parts sets their number' * (config.strategy.mode == 'rennala')
    raise config_lib.ConfigError(
      f'config.batch_size={config.batch_size} does not divide by the '
      f'{data_shards} parts that an update is made of{hint}'
    )


def data_shards(config: ml_collections.ConfigDict, workers: int) -> int:
  """Returns the number of parts of a batch that an update is made of.

  Raises:
    ConfigError: if there are as many backup workers as workers.
  """
  s = config.strategy
  if s.mode != 'synchronous':
    return s.parts or workers if s.mode == 'rennala' else 1
  if s.backup_workers >= workers:
    raise config_lib.ConfigError(
      f'config.strategy.backup_workers={s.backup_workers}: expected less than the {workers} workers'
    )
  return workers - s.backup_workers
