"""Two processes prove to each other that they know the run's secret.

Process 0 sends a random challenge, the newcomer answers with another challenge
and its proof, and process 0 sends its proof. Before that nothing is parsed, and
nothing is revealed. What follows is not encrypted.
"""

import asyncio
from collections.abc import Callable
import re
import secrets
import socket
import time

from anp_jax.cluster import secret as secret_lib

WITHIN = 5.0  # seconds, for all of it
LOG_PERIOD = 10.0  # seconds between two lines on strangers
MAX_UNPROVED = 64  # connections, and one for each process of the run
_MAX_LINE = 1024  # bytes
_PURPOSE = 'coordinator'
_PAUSE = 0.1  # seconds, when no connection can be accepted
_CHALLENGE = re.compile('[0-9a-f]{64}')
_ANSWER = re.compile('([0-9a-f]{64}) ([0-9a-f]{64})')


class RefusedError(ConnectionError):
  """The other side does not know the secret of this run."""


def connect(address: tuple[str, int], secret: str) -> socket.socket:
  """Connects to process 0, and has both sides prove the secret.

  Args:
    address: host and port.
    secret: the run's secret.

  Raises:
    RefusedError: if a proof is wrong.
    OSError: if there is no process 0.
  """
  connection = socket.create_connection(address, WITHIN)
  try:
    _introduce(connection, secret)
  except BaseException:
    connection.close()
    raise
  connection.settimeout(None)
  return connection


class Gate:
  """Lets only processes that know the secret connect to process 0."""

  def __init__(
    self, secret: str, count: int, on_proved: Callable, log: Callable[[str], None] = print
  ):
    """Creates the gate; `accept` opens it.

    Args:
      secret: the run's secret.
      count: number of the run's processes, which may come all at once.
      on_proved: coroutine function, called with the socket of a connection
        that has proved itself; closes it.
      log: called with a line for people.
    """
    self._key = secret_lib.derive(secret, _PURPOSE)
    self._limit = MAX_UNPROVED + count
    self._on_proved = on_proved
    self._log = log
    self._logged = -LOG_PERIOD
    self._unproved: dict[asyncio.Task, None] = {}  # the oldest first
    self._tasks: set[asyncio.Task] = set()  # asyncio itself keeps none alive

  async def accept(self, listener: socket.socket) -> None:
    """Serves a listening socket for ever."""
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    while True:
      try:
        connection, address = await loop.sock_accept(listener)
      except OSError:  # no descriptor is left, say
        self._close_oldest()
        await asyncio.sleep(_PAUSE)
        continue
      if len(self._unproved) >= self._limit:
        self._close_oldest()
      task = loop.create_task(self._serve(connection, address[0]))
      self._unproved[task] = None
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

  async def _serve(self, connection, host):
    is_proved: bool | None = False
    try:
      async with asyncio.timeout(WITHIN):
        is_proved = await self._admit(connection)
    except OSError:  # TimeoutError, too
      pass
    finally:
      self._unproved.pop(asyncio.current_task(), None)
      if not is_proved:
        connection.close()
      if is_proved is False:
        self._log_stranger(host)
    if is_proved:
      await self._on_proved(connection)

  async def _admit(self, connection):
    """Whether the other side proves that it knows the secret; None: it has hung up."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    challenge = secrets.token_hex(32)
    await loop.sock_sendall(connection, challenge.encode() + b'\n')
    line = b''
    while not line.endswith(b'\n') and len(line) < _MAX_LINE:
      piece = await loop.sock_recv(connection, _MAX_LINE - len(line))
      if not piece and not line:
        return None
      if not piece:
        break
      line += piece
    answer = _ANSWER.fullmatch(line.decode('ascii', 'replace').rstrip('\n'))
    if not answer:
      return False
    challenge_back, proof = answer.groups()
    challenges = challenge, challenge_back
    if not secret_lib.is_proof(proof, self._key, 'newcomer', *challenges):
      return False
    answer = secret_lib.prove(self._key, 'coordinator', *challenges)
    await loop.sock_sendall(connection, answer.encode() + b'\n')
    return True

  def _close_oldest(self):
    for task in self._unproved:
      del self._unproved[task]
      task.cancel()
      return

  def _log_stranger(self, host):
    now = time.monotonic()
    if now - self._logged >= LOG_PERIOD:
      self._logged = now
      host = host.removeprefix('::ffff:')  # IPv4 at a port of both families
      self._log(f'a connection from {host} did not prove that it belongs to this run: closed')


def _introduce(connection, secret):
  key = secret_lib.derive(secret, _PURPOSE)
  deadline = time.monotonic() + WITHIN
  challenge = _line(connection, deadline)
  if not challenge:  # it restarts, say
    raise ConnectionAbortedError('it has hung up')
  if not _CHALLENGE.fullmatch(challenge):
    raise RefusedError('something else answers')
  challenge_back = secrets.token_hex(32)
  challenges = challenge, challenge_back
  proof = secret_lib.prove(key, 'newcomer', *challenges)
  connection.sendall(f'{challenge_back} {proof}\n'.encode())
  try:
    proof = _line(connection, deadline)
  except TimeoutError:  # it is stopped, say
    raise
  except OSError:  # a reset
    proof = ''
  if not secret_lib.is_proof(proof, key, 'coordinator', *challenges):
    raise RefusedError('another secret')


def _line(connection, deadline):
  """Reads a line of text, without its end."""
  line = b''
  while not line.endswith(b'\n') and len(line) < _MAX_LINE:
    connection.settimeout(max(deadline - time.monotonic(), 0.01))
    piece = connection.recv(_MAX_LINE - len(line))
    if not piece:
      break
    line += piece
  return line.decode('ascii', 'replace').rstrip('\n')
