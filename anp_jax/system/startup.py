"""The time of each phase between the command and the first step."""

import os
import time


class StartupTimer:
  """Seconds of each phase of a start, from the start of the process.

  Attributes:
    phases: seconds by name, in order.
  """

  def __init__(self, started_at: float = 0.0) -> None:
    """Begins with the first phase.

    Args:
      started_at: seconds since 1970; 0: when the kernel started the process.
    """
    self._last, self._started_at = 0.0, started_at
    self.phases: dict[str, float] = {}

  def end_phase(self, name: str) -> None:
    """Ends a phase; a phase that ends twice adds up."""
    now = time.time() - self._started_at if self._started_at else _age()
    self.phases[name] = self.phases.get(name, 0.0) + now - self._last
    self._last = now

  def before(self, name: str) -> float:
    """Returns the seconds of all phases before one."""
    names = list(self.phases)
    return sum(self.phases[n] for n in names[: names.index(name)])

  def text(self) -> str:
    """Returns one line: the time since the command, then that of each phase."""
    parts = ', '.join(f'{k} {v:.1f}' for k, v in self.phases.items())
    return f'first step after {self._last:.1f} s: {parts}'


def _age() -> float:
  """Seconds since this process started, by the kernel, so imports count too."""
  try:
    with open('/proc/self/stat') as f:
      ticks = int(f.read().rpartition(')')[2].split()[19])
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, AttributeError, ValueError):
    return time.process_time()
