"""What a process spends its time on, for `lateness` to compare with the others'."""

from collections.abc import Callable
import os
import time


class Activity:
  """Adds up the time of this process by phase, and what its threads wait for a core."""

  def __init__(self, clock: Callable[[], float] = time.monotonic, folder: str = '/proc/self/task'):
    """Creates the sums of a process that starts.

    Args:
      clock: returns seconds that never run backwards.
      folder: Linux's folder of this process's threads.
    """
    self._clock, self._folder = clock, folder
    self._latest = ('starting', clock())  # one tuple, which two threads read whole
    self._spent: dict[str, float] = {}
    self._delays: dict[str, int] = {}  # nanoseconds, of each thread
    self._delay = 0.0

  def begin(self, phase: str) -> None:
    """Ends the phase before, and begins another or the same again."""
    (before, since), now = self._latest, self._clock()
    self._spent[before] = self._spent.get(before, 0.0) + now - since
    self._latest = (phase, now)

  def sample(self) -> dict:
    """Returns sums since the start, in seconds.

    Returns:
      'spent': of each phase; 'cpu': of all threads on a core; 'delay': of all threads
      that could run and had no core, be it others' or beyond the quota of a cgroup.
    """
    phase, since = self._latest
    spent = dict(self._spent)
    spent[phase] = spent.get(phase, 0.0) + self._clock() - since
    delays = self._read_delays()
    # A thread that has ended is not there any more; what it waited is.
    self._delay += sum(ns - self._delays.get(thread, 0) for thread, ns in delays.items()) / 1e9
    self._delays = delays
    return {'spent': spent, 'cpu': time.process_time(), 'delay': self._delay}

  def _read_delays(self):
    result = {}
    try:
      for thread in os.listdir(self._folder):
        with open(f'{self._folder}/{thread}/schedstat') as f:
          result[thread] = int(f.read().split()[1])
    except (OSError, IndexError, ValueError):  # a thread that has just ended; another system
      return {**self._delays, **result}
    return result
