"""A coordinator and its clients in one process, as tests start them."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import socket
import threading
import types

from anp_jax import config as config_lib
from anp_jax.cluster import client, cluster_env, connection, coordinator, members, termination
from tests import launching

SOON = 10  # seconds: until a test fails that waits for nothing
SECRET = '5e' * 32


class Clock:
  """A coordinator's time, which only a test moves."""

  def __init__(self):
    self._now = 1000.0
    self._sleepers = []
    self._has_slept = threading.Event()  # since the last one was woken

  def __call__(self):
    return self._now

  async def sleep(self, seconds):
    loop = asyncio.get_running_loop()
    waking = loop.create_future()
    self._sleepers.append((self._now + seconds, loop, waking))
    self._has_slept.set()
    await waking

  def move(self, seconds):
    assert self._has_slept.wait(SOON)  # the coordinator has seen the move before
    self._now += seconds
    for sleeper in self._sleepers[:]:
      end, loop, waking = sleeper
      if end <= self._now:
        self._has_slept.clear()
        self._sleepers.remove(sleeper)
        loop.call_soon_threadsafe(waking.set_result, None)

  def run(self, seconds):
    """Moves by heartbeats; a longer move is one in which nothing can run."""
    while seconds > 0:
      self.move(min(seconds, coordinator.HEARTBEAT_PERIOD))
      seconds -= coordinator.HEARTBEAT_PERIOD


class Run:
  """A coordinator and its clients, each made in a thread of its own.

  Attributes:
    clients: clients of the ranks that have joined, by rank.
    errors: errors of the ranks that were refused, by rank.
    ended: (code, text, stacks) of the ranks that were told to end, by rank.
    lines: that the coordinator logged.
  """

  secret = SECRET

  def __init__(
    self, count, rendezvous=SOON, heartbeat=SOON, leave=SOON, clock=None, ports=(), **more
  ):
    self.count = count
    self.clock = clock
    self.lines = []
    self.clients, self.errors, self.ended = {}, {}, {}
    self.port, *self._ports = ports or [launching.free_port()]
    self._threads = []
    self.coordinator = coordinator.Coordinator(
      self._env(0),
      _settings(rendezvous, heartbeat, leave),
      log=self.lines.append,
      **more,
      **({'clock': clock, 'sleep': clock.sleep} if clock else {}),
    )

  def join(self, *indices, **values):
    """Begins to connect these ranks."""
    for index in indices:
      thread = threading.Thread(target=self._join, args=(index, values))
      thread.start()
      self._threads.append(thread)
    return self

  def started(self):
    """Waits until the ranks that were begun are in, or refused."""
    for thread in self._threads:
      thread.join(SOON)
      assert not thread.is_alive()
    return self

  def _env(self, index):
    return cluster_env.ClusterEnv(
      'flags',
      index,
      self.count,
      f'127.0.0.1:{self.port}',
      token='job',
      secret=self.secret,
      other_ports=tuple(self._ports),
    )

  def _join(self, index, values, **more):
    def leave(code, text, stacks):
      self.ended[index] = (code, text, stacks)

    try:
      self.clients[index] = client.CoordinatorClient(
        connection.connect(self._env(index), SOON),
        info(index, self.count, values),
        _settings(SOON, SOON, SOON),
        leave=leave,
        **more,
      )
    except (config_lib.ConfigError, termination.PeerLostError) as e:
      self.errors[index] = e

  def close(self):
    """Closes the coordinator's port."""
    for listening in self.coordinator.listeners:
      with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)

  def close_connections(self):
    """Hangs up on all clients, as a coordinator does that is dead."""
    for member in self.coordinator._members.values():
      member.writer._loop.call_soon_threadsafe(member.writer.close)

  def raw(self, text):
    """A connection that sends bytes, and then only what a test sends."""
    connection = socket.create_connection(('127.0.0.1', self.port), SOON)
    connection.sendall(text)
    return connection

  def raw_rank(self, index, odd=(), **values):
    """A connection that joins as a rank does, and then sends nothing."""
    connection = self.raw(b'')
    introduce(connection)
    text = json.dumps(info(index, self.count, {**values, **dict(odd)}))
    connection.sendall(text.encode() + b'\n')
    return connection

  def beats(self, count, silent=()):
    """Moves the clock by heartbeats; all ranks but the silent answer each."""
    for _ in range(count):
      self.clock.move(coordinator.HEARTBEAT_PERIOD)
      wait(lambda: self.ended or self._are_heard(silent))

  def wait_for_delayed_call(self):
    """Waits until the coordinator sleeps before a call, too."""
    wait(lambda: len(self.clock._sleepers) > 1)

  def _are_heard(self, silent):
    now = self.coordinator._clock()
    return all(
      member.last_heard == now
      for index, member in self.coordinator._members.items()
      if index not in silent
    )

  def assert_ends(self, indices, code, text):
    """Each of these ranks is told to end with a code, and a line that begins so."""
    for end, line, _ in self.wait_for_end(*indices):
      assert end == code and line.startswith(text), line

  def wait_for_end(self, *indices):
    """What each of these ranks was told when it had to end."""
    wait(lambda: set(indices) <= self.ended.keys())
    return [self.ended[i] for i in indices]


class Gathering:
  """One of several processes that gather values; each is a thread."""

  def __init__(self, index, values, barrier, goes_on=False):
    self.index, self._values, self._barrier = index, values, barrier
    self.goes_on = goes_on
    self.count = barrier.parties

  def is_ended_by(self, index):
    """Whether this process ends if another does not fit."""
    return not self.goes_on or index == self.index

  def name(self, index):
    """The name of a process, whose rank is another number."""
    return f'rank {index + 3} on node{index}'

  def gather(self, value):
    """All processes' values."""
    self._values[self.index] = value
    self._barrier.wait(SOON)
    values = list(self._values)
    self._barrier.wait(SOON)
    return values


def _settings(rendezvous, heartbeat, leave):
  """The values of config.cluster that a coordinator and its clients read."""
  return types.SimpleNamespace(
    rendezvous_timeout=rendezvous,
    heartbeat_timeout=heartbeat,
    stall_timeout=leave,
    stop_timeout=0.0,
    min_processes=1,
  )


def info(index, count, values):
  """What `process_info.collect` gives for a rank, with some other values."""
  return {
    'index': index,
    'count': count,
    'token': 'job',
    'host': f'node{index}',
    'local_index': 0,
    'platform': 'cpu',
    'problem': '',
    'gpus': [],
    'loopback': '',
    'steps_together': True,
    'mixes_platforms': False,
    'elastic': False,
    'has_state': False,
    'devices': None,
    'address': None,
    'optional': [],
    'cpu_library': '',
    'versions': {'jax': '1'},
    'code': '',
    'config': {},
    'modules': {},
    'command': {},
    **values,
  }


def members_of(indices, count, at=0.0, **values):
  """A run that these processes have joined, and were heard at a time."""
  result = members.Members(count, 'job')
  for index in indices:
    result[index] = members.Member(info(index, count, values), writer=None, last_heard=at)
  return result


def proof(side, challenge, answer, secret=SECRET):
  """What one side of a handshake sends, as the protocol's text says it."""
  key = _hmac(bytes.fromhex(secret), 'key\ncoordinator')
  return _hmac(key, f'{side}\n{challenge}\n{answer}').hex()


def _hmac(key, text):
  return hmac.new(key, text.encode(), hashlib.sha256).digest()


def introduce(connection, secret=SECRET):
  """Proves the secret as a newcomer; returns whether it was believed."""
  lines = connection.makefile('rb')
  challenge, answer = lines.readline().decode().strip(), 'ab' * 32
  ours = proof('newcomer', challenge, answer, secret)
  connection.sendall(f'{answer} {ours}\n'.encode())
  believed = lines.readline().decode().strip()
  return believed == proof('coordinator', challenge, answer, secret)


def wait(condition):
  """Waits until a condition holds."""
  launching.wait_until(condition, SOON, pause=0.001)


def started(count, **values):
  """A run that all ranks have joined."""
  run = Run(count, **values).join(*range(count)).started()
  assert not run.errors
  return run


def at_once(calls):
  """Makes calls in a thread each."""
  threads = [threading.Thread(target=call) for call in calls]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(SOON)
    assert not thread.is_alive()
