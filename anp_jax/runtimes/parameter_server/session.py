"""A server's session: what it serves between one roll-back and the next."""

import collections
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import threading
import time
from typing import Any

from pyarrow import flight

from anp_jax.cluster import process_info
from anp_jax.runtimes import addresses as addresses_lib
from anp_jax.runtimes.parameter_server import (
  log as log_lib,
  parameter_store,
  scheduler as scheduler_lib,
  slice_optimizer,
)

# Seconds that a call waits for what is not there yet; then it is made again.
PATIENCE = 2.0
# Status of a chief's session: it serves; a server has lost its slice, so that all
# must roll back; the last version is scored and saved; no call is answered.
OPEN, LOST, FINISHED, CLOSED = 'open', 'lost', 'finished', 'closed'
# Keys of a contribution in the log; 'seconds' in a simulation only.
_LOGGED = 'ticket', 'worker', 'reads', 'weight', 'seconds'


class Session:
  """A server's time between one start, or roll-back, and the next.

  Attributes:
    name: name that every request must show; no other session has it.
    store: this server's slice.
  """

  def __init__(self, name: str, store: parameter_store.ParameterStore):
    self.name = name
    self.store = store


def snapshot_test(settings: dict) -> Callable[[int], bool]:
  """Returns version -> whether its state is to be scored or saved."""
  return lambda version: any(version % every == 0 for every in settings['snapshot_every'])


@dataclasses.dataclass
class Roster:
  """The processes that take part in a session.

  Attributes:
    process: server 0's process, see `cluster.process_info`.
    settings: JSON values for each process that joins.
    addresses: address of each server that has joined, by index.
    launches: launches of all processes of the run, see `rendezvous.launch_id`.
    devices: devices of each worker; None before the first has joined.
    left: processes that have heard of the end: workers by name, servers by index.
  """

  process: dict
  settings: dict
  addresses: dict[int, str]
  launches: set[str] = dataclasses.field(default_factory=set)
  devices: int | None = None
  left: set = dataclasses.field(default_factory=set)

  def server_problem(self, address: str, process: dict) -> str:
    """Returns why a process cannot be a server; '' if it can."""
    # Its devices may be others: a server computes on its CPU.
    return process_info.run_mismatch(process, self.process) or addresses_lib.problem(address)

  def worker_problem(self, process: dict, devices: int) -> str:
    """Returns why a process cannot be a worker; '' if it can."""
    if self.devices not in (None, devices):
      return (
        f'{devices} devices, but the first worker has {self.devices}: a replay needs them alike'
      )
    return process_info.first_mismatch([self.process, {**process, 'index': 1}])


class ChiefSession(Session):
  """Server 0's session: the order, and which processes take part.

  Attributes:
    scheduler: scheduler of the tickets.
    log: log of the updates.
    starts: SliceState that each server begins with.
    roster: processes that take part.
    status: OPEN, LOST, FINISHED or CLOSED.
    failed: why the run cannot continue.
    applied: (seconds, version, contributions) of updates that telemetry has not
      read yet.
    seconds: version -> simulated seconds until it was made, in a simulation.
  """

  def __init__(
    self,
    name: str,
    store: parameter_store.ParameterStore,
    scheduler: scheduler_lib.TicketScheduler,
    log: log_lib.UpdateLog,
    starts: list[slice_optimizer.SliceState],
    roster: Roster,
  ):
    """Opens the session for the other processes.

    Args:
      name: name of the session.
      store: slice 0.
      scheduler: scheduler of the tickets.
      log: log of the updates.
      starts: SliceState that each server begins with.
      roster: processes that take part: server 0.
    """
    super().__init__(name, store)
    self.scheduler = scheduler
    self.log = log
    self.starts = starts
    self.roster = roster
    self.status = OPEN
    self.failed = ''
    self.applied: collections.deque = collections.deque()
    self.seconds: dict[int, float] = {}
    self._updates: list[tuple] = []  # all of the session, for the other servers
    self._changed = threading.Condition()

  def join(self, server: int, address: str, process: dict, launch: str = '') -> dict:
    """Admits another server, which then fetches its slice of the start."""
    roster = self.roster
    problem = roster.server_problem(address, process)
    with self._changing():
      if problem:
        self.fail(problem)  # the run needs this server
        return {'problem': problem}
      roster.launches.add(launch)
      if self.status != OPEN or server in roster.addresses:
        # It has restarted, and lost its slice: all begin another session.
        if self.status == OPEN:
          self.status = LOST
        return {'wait': True}
      roster.addresses[server] = address
      return {'session': self.name, **roster.settings}

  def hello(self, worker: str, process: dict, devices: int, launch: str = '') -> dict:
    """Admits a worker, or the same worker after a lost connection."""
    roster = self.roster
    problem = roster.worker_problem(process, devices)
    with self._changed:
      if problem:
        return {'problem': problem}
      roster.devices = devices
      roster.launches.add(launch)
      self.scheduler.release(worker)
      servers = [roster.addresses.get(i) for i in range(len(self.starts))]
      if not all(servers):
        return {'wait': True}
      return {'session': self.name, 'servers': servers, **roster.settings}

  def take(self, worker: str) -> dict:
    """Answers with a ticket, the end, or nothing yet."""
    answer = self._wait_for(lambda: self.scheduler.take(worker))
    if self.failed or answer == scheduler_lib.OVER:
      self._note_left(worker)
    if self.failed:
      return {'failed': self.failed}
    return {answer: True} if isinstance(answer, str) else {'ticket': answer}

  def begin_read(self, worker: str, ticket: tuple[int, int]) -> int | str:
    """Returns the version to read for a ticket, WAIT or DROP."""
    return self._wait_for(lambda: self.scheduler.begin_read(worker, ticket))

  def commit(self, worker: str, contribution: dict) -> dict:
    """Accepts a gradient that all servers hold."""
    contribution = {**contribution, 'worker': worker}
    answer = self._wait_for(lambda: self._commit(worker, contribution))
    return {answer: True} if isinstance(answer, str) else {}

  def order(self, contributions: list[dict], devices: int) -> bool:
    """Makes the next update of what a simulation has ordered.

    Args:
      contributions: workers' reports, whose gradients are pending,
        and 'seconds': simulated, until the update.
      devices: devices that computed each gradient.

    Returns:
      Whether the update was wanted: the run has not been stopped.
    """
    with self._changing():
      version = self.scheduler.version
      if version >= self.scheduler.limit or self._has_ended() or self.status == CLOSED:
        return False
      self.roster.devices = devices
      self.scheduler.version += 1
      self.seconds[version + 1] = contributions[0]['seconds']
      self._submit(version, contributions)
    return True

  def updates(self, since: int, server: int) -> dict:
    """Answers another server with the updates from version `since` on."""
    with self._changed:
      self._changed.wait_for(lambda: self.scheduler.version > since or self._has_ended(), PATIENCE)
      if self._has_ended():
        self._note_left(server)
      first = self.scheduler.version - len(self._updates)
      return {'updates': self._updates[since - first :][:64], 'ended': self._has_ended()}

  def stop(self) -> None:
    """Ends the run at its present version."""
    with self._changing():
      self.scheduler.stop()

  def fail(self, text: str) -> None:
    """Ends the run in an error."""
    with self._changing():
      self.failed = self.failed or text

  def finish(self) -> None:
    """Lets all processes end: the last version is scored and saved."""
    with self._changing():
      self.status = FINISHED

  def wait_until_alone(self, count: int, timeout: float) -> None:
    """Waits until `count` processes have heard of the end, or a while."""
    with self._changed:
      self._changed.wait_for(lambda: len(self.roster.left) >= count, timeout)

  def close(self) -> None:
    """Refuses all calls from now on: their processes reconnect."""
    with self._changing():
      self.status = CLOSED
      self.store.close()
      self.log.close()

  @contextlib.contextmanager
  def _changing(self) -> Iterator[None]:
    """Holds the lock, and then wakes the calls that wait."""
    with self._changed:
      yield
      self._changed.notify_all()

  def _has_ended(self):
    return self.status == FINISHED or bool(self.failed)

  def _note_left(self, process):
    with self._changing():
      self.roster.left.add(process)

  def _commit(self, worker, contribution):
    ticket = ticket_of(contribution)
    if not self.store.has_gradient(ticket, worker):
      raise parameter_store.InvalidMessageError(f'no gradient of {worker} for ticket {ticket}')
    version = self.scheduler.version
    contributions = self.scheduler.commit(worker, ticket, contribution)
    if isinstance(contributions, list) and contributions:
      self._submit(version, contributions)
    return contributions

  def _submit(self, version, contributions):
    logged = [{k: c[k] for k in _LOGGED if k in c} for c in contributions]
    self.log.append(version, self.roster.devices, logged)
    if len(self.starts) > 1:
      self._updates.append((version, logged))
    self.applied.append((time.monotonic(), version, contributions))
    self.store.submit(version, logged)

  def _wait_for(self, request) -> Any:
    """The scheduler's answer, or WAIT if it stays that for a while."""
    deadline = time.monotonic() + PATIENCE
    with self._changed:
      while True:
        if self.status == CLOSED:  # since the request came
          raise another_session()
        self.scheduler.expire_leases()
        answer = request()
        left = deadline - time.monotonic()
        if answer != scheduler_lib.WAIT or left <= 0 or self.failed:
          self._changed.notify_all()
          return answer
        self._changed.wait(min(left, 0.5))


def another_session() -> flight.FlightUnavailableError:
  """Returns the error that makes a caller reconnect."""
  return flight.FlightUnavailableError('of another session: reconnect')


def ticket_of(request: dict) -> tuple[int, int]:
  """Returns a request's (step, data shard)."""
  step, shard = request['ticket']
  return int(step), int(shard)
