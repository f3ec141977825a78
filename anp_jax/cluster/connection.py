"""The connection of a process to process 0: how it is made, and lines of JSON."""

from collections.abc import Callable, Iterator
import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

from anp_jax import config as config_lib
from anp_jax.cluster import (
  awake_clock,
  cluster_env,
  coordinator,
  generation as generation_lib,
  handshake,
  secret as secret_lib,
  termination,
)

_RETRY = 0.3  # seconds between two attempts to reach process 0
_LOOK = 0.1  # seconds between two looks at who answers
_ANSWERS_WITHIN = 1.0  # seconds, a coordinator that serves
# Attempts: process 0 may close a connection when many come at once.
_MAX_REFUSALS = 10
_MAX_BYTES = 2**16  # of one read


def connect(
  env: cluster_env.ClusterEnv, timeout: float, check: Callable = lambda: None
) -> socket.socket:
  """Connects to process 0, which may come later.

  Args:
    env: place of this process.
    timeout: seconds.
    check: called after each failed attempt of a process that joins a run.

  Raises:
    ConfigError: if what answers does not know the secret.
    PeerLostError: if nobody answers in time.
  """
  host, port = cluster_env.split_address(env.coordinator_address)
  ports = [port, *env.other_ports]
  clock = awake_clock.AwakeClock(len(ports) * 2 * handshake.WITHIN + _RETRY)
  refusals, last_line = 0, clock()
  deadline = last_line + timeout
  while True:
    clock.tick()
    errors = []
    for port in ports:
      try:
        return handshake.connect((host, port), env.secret)
      except OSError as e:
        errors.append(e)
    if env.launcher == cluster_env.JOIN:
      check()
    refused = [e for e in errors if isinstance(e, handshake.RefusedError)]
    # The right process 0 may come yet, at a port where nobody is.
    refusals = refusals + 1 if len(refused) == len(ports) else 0
    now = clock()
    if refusals == _MAX_REFUSALS or (refused and now > deadline):
      raise config_lib.ConfigError(_no_secret(env)) from refused[0]
    if now > deadline:
      text = _no_answer(env, timeout, errors[0])
      raise termination.PeerLostError(text, termination.NOBODY_CAME) from errors[0]
    # One process a host says it: the others of a hundred see the same.
    if now - last_line >= coordinator.LOG_PERIOD and env.local_index < 1:
      last_line = now
      print(
        f'waiting: rank 0 at {env.coordinator_address} does not answer yet; '
        f'{deadline - now:.0f} s left; {_no_secret(env) if refused else _reason(errors[0])}'
      )
    time.sleep(_RETRY)


def find(
  generation: generation_lib.Generation, secret: str, patience: float
) -> socket.socket | None:
  """Connects to the coordinator of a generation, which may have to start first.

  Args:
    generation: generation that this process belongs to.
    secret: the run's secret.
    patience: seconds until a process that does not answer is done without.

  Returns:
    The connection; None if this process is to coordinate.
  """
  rank = generation.rank
  if generation.coordinator == rank:
    return None
  searches = {
    other: _Search(address, secret)
    for other, address in generation.addresses.items()
    if other != rank and generation.coordinator in (-1, other)
  }
  start = time.monotonic()
  try:
    while True:
      for search in searches.values():
        if search.found:
          return search.take()
      waited = time.monotonic() - start
      announced = searches.get(generation.coordinator)
      if announced and (announced.is_dead or waited > patience):  # it is lost, too
        return find(generation._replace(coordinator=-1), secret, patience)
      # Whoever was not lost, and comes before this process, coordinates.
      before = {r for r in searches if r < rank and r not in generation.lost}
      is_free = all(searches[r].is_dead for r in before) or waited > patience
      later = [search for r, search in searches.items() if r not in before]
      have_answered = waited > _ANSWERS_WITHIN or all(search.is_dead for search in later)
      if is_free and have_answered and not announced:
        return None
      time.sleep(_LOOK)
  finally:
    for search in searches.values():
      search.end()


class _Search:
  """Attempts to find a coordinator at an address, in a thread."""

  def __init__(self, address, secret):
    self.found = None  # connection that has proved the secret
    self.is_dead = False  # nobody listens
    self._has_ended = False
    self._lock = threading.Lock()
    threading.Thread(target=self._run, args=(address, secret), name='search', daemon=True).start()

  def take(self):
    with self._lock:
      connection, self.found = self.found, None
      return connection

  def end(self):
    with self._lock:
      self._has_ended = True
      if self.found:
        self.found.close()

  def _run(self, address, secret):
    while not self._has_ended and not self.found:
      try:
        connection = handshake.connect(address, secret)
      except (ConnectionRefusedError, handshake.RefusedError):
        self.is_dead = True
      except OSError:
        pass
      else:
        with self._lock:
          if self._has_ended:
            connection.close()
          else:
            self.found = connection
        return
      time.sleep(_LOOK)


class Connection:
  """Messages to and from process 0; ends if that is silent for too long.

  Attributes:
    max_silence: seconds; those in which this process is stopped do not count.
    is_silent: whether process 0 has been silent for longer.
  """

  def __init__(self, connected: socket.socket, max_silence: float):
    """Takes over a socket from `connect`."""
    self.max_silence = max_silence
    self.is_silent = False
    self._socket = connected
    self._send_lock = threading.Lock()

  def send(self, message: dict[str, Any]) -> None:
    """Sends a message; process 0 misses one that cannot be sent, and acts on it."""
    with self._send_lock, contextlib.suppress(OSError):
      self._socket.sendall(json.dumps(message).encode() + b'\n')

  def messages(self) -> Iterator[dict[str, Any]]:
    """Yields what process 0 sends, until it has gone, is silent or `close` is called."""
    # Not by the socket's own time-out: it counts the seconds in which this process
    # is stopped, and bounds what is sent, too.
    poll = select.poll()
    poll.register(self._socket, select.POLLIN)
    clock = awake_clock.AwakeClock(coordinator.HEARTBEAT_PERIOD)
    last_heard, rest = clock(), b''
    # A torn line is a ValueError.
    with contextlib.suppress(OSError, ValueError):
      while not self.is_silent:
        clock.tick()
        if poll.poll(1000 * coordinator.HEARTBEAT_PERIOD):
          piece = self._socket.recv(_MAX_BYTES)
          if not piece:
            return
          *lines, rest = (rest + piece).split(b'\n')
          last_heard = clock()
          for line in lines:
            yield json.loads(line)
        self.is_silent = clock() - last_heard > self.max_silence

  def close(self) -> None:
    """Hangs up, which ends `messages`."""
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)


def _no_secret(env):
  return (
    f'rank {env.index} on {socket.gethostname()}: what answers at '
    f'{env.coordinator_address} does not know the secret of this run: '
    'the processes must share --workdir, no other run may use the port, and '
    f'{secret_lib.VARIABLE} must be the same for each if it is set'
  )


def _no_answer(env, timeout, error):
  host, _ = cluster_env.split_address(env.coordinator_address)
  hint = '; a loopback address reaches this host only' if cluster_env.is_loopback_name(host) else ''
  return (
    f'rank {env.index} on {socket.gethostname()}: no answer from rank 0 at '
    f'{env.coordinator_address} within {timeout:g} s ({_reason(error)}){hint}'
  )


def _reason(error):
  return error.strerror or error
