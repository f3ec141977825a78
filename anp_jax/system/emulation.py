"""Emulated time: sleeps in place of computation, and slowed links.

A process emulates one node of a cluster. Its computing is a sleep, so any
number of processes share a core, unless only its link is emulated; its
collectives, requests and schedule are the real ones. Its link may be slowed
down in two ways, without root: the kernel paces each TCP connection of the
collectives (SO_MAX_PACING_RATE; a ring's process sends to one neighbour), and
bytes of Arrow Flight wait their turn on one `Link`, which all connections of
the process share.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import math
import os
import socket
import stat
import sys
import threading
import time

import ml_collections
import numpy as np

UP, DOWN = 'up', 'down'
_FILES = '/proc/self/fd'
# Linux's number, which Python's socket module does not have.
_SO_MAX_PACING_RATE = 47
# Of a link for one batch: a thread wakes up a tenth of a millisecond late.
_BATCH_SECONDS, _LEAST = 0.02, 2**14


class Link:
  """The link of a process, with a bandwidth per direction."""

  def __init__(
    self,
    bytes_per_second: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ):
    """Creates an idle link.

    Args:
      bytes_per_second: bandwidth per direction; 0: no limit.
      clock: monotonic clock in seconds.
      sleep: function that waits for seconds.
    """
    self.bytes_per_second = bytes_per_second
    self._clock, self._sleep = clock, sleep
    self._free_at = {UP: 0.0, DOWN: 0.0}
    self._lock = threading.Lock()

  def now(self) -> float:
    """Returns the time on the link's clock, in seconds."""
    return self._clock()

  def carry(self, way: str, count: int, since: float) -> None:
    """Waits until bytes have passed, after all earlier bytes.

    A thread that a busy core wakes up late does not delay the link: its bytes have
    been under way meanwhile.

    Args:
      way: UP or DOWN.
      count: number of bytes.
      since: time at which the bytes were ready; see `now`.
    """
    if not self.bytes_per_second:
      return
    with self._lock:
      end = max(since, self._free_at[way]) + count / self.bytes_per_second
      self._free_at[way] = end
    self._sleep(max(0.0, end - self._clock()))

  def batch_bytes(self, most: int) -> int:
    """Returns the number of bytes to send at a time.

    Both ends wait for each batch, at the same time for consecutive batches: a message
    of a single batch would take twice as long.

    Args:
      most: number for an unlimited link.
    """
    if not self.bytes_per_second:
      return most
    return min(most, max(_LEAST, int(self.bytes_per_second * _BATCH_SECONDS)))

  def upload(self, batches: Iterable) -> Iterator:
    """Yields Arrow's record batches, each once the link is free for it."""
    since = self._clock()
    for batch in batches:
      self.carry(UP, batch.nbytes, since)
      yield batch


class _Process:
  """The node that this process emulates.

  Attributes:
    index: index of this process in its run.
    link: `Link` of the process.
    paces_sockets: whether the connections of collectives are paced too.
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
  """Returns whether this system can pace connections that libraries have opened."""
  return sys.platform == 'linux' and os.path.isdir(_FILES)


def begin(index: int, bytes_per_second: float, paces_sockets: bool) -> None:
  """Starts the emulation of a node by this process.

  Args:
    index: index of this process in its run.
    bytes_per_second: bandwidth of its link per direction; 0: no limit.
    paces_sockets: whether TCP connections are paced too: those of a run whose
      collectives span processes.
  """
  global _process
  _process = _Process(index, bytes_per_second, paces_sockets)


def process_index() -> int:
  """Returns the index of this process in its run."""
  return _process.index


def link(local: bool = False) -> Link:
  """Returns the link of this process, unlimited unless one is emulated.

  Args:
    local: whether the other end is this process too.
  """
  return _UNLIMITED if local else _process.link


def pace_sockets() -> None:
  """Paces the connections of collectives; see `_Process`."""
  _process.pace_sockets()


def pass_seconds(
  settings: ml_collections.ConfigDict, images: int, words: Sequence[int], process: int | None = None
) -> float:
  """Returns the seconds that an emulated device computes for one micro-batch.

  They are a pure function of the seed, the step and the rows, times the factor of
  the process. The draw is lognormal with mean 1: computing times are above 0 and
  have a longer tail above their mean than below.

  Args:
    settings: config.emulate, or config.strategy.simulate.
    images: size of the micro-batch.
    words: integers that seed the draw.
    process: index of the computing process; None: this one.
  """
  process = _process.index if process is None else process
  (seconds,) = _seconds(settings, images, words, [process])
  return seconds


def worker_seconds(
  settings: ml_collections.ConfigDict, images: int, words: Sequence[int], workers: int
) -> np.ndarray:
  """Returns the seconds that each worker takes for its micro-batch, outages included.

  A worker's seconds do not depend on the number of workers; see `pass_seconds`.

  Args:
    settings: config.strategy.simulate.
    images: size of each worker's micro-batch.
    words: integers that seed the draws.
    workers: number of workers.

  Returns:
    (workers,) float64.
  """
  passes = np.array(_seconds(settings, images, words, range(workers)))
  return passes + outage_seconds(settings, words, workers)


def _seconds(settings, images, words, processes):
  """Seconds of a pass by process, each with its draws."""
  mean, slow = float(settings.step_seconds + settings.image_seconds * images), dict(settings.slow)
  draws = _draws(settings.spread, words, len(processes))
  return [mean * slow.get(p, 1.0) * draw for p, draw in zip(processes, draws)]


def outage_seconds(
  settings: ml_collections.ConfigDict, words: Sequence[int], workers: int = 1
) -> np.ndarray:
  """Returns the seconds for which each worker is away before its pass, (workers,) float64.

  Args:
    settings: config.strategy.simulate.
    words: integers that seed the draws, which are others than those of the passes.
    workers: number of workers.
  """
  if not settings.outage_chance:
    return np.zeros(workers)
  is_away = np.random.default_rng([*words, 1]).random(workers) < settings.outage_chance
  return is_away * float(settings.outage_seconds)


def _draws(spread, words, count):
  """Lognormal factors with mean 1; all 1 without a spread."""
  if not spread:
    return [1.0] * count
  variance = math.log1p(spread**2)
  normals = np.random.default_rng(np.asarray(words)).standard_normal(count)
  scale = math.sqrt(variance)
  return [math.exp(scale * normal - variance / 2) for normal in normals]


def describe_pass(settings: ml_collections.ConfigDict, who: str) -> list[str]:
  """Returns phrases about the time of a pass.

  Args:
    settings: settings as for `pass_seconds`.
    who: word for a computing process, such as 'worker'.
  """
  parts = [f'a pass of {settings.step_seconds:g} s']
  if settings.image_seconds:
    parts.append(f'{settings.image_seconds:g} s per image')
  if settings.spread:
    parts.append(f'spread {100 * settings.spread:g} %')
  if settings.get('outage_chance'):
    chance = 100 * settings.outage_chance
    parts.append(f'away for {settings.outage_seconds:g} s before {chance:g} % of passes')
  return parts + [f'{who} {i} x {factor:g}' for i, factor in settings.slow]


def describe(settings: ml_collections.ConfigDict) -> str:
  """Returns one line about the emulation of a run."""
  parts = ['computation is real']
  if settings.sleep:
    first, *more = describe_pass(settings, 'process')
    parts = [first.replace('a pass of', 'a pass is a sleep of'), *more]
    if settings.megabytes:
      parts.append(f'{settings.megabytes:g} MB of gradients')
  if settings.bandwidth:
    parts.append(f'links of {settings.bandwidth}')
  return ', '.join(parts)
