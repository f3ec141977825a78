"""What a process spends its time on, for `lateness` to compare with the others'."""

from collections.abc import Callable
import contextlib
import os
import socket
import struct
import time

_CONNECTIONS = 64  # most that are looked at, which takes 2 ms
# Size and offsets of Linux's struct tcp_info, whose times are in ms and us.
_BYTES, _LAST_ANSWER, _ROUND_TRIP = 72, 56, 68
_RECENT = 3000  # milliseconds


class Activity:
  """Adds up the time of this process by phase, and what its threads wait for a core."""

  def __init__(self, clock: Callable[[], float] = time.monotonic, folder: str = '/proc/self/task'):
    """Creates the sums of a process that starts.

    Args:
      clock: returns seconds that never run backwards.
      folder: Linux's folder of this process's threads.
    """
    self._clock, self._folder = clock, folder
    # Phase, its begin, and seconds of the phases before: two threads read it whole.
    self._latest: tuple[str, float, dict[str, float]] = ('starting', clock(), {})
    self._delays: dict[str, int] = {}  # nanoseconds, of each thread
    self._delay = 0.0

  def begin(self, phase: str) -> None:
    """Ends the phase before, and begins another or the same again."""
    self._latest = (phase, self._clock(), self._spent())

  def sample(self) -> dict:
    """Returns sums since the start, in seconds.

    Returns:
      'spent': of each phase; 'cpu': of all threads on a core; 'delay': of all threads
      that could run and had no core, be it others' or beyond the quota of a cgroup;
      'round_trip': to another host and back, see `round_trip`.
    """
    delays = self._read_delays()
    # A thread that has ended is not there any more; what it waited is.
    self._delay += sum(ns - self._delays.get(thread, 0) for thread, ns in delays.items()) / 1e9
    self._delays = delays
    sums = {'spent': self._spent(), 'cpu': time.process_time(), 'delay': self._delay}
    return sums | {'round_trip': round_trip()}

  def _spent(self):
    phase, since, spent = self._latest
    return {**spent, phase: spent.get(phase, 0.0) + self._clock() - since}

  def _read_delays(self):
    result = {}
    try:
      for thread in os.listdir(self._folder):
        with open(f'{self._folder}/{thread}/schedstat') as f:
          result[thread] = int(f.read().split()[1])
    except (OSError, IndexError, ValueError):  # a thread that has just ended; another system
      return {**self._delays, **result}
    return result


def round_trip() -> float:
  """Returns the seconds that a packet takes to another host and back; 0: unknown.

  They are the least of this process's connections in use, as the system measures them: a
  slow link of another process is seen in that process's connections alone, and of one's
  own in all.
  """
  times = []
  with contextlib.suppress(OSError):  # not Linux
    names = sorted(map(int, os.listdir('/proc/self/fd')))
    sockets = [n for n in names if _is_socket(n)][:_CONNECTIONS]
    times = [seconds for seconds in map(_round_trip, sockets) if seconds]
  return min(times, default=0.0)


def _is_socket(descriptor):
  with contextlib.suppress(OSError):  # closed meanwhile
    return os.readlink(f'/proc/self/fd/{descriptor}').startswith('socket:')
  return False


def _round_trip(descriptor):
  with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
    connection = socket.socket(fileno=descriptor)
    stack.callback(connection.detach)  # another's: it stays open
    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
    if not is_tcp or connection.getpeername()[0] == connection.getsockname()[0]:
      return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    if struct.unpack_from('I', info, _LAST_ANSWER)[0] < _RECENT:
      return struct.unpack_from('I', info, _ROUND_TRIP)[0] / 1e6
  return 0.0
