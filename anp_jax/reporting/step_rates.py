"""Rates of training steps, and the time that is left."""

import collections
from collections.abc import Callable
import dataclasses

# The time left is that of this many of the last intervals: a slow start (cold
# caches, compilation) leaves it, and the noise of one interval hardly shows.
_RECENT = 32


@dataclasses.dataclass(frozen=True)
class RunLength:
  """The length of a run, and its first step.

  Attributes:
    total_steps: step at which the run ends.
    batch_size: images per step over all devices.
    examples: images per epoch.
    start_step: restored step; 0 for a new run.
  """

  total_steps: int
  batch_size: int
  examples: int
  start_step: int = 0

  def epoch(self, step: int) -> float:
    """Returns the epochs that are done after a step."""
    return step * self.batch_size / self.examples


class StepRates:
  """Rates of a run between two calls, without pauses.

  Attributes:
    flops_per_step: operations of a step on all devices; 0.0 leaves the MFU out.
  """

  def __init__(self, length: RunLength, peak_flops: float, clock: Callable[[], float]):
    """Starts the first interval.

    Args:
      length: length of the run.
      peak_flops: FLOP/s of all devices together; 0.0 leaves the MFU out.
      clock: function that returns seconds, which never run backwards.
    """
    self.flops_per_step = 0.0
    self._length, self._peak_flops, self._clock = length, peak_flops, clock
    self._pauses = 0.0  # seconds of pauses that come back, since the start
    self._intervals: collections.deque[tuple[int, float]] = collections.deque(maxlen=_RECENT)
    self.start(length.start_step)

  def start(self, step: int) -> None:
    """Starts an interval after a step."""
    self._mark, self._paused, self._step = self._clock(), 0.0, step

  def pause(self, seconds: float, comes_back: bool) -> None:
    """Excludes seconds from the interval.

    Args:
      seconds: length of the pause.
      comes_back: whether the time left holds such pauses too.
    """
    self._paused += seconds
    self._pauses += seconds if comes_back else 0.0

  def end(self, step: int, input_wait: float) -> dict[str, float]:
    """Ends the interval at a step, and starts the next one.

    Args:
      step: updates made so far.
      input_wait: seconds of the interval that the loop waited for input.

    Returns:
      Rates by name; {} for an interval without a step.
    """
    # The clock may stand still between two calls.
    seconds = max(self._clock() - self._mark - self._paused, 1e-9)
    steps = step - self._step
    self.start(step)
    if not steps:
      return {}
    self._intervals.append((steps, seconds))
    rates = {
      'seconds': seconds,
      'images_per_second': steps * self._length.batch_size / seconds,
      'input_wait': min(input_wait / seconds, 1.0),
    }
    if self._peak_flops > 0 and self.flops_per_step > 0:
      rates['mfu'] = steps * self.flops_per_step / seconds / self._peak_flops
    return rates

  def seconds_left(self, step: int) -> float:
    """Returns the seconds to the end by recent steps, and pauses averaged over the run."""
    steps = max(sum(s for s, _ in self._intervals), 1)
    seconds = sum(t for _, t in self._intervals) / steps
    seconds += self._pauses / max(step - self._length.start_step, 1)
    return max(self._length.total_steps - step, 0) * seconds
