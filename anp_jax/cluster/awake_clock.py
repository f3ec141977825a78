"""A clock that stands still while its process is stopped."""

from collections.abc import Callable
import time

# Periods that count between two ticks; a busy machine is late by less.
_MOST = 2


class AwakeClock:
  """Seconds during which this process could run.

  Ctrl-Z, Slurm's suspend or a library that holds the interpreter stop all
  threads. A timeout of another process must not count such seconds: nothing
  of the other could be received.
  """

  def __init__(self, period: float, clock: Callable[[], float] = time.monotonic):
    """Creates a clock that counts every second until the first tick.

    Args:
      period: seconds between two ticks.
      clock: returns seconds that never run backwards.
    """
    self._clock = clock
    self._most = _MOST * period
    # One tuple, so that no other thread reads half of a change.
    # Seconds of the clock and of this one at the last tick.
    self._last: tuple[float, float] | None = None

  def __call__(self) -> float:
    """Returns the seconds now, which never run backwards either."""
    return self._seconds(self._clock())

  def tick(self) -> None:
    """Records that this process runs; one thread calls it every period."""
    now = self._clock()
    self._last = now, self._seconds(now)

  def _seconds(self, now):
    last = self._last
    if last is None:
      return now
    before, seconds = last
    return seconds + min(now - before, self._most)
