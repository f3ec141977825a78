"""The time that steps would take on a simulated cluster.

When workers wait for each other, timing does not affect what they learn.
"""

from collections.abc import Callable, Iterator
import itertools

from ml_collections import ConfigDict
import numpy as np

from anp_jax.system import emulation


class SimulatedClock:
  """The simulated time at which all groups of workers have made a step.

  It is a pure function of the config and the step, so that a resumed run has the
  same times.
  """

  orders_batches = False  # batches come in the order of their steps

  def __init__(
    self,
    config: ConfigDict,
    groups: int = 1,
    is_exchange: Callable[[int], bool] = lambda step: False,
    exchange_seconds: float = 0.0,
  ):
    """Starts before the first step.

    Args:
      config: config of the run, with its batch size and strategy.simulate.
      groups: number of groups of neighbouring workers, of one size. Workers of a
        group wait for each other in every step, groups in exchanges only.
      is_exchange: whether groups exchange weights after a step.
      exchange_seconds: seconds of an exchange.
    """
    self._config, self._groups = config, groups
    self._settings = config.strategy.simulate
    self._is_exchange = is_exchange
    self._exchange_seconds = exchange_seconds
    self._ends = [0.0]
    self._steps = self._simulate()

  def seconds(self, step: int) -> float:
    """Returns the simulated seconds from the run's start to a step's end."""
    self._ends.extend(itertools.islice(self._steps, max(0, step + 1 - len(self._ends))))
    return self._ends[step]

  def values(self, kind: str, step: int) -> dict[str, float]:
    """The metrics of a step; see `reporting.telemetry.Telemetry.simulate`."""
    del kind
    return {'simulated_seconds': self.seconds(step)}

  def describe(self) -> str:
    """Returns the simulated cluster in one line for people."""
    s = self._settings
    parts = [f'simulated, {s.workers}', *emulation.describe_pass(s, 'worker')]
    if self._groups > 1:
      parts[0] += f' in {self._groups} groups'
    parts.append(f'sum of gradients {self._reduce_seconds():g} s')
    if self._groups > 1:
      parts.append(f'exchange {self._exchange_seconds:g} s')
    return ', '.join(parts)

  def _simulate(self) -> Iterator[float]:
    """Yields the simulated end of each step, from the first one on."""
    config, s = self._config, self._settings
    images = config.batch_size // s.workers
    reduce_seconds = self._reduce_seconds()
    clocks = np.zeros(self._groups)
    for step in itertools.count(1):
      passes = emulation.worker_seconds(s, images, (config.seed, step), s.workers)
      clocks += passes.reshape(self._groups, -1).max(1) + reduce_seconds
      if self._groups > 1 and self._is_exchange(step):
        clocks[:] = clocks.max() + self._exchange_seconds
      yield float(clocks.max())

  def _reduce_seconds(self):
    """Seconds of a sum of gradients; 0 for groups of one worker."""
    s = self._settings
    return s.reduce_seconds if s.workers > self._groups else 0.0
