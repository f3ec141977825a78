"""A server's session: what it serves between one roll-back and the next."""

import collections
import contextlib
import dataclasses
import threading
import time

import numpy as np
from pyarrow import flight

from anp_jax.cluster import process_info
from anp_jax.runtimes import addresses as addresses_lib
from anp_jax.runtimes.parameter_server import parameter_store, scheduler as scheduler_lib

# Seconds that a call waits for what is not there yet; then it is made again.
PATIENCE = 2.0
# Of a contribution; 'seconds' in a simulation only.
_LOGGED = 'ticket', 'worker', 'reads', 'weight', 'seconds'


class Session:
  """A server's time between one start, or roll-back, and the next.

  Attributes:
    name: that every request must show; no other session has it.
    store: of this server's slice.
  """

  def __init__(self, name: str, store: parameter_store.ParameterStore):
    self.name = name
    self.store = store


@dataclasses.dataclass(frozen=True)
class RunInfo:
  """What all sessions of a run have in common.

  Attributes:
    address: of server 0.
    process: its process, see `cluster.process_info`.
    settings: for each process that joins, JSON values.
    metric_names: of the values that are reported with each gradient.
    launches: of the processes that take part, see `rendezvous.launch_id`.
  """

  address: str
  process: dict
  settings: dict
  metric_names: tuple[str, ...]
  launches: set = dataclasses.field(default_factory=set)


def snapshot_test(settings: dict):
  """Returns version -> whether its state is to be scored or saved."""
  return lambda version: any(version % every == 0 for every in settings['snapshot_every'])


class ChiefSession(Session):
  """Server 0's session: the order, and which processes take part.

  Attributes:
    scheduler: of the tickets.
    log: `log.UpdateLog`.
    lost: whether a server has lost its slice, so that all must roll back.
    failed: why the run cannot continue.
    finished: whether the last version is scored and saved.
    applied: (seconds, version, contributions) of updates that telemetry has not
      read yet.
    starts: SliceState that each server begins with.
    seconds: version -> simulated seconds until it was made; of a simulation.
    addresses: of the servers that have joined, by index.
  """

  def __init__(self, name, store, scheduler, log, starts, run: RunInfo):
    """Opens the session for the other processes.

    Args:
      name: of the session.
      store: of slice 0.
      scheduler: `scheduler.TicketScheduler`.
      log: `log.UpdateLog`.
      starts: SliceState that each server begins with.
      run: what is the same in all sessions.
    """
    super().__init__(name, store)
    self.scheduler = scheduler
    self.lost = self.finished = self._closed = False
    self.failed = ''
    self.applied = collections.deque()
    self.log = log
    self.starts = starts
    self.seconds = {}
    self._run = run
    self._devices = None  # of a worker
    self.addresses = {0: run.address}
    self._left = set()  # workers by name, servers by number
    self._updates = []  # for the other servers
    self._first = scheduler.version  # version of the first of them
    self._changed = threading.Condition()

  def join(self, server: int, address: str, process: dict, launch: str = '') -> dict:
    """Admits another server, which then fetches its slice of the start."""
    # Its devices may be others: a server computes on its CPU.
    problem = process_info.run_mismatch(process, self._run.process) or addresses_lib.problem(
      address
    )
    with self._changing():
      if problem:
        self.fail(problem)  # the run needs this server
        return {'problem': problem}
      self._run.launches.add(launch)
      if self.lost or server in self.addresses:
        # It has restarted, and lost its slice: all begin another session.
        self.lost = True
        return {'wait': True}
      self.addresses[server] = address
      return {'session': self.name, **self._run.settings}

  def hello(self, worker: str, process: dict, devices: int, launch: str = '') -> dict:
    """Admits a worker, or the same worker after a lost connection."""
    problem = process_info.first_mismatch([self._run.process, {**process, 'index': 1}])
    if self._devices not in (None, devices):
      problem = (
        f'{devices} devices, but the first worker has {self._devices}: a replay needs them alike'
      )
    with self._changed:
      if problem:
        return {'problem': problem}
      self._devices = devices
      self._run.launches.add(launch)
      self.scheduler.release(worker)
      servers = [self.addresses.get(i) for i in range(len(self.starts))]
      if not all(servers):
        return {'wait': True}
      return {'session': self.name, 'servers': servers, **self._run.settings}

  def take(self, worker: str) -> dict:
    """Answers with a ticket, the end, or nothing yet."""
    answer = self._wait_for(lambda: self.scheduler.take(worker))
    if self.failed:
      answer = scheduler_lib.OVER
    if answer == scheduler_lib.OVER:
      self._note_left(worker)
    if self.failed:
      return {'failed': self.failed}
    return {answer: True} if isinstance(answer, str) else {'ticket': answer}

  def begin_read(self, worker: str, ticket):
    """Returns the version to read for a ticket, WAIT or DROP."""
    return self._wait_for(lambda: self.scheduler.begin_read(worker, ticket))

  def commit(self, worker: str, contribution: dict) -> dict:
    """Accepts a gradient that all servers hold."""
    contribution = self._checked(worker, contribution)
    answer = self._wait_for(lambda: self._commit(worker, contribution))
    return {answer: True} if isinstance(answer, str) else {}

  def order(self, contributions: list[dict], devices: int) -> bool:
    """Makes the next update of what a simulation has ordered.

    Args:
      contributions: as workers report them, with gradients that are pending,
        and 'seconds': simulated, of the update.
      devices: that computed each gradient.

    Returns:
      Whether the update was wanted: the run has not been stopped.
    """
    with self._changing():
      version = self.scheduler.version
      if version >= self.scheduler.limit or self._ended() or self._closed:
        return False
      self._devices = devices
      self.scheduler.version += 1
      self.seconds[version + 1] = contributions[0]['seconds']
      self._submit(version, contributions)
    return True

  def updates(self, since: int, server: int) -> dict:
    """Answers another server with the updates from version `since` on."""
    with self._changed:
      self._changed.wait_for(lambda: self.scheduler.version > since or self._ended(), PATIENCE)
      if self._ended():
        self._note_left(server)
      return {'updates': self._updates[since - self._first :][:64], 'ended': self._ended()}

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
      self.finished = True

  def wait_until_alone(self, count: int, timeout: float) -> None:
    """Waits until `count` processes have heard of the end, or a while."""
    with self._changed:
      self._changed.wait_for(lambda: len(self._left) >= count, timeout)

  def close(self) -> None:
    """Refuses all calls from now on: their processes reconnect."""
    with self._changing():
      self._closed = True
      self.store.close()
      self.log.close()

  @contextlib.contextmanager
  def _changing(self):
    """Holds the lock, and then wakes the calls that wait."""
    with self._changed:
      yield
      self._changed.notify_all()

  def _ended(self):
    return self.finished or bool(self.failed)

  def _note_left(self, process):
    with self._changing():
      self._left.add(process)

  def _checked(self, worker, contribution):
    """A commit's contribution: it goes to the log and to all servers."""
    reads = [int(v) for v in contribution['reads']]
    weight = float(contribution['weight'])
    if not 0 <= weight < np.inf:
      raise parameter_store.InvalidMessageError(f'weight {weight}')
    are_versions = all(0 <= v <= self.scheduler.version for v in reads)
    if len(reads) != len(self.starts) or not are_versions:
      raise parameter_store.InvalidMessageError(f'reads {reads}')
    reported, names = contribution['values'], self._run.metric_names
    values = {name: float(reported.get(name, np.nan)) for name in names}
    if not np.isfinite(list(values.values())).all():
      raise parameter_store.InvalidMessageError(
        f'values {reported}, expected finite ones of {", ".join(names)}'
      )
    return {
      'ticket': list(ticket_of(contribution)),
      'worker': str(worker),
      'reads': reads,
      'weight': weight,
      'values': values,
    }

  def _commit(self, worker, contribution):
    ticket = tuple(contribution['ticket'])
    if not self.store.has_gradient(ticket, worker):
      raise parameter_store.InvalidMessageError(f'no gradient of {worker} for ticket {ticket}')
    version = self.scheduler.version
    contributions = self.scheduler.commit(worker, ticket, contribution)
    if isinstance(contributions, list) and contributions:
      self._submit(version, contributions)
    return contributions

  def _submit(self, version, contributions):
    logged = [{k: c[k] for k in _LOGGED if k in c} for c in contributions]
    self.log.append(version, self._devices, logged)
    if len(self.starts) > 1:
      self._updates.append((version, logged))
    self.applied.append((time.monotonic(), version, contributions))
    self.store.submit(version, logged)

  def _wait_for(self, request):
    """The scheduler's answer, or WAIT if it stays that for a while."""
    deadline = time.monotonic() + PATIENCE
    with self._changed:
      while True:
        if self._closed:  # since the request came
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
