"""Emulated time: computing that is slept for, and links slower than these.

A process emulates one node of a cluster. Its computing is a sleep, so any
number of processes share a core, unless only its link is emulated; its
collectives, requests and schedule are the real ones. Its link may be slowed
down in two ways, without root: the kernel paces each TCP connection of the
collectives (SO_MAX_PACING_RATE; a ring's process sends to one neighbour), and
bytes of Arrow Flight wait their turn on one `Link`, which all connections of
the process share.
"""

from collections.abc import Callable
import contextlib
import math
import os
import socket
import stat
import sys
import threading
import time

import numpy as np

UP, DOWN = 'up', 'down'
_FILES = '/proc/self/fd'
# Linux's number, which Python's socket module does not have.
_SO_MAX_PACING_RATE = 47
# Of a link for one batch: a thread wakes up a tenth of a millisecond late.
_BATCH_SECONDS, _LEAST = 0.02, 2**14


class Link:
  """The link of a process: each way carries so many bytes a second."""

  def __init__(
    self,
    bytes_per_second: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ):
    """Makes an idle link.

    Args:
      bytes_per_second: each way; 0: not limited.
      clock: monotonic, in seconds.
      sleep: waits so many seconds.
    """
    self.bytes_per_second = bytes_per_second
    self._clock, self._sleep = clock, sleep
    self._free_at = {UP: 0.0, DOWN: 0.0}
    self._lock = threading.Lock()

  def now(self) -> float:
    """Returns the time on the link's clock, in seconds."""
    return self._clock()

  def carry(self, way: str, count: int, since: float) -> None:
    """Waits until bytes have passed, after all that came before them.

    A thread that a busy core wakes up late does not hold up the link: what it
    was to send has been under way meanwhile.

    Args:
      way: UP or DOWN.
      count: of bytes.
      since: when they were ready to pass, see `now`.
    """
    if not self.bytes_per_second:
      return
    with self._lock:
      end = max(since, self._free_at[way]) + count / self.bytes_per_second
      self._free_at[way] = end
    self._sleep(max(0.0, end - self._clock()))

  def batch_bytes(self, most: int) -> int:
    """How many bytes to send at a time.

    Both ends wait for each batch, at the same time for two that follow each
    other: a message of a single batch would take twice as long.

    Args:
      most: of a link that is not limited.
    """
    if not self.bytes_per_second:
      return most
    return min(most, max(_LEAST, int(self.bytes_per_second * _BATCH_SECONDS)))

  def upload(self, batches):
    """Yields Arrow's record batches, each once the link is free for it."""
    since = self._clock()
    for batch in batches:
      self.carry(UP, batch.nbytes, since)
      yield batch


class _Process:
  """What this process emulates.

  Attributes:
    index: of this process among those of its run.
    link: its `Link`.
    paces_sockets: whether its collectives' connections are slowed down too.
  """

  def __init__(self, index=0, bytes_per_second=0.0, paces_sockets=False):
    self.index, self.link = index, Link(bytes_per_second)
    self.paces_sockets = paces_sockets and bytes_per_second > 0
    self._paced = set()

  def pace_sockets(self) -> None:
    """Paces the TCP connections that have been opened since the last call."""
    if not self.paces_sockets:
      return
    # As 64 bits: 32 hold no more than 34 Gbit/s.
    rate = int(self.link.bytes_per_second).to_bytes(8, sys.byteorder)
    for name in os.listdir(_FILES):
      connection = self._new_connection(name)
      if connection:
        with connection:
          connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)

  def _new_connection(self, name):
    """A socket of an open file, if it is one over IP and not paced yet."""
    # It may have been closed meanwhile: the listing's own file has been.
    with contextlib.suppress(OSError):
      status = os.fstat(int(name))
      identity = name, status.st_ino
      if not stat.S_ISSOCK(status.st_mode) or identity in self._paced:
        return None
      self._paced.add(identity)
      connection = socket.socket(fileno=os.dup(int(name)))
      if connection.family in (socket.AF_INET, socket.AF_INET6):
        return connection
      connection.close()
    return None


_process = _Process()
_UNLIMITED = Link()


def can_pace_sockets() -> bool:
  """Whether this system can slow down connections that others have opened."""
  return sys.platform == 'linux' and os.path.isdir(_FILES)


def begin(index: int, bytes_per_second: float, paces_sockets: bool) -> None:
  """Says what this process emulates from now on.

  Args:
    index: of this process among those of its run.
    bytes_per_second: of its link, each way; 0: not limited.
    paces_sockets: whether TCP connections are paced, too: those of a run whose
      collectives span processes.
  """
  global _process
  _process = _Process(index, bytes_per_second, paces_sockets)


def process_index() -> int:
  """The number of this process in its run."""
  return _process.index


def link(local: bool = False) -> Link:
  """The link of this process, which is not limited unless one is emulated.

  Args:
    local: whether the other end is this process, too.
  """
  return _UNLIMITED if local else _process.link


def pace_sockets() -> None:
  """Slows down the connections of collectives; see `_Process`."""
  _process.pace_sockets()


def pass_seconds(settings, images: int, words, process=None) -> float:
  """The seconds that an emulated device computes for one micro-batch.

  A pure function of the seed, the step and the rows, but for the factor of the
  process. The draw is lognormal with mean 1: computing times are above 0 and
  have a longer tail above their mean than below.

  Args:
    settings: config.emulate, or config.strategy.simulate.
    images: of the micro-batch.
    words: integers from which the draw is made.
    process: that computes; None: this one.
  """
  process = _process.index if process is None else process
  (mean,) = _mean_seconds(settings, images, [process])
  (draw,) = _draws(settings.spread, words, 1)
  return mean * draw


def worker_seconds(settings, images: int, words, workers: int) -> np.ndarray:
  """The seconds that each of several workers computes for its micro-batch.

  Those of a worker do not depend on how many there are; see `pass_seconds`.

  Args:
    settings: config.strategy.simulate.
    images: of each worker's micro-batch.
    words: integers from which the draws are made.
    workers: whose times are asked for.

  Returns:
    (workers,) float64.
  """
  means = _mean_seconds(settings, images, range(workers))
  return np.multiply(means, _draws(settings.spread, words, workers))


def _mean_seconds(settings, images, processes):
  seconds = float(settings.step_seconds + settings.image_seconds * images)
  slow = dict(settings.slow)
  return [seconds * slow.get(process, 1.0) for process in processes]


def _draws(spread, words, count):
  """Lognormal factors with mean 1; all 1 without a spread."""
  if not spread:
    return [1.0] * count
  variance = math.log1p(spread**2)
  normals = np.random.default_rng(np.asarray(words)).standard_normal(count)
  scale = math.sqrt(variance)
  return [math.exp(scale * normal - variance / 2) for normal in normals]


def describe_pass(settings, who: str) -> list[str]:
  """What a pass takes, in phrases for people.

  Args:
    settings: see `pass_seconds`.
    who: computes, in one word.
  """
  parts = [f'a pass of {settings.step_seconds:g} s']
  if settings.image_seconds:
    parts.append(f'{settings.image_seconds:g} s an image')
  if settings.spread:
    parts.append(f'spread {100 * settings.spread:g} %')
  return parts + [f'{who} {i} x {factor:g}' for i, factor in settings.slow]


def describe(settings) -> str:
  """What of a run is emulated, in one line for people."""
  parts = ['computing is real', *describe_pass(settings, 'process')[1:]]
  if settings.sleep:
    parts[0] = f'a pass is a sleep of {settings.step_seconds:g} s'
  if settings.megabytes:
    parts.append(f'{settings.megabytes:g} MB of gradients')
  if settings.bandwidth:
    parts.append(f'links of {settings.bandwidth}')
  return ', '.join(parts)
