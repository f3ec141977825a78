"""Server 0's desk: which worker computes what, and in which order it counts.

Nothing here waits, sends or computes: it is asked, with a lock held, and says
what is to be done. A ticket is (step, shard): the batch of that step, or one of
the equal parts that a synchronous update is made of. Version n is the weights
after n updates.
"""

import heapq
import time

from anp_jax import config as config_lib

WAIT, DROP, OVER = 'wait', 'drop', 'over'


class Desk:
  """Tickets, reads and the order of updates.

  Attributes:
    version: updates ordered so far.
    limit: version at which the run ends; `stop` brings it forward.
  """

  def __init__(
    self, config, total: int, version: int, used: set[int], workers: int = 1,
    clock=time.monotonic,
  ):  # fmt: skip
    """Makes the desk.

    Args:
      config: the run's config.
      total: updates of the whole run.
      version: of the state that the run goes on from.
      used: steps whose batches are in that state.
      workers: of the run; in mode 'synchronous' an update is made of as many
        shards, less config.strategy.backup_workers.
      clock: returns seconds that never run backwards.
    """
    s = config.strategy
    self.version, self.limit = version, total
    self.shards = shards(config, workers)
    self._synchronous = s.mode == 'synchronous'
    # An unbounded run is one whose bound is never met.
    self._bound = s.max_staleness if s.mode == 'bounded' else total
    self._spares = s.backup_workers if self._synchronous else total
    self._timeout = s.ticket_timeout
    self._clock = clock
    self._used = used
    self._next = 0  # no batch of a smaller step is left
    self._left = total - version  # batches not handed out yet
    self._free = []  # heap of tickets that wait for a worker
    self._holders = {}  # ticket -> workers, of those that are being computed
    self._reads = {}  # (ticket, worker) -> version
    self._parts = {}  # shard -> part, of the synchronous update being made
    self._heard = {}  # worker -> when

  def take(self, worker: str):
    """A ticket for this worker; WAIT if there is none now, OVER at the end."""
    self._hear(worker)
    if self.version >= self.limit:
      return OVER
    if self._synchronous:
      if any(worker in holders for holders in self._holders.values()):
        return WAIT
      if not (self._free or self._holders or self._parts):
        step = self._next_step()
        self._free = [(step, shard) for shard in range(self.shards)]
    elif not self._free and self._left:
      self._free = [(self._next_step(), 0)]
    ticket = heapq.heappop(self._free) if self._free else self._spare(worker)
    if ticket is None:
      return WAIT
    self._holders.setdefault(ticket, []).append(worker)
    return ticket

  def begin(self, worker: str, ticket):
    """The version that a worker may read for a ticket, or WAIT or DROP."""
    self._hear(worker)
    if worker not in self._holders.get(ticket, ()):
      return DROP
    others = [v for key, v in self._reads.items() if key != (ticket, worker)]
    if not self._keeps_bound([*others, self.version], self.version):
      return WAIT
    self._reads[ticket, worker] = self.version
    return self.version

  def commit(self, worker: str, ticket, part: dict):
    """Takes a gradient that all servers hold, unless its ticket is used.

    Args:
      worker: that computed it.
      ticket: of it.
      part: for the log; 'reads' among it.

    Returns:
      WAIT (ask again), DROP, or the parts of the update that is complete now,
      by shard; [] where others are missing.
    """
    self._hear(worker)
    is_open = ticket in self._holders or ticket in self._free
    if not is_open or self.version >= self.limit:
      return DROP
    stale = self.version - part['reads'][0]
    others = [v for key, v in self._reads.items() if key != (ticket, worker)]
    if stale > self._bound:  # this worker had been given up
      return DROP
    if not self._synchronous and not self._keeps_bound(
      others, self.version + 1
    ):
      return WAIT
    for holder in self._holders.pop(ticket, ()):
      self._reads.pop((ticket, holder), None)
    if ticket in self._free:  # given up, and yet the first to be done
      self._free.remove(ticket)
      heapq.heapify(self._free)
    self._parts[ticket[1]] = part
    if len(self._parts) < self.shards:
      return []
    parts = [self._parts[shard] for shard in range(self.shards)]
    self._parts = {}
    self.version += 1
    return parts

  def leave(self, worker: str) -> None:
    """Gives a worker's tickets to others."""
    for ticket in [t for t, held in self._holders.items() if worker in held]:
      self._leave(worker, ticket)
    self._heard.pop(worker, None)

  def look(self) -> None:
    """Gives up on workers that have been silent for too long."""
    now = self._clock()
    for worker, heard in list(self._heard.items()):
      if now - heard > self._timeout:
        self.leave(worker)

  def stop(self) -> None:
    """Ends the run at the version that it has."""
    self.limit = min(self.limit, self.version)

  def _hear(self, worker):
    self._heard[worker] = self._clock()

  def _next_step(self):
    while self._next in self._used:
      self._next += 1
    self._left -= 1
    self._next += 1
    return self._next - 1

  def _leave(self, worker, ticket):
    holders = self._holders[ticket]
    holders.remove(worker)
    self._reads.pop((ticket, worker), None)
    if not holders:
      del self._holders[ticket]
      heapq.heappush(self._free, ticket)

  def _spare(self, worker):
    """A ticket that another worker has had for longest, to be quicker."""
    twice = sum(len(held) > 1 for held in self._holders.values())
    if twice >= self._spares:
      return None
    alone = (
      t
      for t, held in self._holders.items()
      if len(held) == 1 and worker not in held
    )
    return next(alone, None)

  def _keeps_bound(self, reads, version):
    """Whether gradients of these reads can all count in time from `version`.

    The oldest first is the best order, and each waits for those before it.
    """
    return all(
      version + place - read <= self._bound
      for place, read in enumerate(sorted(reads))
    )


def ahead(config, workers: int) -> float:
  """Updates that the weights which workers get are ahead of those applied.

  As many as come between the reading of a worker and the use of its gradient
  where all are equally quick, config.strategy.weight_prediction times.
  """
  s = config.strategy
  stale = workers * s.lanes - 1
  if s.mode == 'bounded':
    stale = min(stale, s.max_staleness)
  return s.weight_prediction * (0 if s.mode == 'synchronous' else stale)


def shards(config, workers: int) -> int:
  """Parts of a batch that an update is made of.

  Raises:
    ConfigError: if there are as many backup workers as workers.
  """
  s = config.strategy
  if s.mode != 'synchronous':
    return 1
  if s.backup_workers >= workers:
    raise config_lib.ConfigError(
      f'config.strategy.backup_workers={s.backup_workers}: expected less than '
      f'the {workers} workers'
    )
  return workers - s.backup_workers
