"""A clock that stands still while its process is stopped."""

from collections.abc import Callable
import time

# Periods that count between two ticks; a busy machine is late by less.
_MOST = 2


class AwakeClock:
  """Seconds during which this process could run.

  Ctrl-Z, Slurm's suspend or a library that holds the interpreter stop all
  threads. Whoever waits for another process must not count such seconds: it
  could not have heard of the other.
  """

  def __init__(self, period: float, clock: Callable[[], float] = time.monotonic):
    """Makes a clock that counts every second until the first tick.

    Args:
      period: seconds between two ticks.
      clock: returns seconds that never run backwards.
    """
    self._clock = clock
    self._most = _MOST * period
    # One tuple, so that no other thread reads half of a change.
    self._last = None  # seconds of the clock and of this one at the last tick

  def __call__(self) -> float:
    """Returns the seconds now, which never run backwards either."""
    last, now = self._last, self._clock()
    if last is None:
      return now
    return last[1] + min(now - last[0], self._most)

  def tick(self) -> None:
    """Shows that this process runs; one thread calls it every period."""
    now = self._clock()
    seconds = now
    if self._last is not None:
      seconds = self._last[1] + min(now - self._last[0], self._most)
    self._last = now, seconds
