"""The time that steps would take on a cluster that is not there.

What is computed stays as it is: of workers that wait for each other, no time
decides what they learn.
"""

from collections.abc import Callable, Iterator
import itertools

import numpy as np

from anp_jax.system import emulation


class SimulatedClock:
  """Tells when simulated workers have made a step, all of their groups.

  It is a pure function of the config and the step, so that it survives a
  resume.
  """

  def __init__(
    self,
    config,
    groups: int = 1,
    is_exchange: Callable[[int], bool] = lambda step: False,
    exchange_seconds: float = 0.0,
  ):
    """Starts before the first step.

    Args:
      config: of the run, with its batch size and strategy.simulate.
      groups: of neighbouring workers, equally many in each, which wait for each
        other in every step. Groups wait for each other in exchanges only.
      is_exchange: whether groups exchange weights after a step.
      exchange_seconds: what that takes them.
    """
    self._config, self._groups = config, groups
    self._settings = config.strategy.simulate
    self._is_exchange = is_exchange
    self._exchange_seconds = exchange_seconds
    self._restart()

  def seconds(self, step: int) -> float:
    """Returns the simulated seconds from the run's start to a step's end.

    It is quick where a step is not smaller than that of the last call.
    """
    if step < self._step:
      self._restart()
    while self._step < step:
      self._step, self._seconds = next(self._steps)
    return self._seconds

  def describe(self) -> str:
    """Returns what is simulated, in one line for people."""
    s = self._settings
    parts = [f'simulated, {s.workers}', *emulation.describe_pass(s, 'worker')]
    if self._groups > 1:
      parts[0] += f' in {self._groups} groups'
    parts.append(f'sum of gradients {self._reduce_seconds():g} s')
    if self._groups > 1:
      parts.append(f'exchange {self._exchange_seconds:g} s')
    return ', '.join(parts)

  def _restart(self):
    self._step, self._seconds = 0, 0.0
    self._steps = enumerate(self._ends(), 1)

  def _ends(self) -> Iterator[float]:
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
    """Seconds of a sum of gradients, which a group of one does not make."""
    s = self._settings
    return s.reduce_seconds if s.workers > self._groups else 0.0
