"""A server's session: what it serves from its start to the end of the run."""

import collections
from collections.abc import Callable, Iterator
import contextlib
import threading
import time

from pyarrow import flight

from anp_jax.runtimes.parameter_server import (
  log as log_lib,
  parameter_store,
  scheduler as scheduler_lib,
  slice_optimizer,
)
from anp_jax.system import error_lines

# Seconds that a call waits for what is not there yet; then it is made again.
PATIENCE = 2.0
# Keys of a contribution in the log.
_LOGGED = 'ticket', 'worker', 'reads', 'weight'


class Session:
  """What a server serves: its slice."""

  def __init__(self, store: parameter_store.ParameterStore):
    self.store = store


def snapshot_test(settings: dict) -> Callable[[int], bool]:
  """Returns version -> whether its state is to be scored or saved."""
  return lambda version: any(version % every == 0 for every in settings['snapshot_every'])


class ChiefSession(Session):
  """Server 0's session: the order of the updates.

  Attributes:
    scheduler: scheduler of the tickets.
    log: log of the updates.
    starts: SliceState that each server begins with.
    devices: devices of each worker; None before the first has come.
    failed: why the run cannot continue.
    applied: (seconds, version, contributions) of updates that telemetry has not
      read yet.
  """

  def __init__(
    self,
    store: parameter_store.ParameterStore,
    scheduler: scheduler_lib.TicketScheduler,
    log: log_lib.UpdateLog,
    starts: list[slice_optimizer.SliceState],
  ):
    """Opens the session for the other processes.

    Args:
      store: slice 0.
      scheduler: scheduler of the tickets.
      log: log of the updates.
      starts: SliceState that each server begins with.
    """
    super().__init__(store)
    self.scheduler = scheduler
    self.log = log
    self.starts = starts
    self.devices: int | None = None
    self.failed = ''
    self.applied: collections.deque = collections.deque()
    # Sessions of each worker: calls of earlier ones may still wait.
    self._sessions: collections.Counter[str] = collections.Counter()
    self._is_closed = False
    self._updates: list[tuple] = []  # those that other servers have not asked for yet
    # Server -> version from which it asked for updates last
    self._since = dict.fromkeys(range(1, len(starts)), scheduler.version)
    self._changed = threading.Condition()

  def release(self, worker: str) -> dict:
    """Gives the tickets of a worker to others; answers with its next session's number.

    Its connection or its process is lost: no answer to its earlier calls reaches it.
    """
    with self._changing():
      self.scheduler.release(worker)
      self._sessions[worker] += 1
      return {'session': self._sessions[worker], 'version': self.store.version}

  def take(self, worker: str, session: int = 0) -> dict:
    """Answers with a ticket, or nothing yet, and never a ticket to an earlier session."""

    def take():
      self._refuse_if_closed()
      return self.scheduler.take(worker) if session == self._sessions[worker] else None

    with self._changed:
      ticket = self._changed.wait_for(take, PATIENCE)
    return {'ticket': ticket} if ticket else {'wait': True}

  def begin_read(self, worker: str, ticket: tuple[int, int]) -> int | None:
    """Returns the version to read for a ticket; None if that is not the worker's any more."""
    with self._changed:
      self._refuse_if_closed()
      return self.scheduler.begin_read(worker, ticket)

  def check(self, ticket: list[int], read: int) -> dict:
    """Answers whether a gradient would be dropped, before it is sent."""
    with self._changed:
      is_open = self.scheduler.accepts((ticket[0], ticket[1]), read)
    return {} if is_open else {'drop': True}

  def commit(self, worker: str, contribution: dict) -> dict:
    """Accepts a gradient that all servers hold."""
    ticket = ticket_of(contribution)
    with self._changing():
      self._refuse_if_closed()
      if not self.store.has_gradient(ticket, worker):
        raise parameter_store.InvalidMessageError(f'no gradient of {worker} for ticket {ticket}')
      version = self.scheduler.version
      contribution = {**contribution, 'worker': worker}
      contributions = self.scheduler.commit(worker, ticket, contribution)
      if contributions:
        self._submit(version, contributions)
    return {'drop': True} if contributions is None else {}

  def updates(self, server: int, since: int) -> dict:
    """Answers another server with the updates from version `since` on: it has those before."""
    with self._changed:
      self._changed.wait_for(lambda: self.scheduler.version > since or self._is_closed, PATIENCE)
      self._since[server] = max(since, self._since[server])  # a late call has an earlier one
      oldest = min(self._since.values())
      self._updates = [update for update in self._updates if update[0] >= oldest]
      return {'updates': [update for update in self._updates if update[0] >= since][:64]}

  def stop(self) -> None:
    """Ends the run at its present version."""
    with self._changing():
      self.scheduler.stop()

  def fail(self, text: str) -> None:
    """Ends the run in an error."""
    with self._changing():
      self.failed = self.failed or text

  def close(self) -> None:
    """Refuses all calls from now on."""
    with self._changing():
      self._is_closed = True
      self.store.close()
      self.log.close()

  @contextlib.contextmanager
  def _changing(self) -> Iterator[None]:
    """Holds the lock, and then wakes the calls that wait."""
    with self._changed:
      yield
      self._changed.notify_all()

  def _submit(self, version, contributions):
    logged = [{k: c[k] for k in _LOGGED} for c in contributions]
    try:
      self.log.append(version, self.devices, logged)
    except OSError as e:  # a full disk: no worker could mend it
      self.fail(f'the updates cannot be recorded: {error_lines.typed_line(e)}')
      return
    if len(self.starts) > 1:
      self._updates.append((version, logged))
    self.applied.append((time.monotonic(), version, contributions))
    self.store.submit(version, logged)

  def _refuse_if_closed(self):
    if self._is_closed or self.failed:  # since the request came
      raise flight.FlightUnavailableError('the run is over')


def ticket_of(request: dict) -> tuple[int, int]:
  """Returns a request's (step, data shard)."""
  step, shard = request['ticket']
  return int(step), int(shard)
