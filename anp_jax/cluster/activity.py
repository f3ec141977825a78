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
      that could run and had no core, be it others' or beyond the quota of a cgroup.
    """
    delays = self._read_delays()
    # A thread that has ended is not there any more; what it waited is.
    self._delay += sum(ns - self._delays.get(thread, 0) for thread, ns in delays.items()) / 1e9
    self._delays = delays
    return {'spent': self._spent(), 'cpu': time.process_time(), 'delay': self._delay}

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
