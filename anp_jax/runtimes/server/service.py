"""A server as others see it: Flight calls onto its keeper and its desk."""

import collections
import json
import threading
import time

import jax
import numpy as np
from pyarrow import flight

from anp_jax.cluster import process_info
from anp_jax.runtimes import transport
from anp_jax.runtimes.server import parameter_store as keeper_lib
from anp_jax.runtimes.server import scheduler as desk_lib

# Seconds that a call waits for what is not there yet; then it is asked again.
PATIENCE = 2.0
_ACTIONS = ('hello', 'join', 'take', 'commit', 'entries', 'stop', 'fail')


class Term:
  """What a server has between one start, or fall-back, and the next.

  Attributes:
    name: that every request must show; of no other term.
    shard, keeper: of this server's slice.
  """

  def __init__(self, name: str, shard, keeper):
    self.name = name
    self.shard = shard
    self.keeper = keeper


def is_due(settings: dict):
  """Tells of a version whether its state is to be scored or saved."""
  return lambda version: any(version % every == 0 for every in settings['due'])


class Lead(Term):
  """Server 0's term: the order, and who takes part.

  Attributes:
    desk: of the tickets.
    lost: whether a server has lost its slice, so that all must fall back.
    failed: why the run cannot go on.
    finished: whether the last version is scored and saved.
    updates: (seconds, version, parts) that nobody has read yet, for telemetry.
  """

  def __init__(
    self, name, shard, keeper, desk, log, starts, address, card, settings,
    measured,
  ):  # fmt: skip
    """Makes it.

    Args:
      name: of the term.
      shard: of slice 0.
      keeper: of slice 0.
      desk: `desk.Desk`.
      log: `log.Log`.
      starts: SliceState that each server begins with.
      address: of this server.
      card: of this process, see `cluster.process_info`.
      settings: what each worker is told when it comes, JSON values.
      measured: names of what is told with each gradient, see `readings`.
    """
    super().__init__(name, shard, keeper)
    self.desk = desk
    self.lost = self.finished = self._closed = False
    self.failed = ''
    self.updates = collections.deque()
    self._log = log
    self._starts = starts
    self._card = card
    self._settings = settings
    self._measured = measured
    self._devices = None  # of a worker
    self._addresses = {0: address}  # by server
    self._gone = set()  # workers by name, servers by number
    self._entries = []  # for the other servers
    self._first = desk.version  # version of the first entry
    self.changed = threading.Condition()

  def join(self, server: int, address: str, card: dict) -> dict:
    """A server comes, for its slice of the start."""
    # Its devices may be others: a server computes on its CPU.
    problem = process_info.run_mismatch(card, self._card)
    with self.changed:
      if problem:
        self.fail(problem)  # nothing goes on without this server
        return {'problem': problem}
      if self.lost or server in self._addresses:
        # It has come anew, without what it had: all begin another term.
        self.lost = True
        self.changed.notify_all()
        return {'wait': True}
      self._addresses[server] = address
      self.changed.notify_all()
      return {'term': self.name, **self._settings}

  def start_of(self, server: int):
    """The SliceState that a server begins with."""
    return self._starts[server]

  def hello(self, worker: str, card: dict, devices: int) -> dict:
    """A worker comes, or comes again."""
    problem = process_info.first_mismatch([self._card, {**card, 'index': 1}])
    if self._devices not in (None, devices):
      problem = (
        f'{devices} devices, but the first worker has {self._devices}: '
        'a replay needs them alike'
      )
    with self.changed:
      if problem:
        return {'problem': problem}
      self._devices = devices
      self.desk.leave(worker)
      servers = [self._addresses.get(i) for i in range(len(self._starts))]
      if not all(servers):
        return {'wait': True}
      return {'term': self.name, 'servers': servers, **self._settings}

  def take(self, worker: str) -> dict:
    """A ticket, the end, or nothing yet."""
    found = self._when(lambda: self.desk.take(worker))
    if self.failed:
      found = desk_lib.OVER
    if found == desk_lib.OVER:
      self._went(worker)
    if self.failed:
      return {'failed': self.failed}
    return {found: True} if isinstance(found, str) else {'ticket': found}

  def begin(self, worker: str, ticket):
    """The version to read for a ticket, WAIT or DROP."""
    return self._when(lambda: self.desk.begin(worker, ticket))

  def commit(self, worker: str, part: dict) -> dict:
    """A gradient that all servers hold."""
    part = self._checked(worker, part)
    ticket = tuple(part['ticket'])
    found = self._when(lambda: self._commit(worker, ticket, part))
    return {found: True} if isinstance(found, str) else {}

  def entries(self, since: int, server: int) -> dict:
    """The updates from version `since` on, for another server."""
    with self.changed:
      self.changed.wait_for(
        lambda: self.desk.version > since or self._ended(), PATIENCE
      )
      if self._ended():
        self._went(server)
      return {
        'entries': self._entries[since - self._first :][:64],
        'ended': self._ended(),
      }

  def stop(self) -> None:
    """Ends the run at its present version."""
    with self.changed:
      self.desk.stop()
      self.changed.notify_all()

  def fail(self, text: str) -> None:
    """Ends the run in an error."""
    with self.changed:
      self.failed = self.failed or text
      self.changed.notify_all()

  def finish(self) -> None:
    """Lets everyone go: the last version is scored and saved."""
    with self.changed:
      self.finished = True
      self.changed.notify_all()

  def wait_until_alone(self, count: int, timeout: float) -> None:
    """Returns when `count` others have heard of the end, or after a while."""
    with self.changed:
      self.changed.wait_for(lambda: len(self._gone) >= count, timeout)

  def close(self) -> None:
    """Gives and takes nothing any more: who asks comes anew."""
    with self.changed:
      self._closed = True
      self.keeper.close()
      self._log.close()
      self.changed.notify_all()

  def address_of(self, server: int) -> str:
    """Of another server, which has come."""
    return self._addresses[server]

  def _ended(self):
    return self.finished or bool(self.failed)

  def _went(self, who):
    with self.changed:
      self._gone.add(who)
      self.changed.notify_all()

  def _checked(self, worker, part):
    """A commit's part: it goes to the log and to all servers."""
    reads = [int(v) for v in part['reads']]
    weight = float(part['weight'])
    if not 0 <= weight < np.inf:
      raise keeper_lib.Unfit(f'weight {weight}')
    good = all(0 <= v <= self.desk.version for v in reads)
    if len(reads) != len(self._starts) or not good:
      raise keeper_lib.Unfit(f'reads {reads}')
    given = part['values']
    values = {name: float(given.get(name, np.nan)) for name in self._measured}
    if not np.isfinite(list(values.values())).all():
      raise keeper_lib.Unfit(
        f'values {given}, expected finite ones of {", ".join(self._measured)}'
      )
    return {
      'ticket': list(_ticket(part)),
      'worker': str(worker),
      'reads': reads,
      'weight': weight,
      'values': values,
    }

  def _commit(self, worker, ticket, part):
    if not self.keeper.holds(ticket, worker):
      raise keeper_lib.Unfit(f'no gradient of {worker} for ticket {ticket}')
    version = self.desk.version
    parts = self.desk.commit(worker, ticket, part)
    if isinstance(parts, list) and parts:
      logged = [
        {k: p[k] for k in ('ticket', 'worker', 'reads', 'weight')}
        for p in parts
      ]
      self._log.append(version, self._devices, logged)
      if len(self._starts) > 1:
        self._entries.append((version, logged))
      self.updates.append((time.monotonic(), version, parts))
      self.keeper.submit(version, logged)
    return parts

  def _when(self, ask):
    """The answer, or WAIT if it stays that for a while."""
    deadline = time.monotonic() + PATIENCE
    with self.changed:
      while True:
        if self._closed:  # since the request came
          raise _another_term()
        self.desk.look()
        found = ask()
        left = deadline - time.monotonic()
        if found != desk_lib.WAIT or left <= 0 or self.failed:
          self.changed.notify_all()
          return found
        self.changed.wait(min(left, 0.5))


class Service(transport.Port):
  """The Flight calls of one server."""

  def __init__(self, config, place, token: str):
    """As `wire.Port`."""
    self.term = None
    super().__init__(config, place, token, 'a server')

  def do_action(self, context, action):
    """Small requests; see the methods of `Lead`."""
    del context
    with transport.answering():
      request = json.loads(action.body.to_pybytes())
      answer = self._act(action.type, request)
    return [json.dumps(answer).encode()]

  def do_get(self, context, ticket):
    """Weights for a worker, or a slice for another server."""
    del context
    with transport.answering():
      request = json.loads(ticket.ticket)
      name = request['name']
      term = self._known(request)
      if name == 'start':
        return transport.stream({}, _arrays(term.start_of(request['server'])))
      if name == 'snapshot':
        state = term.keeper.snapshot(request['version'], PATIENCE)
        return transport.stream({}, _arrays(state))
      if name == 'weights':
        return self._weights(term, request)
      raise keeper_lib.Unfit(f'nothing is called {name!r}')

  def do_put(self, context, descriptor, reader, writer):
    """A gradient."""
    del context
    with transport.answering():
      request = json.loads(descriptor.command)
      term = self._known(request)
      likes = (term.shard.gradient_like, term.shard.like.stats)
      if request['dtype'] != str(likes[0].dtype):
        raise keeper_lib.Unfit(
          f'a gradient in {request["dtype"]}, expected {likes[0].dtype}'
        )
      want = sum(transport.nbytes(like) for like in likes)
      if request['bytes'] != want:
        raise keeper_lib.Unfit(f'{request["bytes"]} bytes, expected {want}')
      gradient, stats = transport.split(
        transport.read_bytes(reader, want), likes
      )
      term.keeper.stage(_ticket(request), request['worker'], gradient, stats)
      writer.write(b'taken')

  def _known(self, request):
    term = self.term
    if term is None or request.get('term') != term.name:
      raise _another_term()
    return term

  def _act(self, name, request):
    if name in ('hello', 'join', 'stop'):  # of no term yet
      if self.term is None:
        return {'wait': True}
      term = self.term
    else:
      term = self._known(request)
    request.pop('term', None)
    if name not in _ACTIONS or not isinstance(term, Lead):
      raise keeper_lib.Unfit(f'nothing is called {name!r} here')
    return getattr(term, name)(**request) or {}

  def _weights(self, term, request):
    if isinstance(term, Lead):
      at_least = term.begin(request['worker'], _ticket(request))
      if isinstance(at_least, str):
        return transport.stream({at_least: True}, [])
    else:
      at_least = int(request['at_least'])
    try:
      version, state = term.keeper.read(at_least, PATIENCE)
    except TimeoutError:
      return transport.stream({'wait': True}, [])
    return transport.stream(
      {'version': version},
      [*term.shard.weights(state), np.asarray(state.stats)],
    )


def _another_term():
  return flight.FlightUnavailableError('of another term: come anew')


def _ticket(request):
  step, shard = request['ticket']
  return int(step), int(shard)


def _arrays(state):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
