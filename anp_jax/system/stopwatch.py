"""Times of functions, and their quartiles."""

from collections.abc import Callable, Sequence
import statistics
import time


def timed(run: Callable[[], object]) -> float:
  """Returns the seconds that a function takes."""
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def timed_again(run: Callable[[], object]) -> float:
  """Returns the seconds of a function's second call.

  Steps of a run follow each other. A core that was idle, or did something else,
  takes a fifth longer for the first call.
  """
  run()
  return timed(run)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
  """Returns the lower quartile, the median and the upper quartile."""
  if len(values) < 2:
    return (values[0],) * 3
  low, median, high = statistics.quantiles(values, n=4, method='inclusive')
  return low, median, high
