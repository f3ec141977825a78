"""Programs that are timed in turn on a run's devices, round after round."""

from collections.abc import Callable, Sequence
from concurrent import futures
import time

import numpy as np
from scipy import stats

from anp_jax import cluster
from anp_jax.system import stopwatch

# Rounds at least and at most, seconds after which no further round begins, and the
# relative width of an interval of the devices' speeds that is narrow enough.
_ROUNDS, _SECONDS, _INTERVAL = (3, 30), 20.0, 0.05


class Rounds:
  """Times each program once in a round, on all devices at once.

  A machine that is slower for a while is slower for all programs then. Devices that
  share a memory or a core are timed as they will be used.
  """

  def __init__(self, processes: cluster.Processes):
    """Creates rounds without a program.

    Args:
      processes: processes of the run, which all add the same programs.
    """
    self._processes = processes
    self._programs: list[Sequence[Callable]] = []
    self._collectives: list[Callable] = []
    # By round: of each program and device, and of each collective.
    self._seconds: list[list[list[float]]] = []
    self._collective_seconds: list[list[float]] = []

  def add(self, runs: Sequence[Callable]) -> int:
    """Adds a program, a function for each device of this process; returns its index."""
    self._programs.append(runs)
    return len(self._programs) - 1

  def add_collective(self, run: Callable) -> None:
    """Adds a program of all devices of all processes together."""
    self._collectives.append(run)

  def run(self) -> None:
    """Times until the devices' speeds are known; all processes call it."""
    seconds = 0.0
    while len(self._seconds) < _ROUNDS[0] or (
      seconds < _SECONDS and len(self._seconds) < _ROUNDS[1] and self.interval() > _INTERVAL
    ):
      start = time.perf_counter()
      self._round()
      # All processes must run equally many rounds.
      seconds += max(self._processes.gather(time.perf_counter() - start))

  def interval(self) -> float:
    """Returns the uncertainty of the devices' speeds, the same on all processes.

    The ratios of a device's seconds in a round to the first one's have a mean;
    the result is the largest width of its 95 % interval, over that mean.
    0 with one device.
    """
    count = len(self._seconds)
    # All programs of a device together.
    local_seconds = [
      [sum(t[i] for t in times if i < len(t)) for times in self._seconds]
      for i in range(max(map(len, self._programs)))
    ]
    seconds = np.array(sum(self._processes.gather(local_seconds), []))
    if len(seconds) == 1:
      return 0.0
    ratios = seconds[1:] / seconds[0]
    error = ratios.std(1, ddof=1) / np.sqrt(count)
    width = 2 * stats.t.ppf(0.975, count - 1) * error / ratios.mean(1)
    return float(width.max())

  def median(self, program: int) -> np.ndarray:
    """Returns the seconds of a program by device of this process, medians over rounds."""
    return np.median([times[program] for times in self._seconds], 0)

  def collective_medians(self) -> np.ndarray:
    """Returns the seconds of each collective, those of the slowest process."""
    medians = np.median(self._collective_seconds, 0).tolist()
    return np.max(self._processes.gather(medians), 0)

  def _round(self):
    """Times everything once; all processes call it equally often."""
    self._seconds.append([])
    with futures.ThreadPoolExecutor(max(map(len, self._programs))) as pool:
      for program in self._programs:
        self._processes.heartbeat('timing')
        self._processes.gather('ready')
        self._seconds[-1].append(list(pool.map(stopwatch.timed_again, program)))
    self._processes.gather('ready')
    self._collective_seconds.append([stopwatch.timed_again(run) for run in self._collectives])
