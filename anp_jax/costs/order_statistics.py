"""How long many devices take that each take a random time."""

from collections.abc import Sequence
import functools
import math

import numpy as np

_POINTS = 20001


@functools.cache
def normal_max(count: int, rank: int = 0) -> float:
  """The mean of the largest of `count` standard normal numbers.

  Args:
    count: of numbers.
    rank: how many are larger than the one that is asked for: 0 for the
      largest, k where k late ones are not waited for.

  Returns:
    In standard deviations; integrated numerically (David and Nagaraja 2003,
    chapter 3), to about 1e-6.
  """
  if not 0 <= rank < count:
    raise ValueError(f'rank {rank} of {count} numbers')
  x = np.linspace(-9, 9, _POINTS)
  density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
  below = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
  above = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x])
  # In logarithms: count may be thousands.
  tiny = np.finfo(float).tiny
  log_weight = (
    math.lgamma(count + 1)
    - math.lgamma(count - rank)
    - math.lgamma(rank + 1)
    + (count - 1 - rank) * np.log(np.maximum(below, tiny))
    + rank * np.log(np.maximum(above, tiny))
  )
  return float(np.trapezoid(x * density * np.exp(log_weight), x))


def slowest(
  seconds: float, jitter: float, count: int, backups: int = 0, factors: Sequence[float] = ()
) -> float:
  """The mean time until all but `backups` of `count` devices are done.

  Args:
    seconds: mean of one device.
    jitter: standard deviation over the mean, normal.
    count: of devices.
    backups: late ones that are not waited for.
    factors: of the devices among them that take so many times as long.
  """
  late = min(backups, count - 1)
  times = [seconds * f for f in factors][:count]
  times += [seconds] * (count - len(times))
  if count < 2 or not jitter:
    return sorted(times)[-1 - late]
  if times.count(seconds) == count:
    return max(0.0, seconds * (1 + jitter * normal_max(count, late)))
  # The mean of a positive number is the integral of its chance to be above x:
  # of more than `late` devices still at work then.
  x = np.linspace(0, max(times) * (1 + 9 * jitter), _POINTS // 5)
  at_work = [np.ones_like(x), *(np.zeros_like(x) for _ in range(late))]
  works_of = {
    time: np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in (x / time - 1) / jitter])
    for time in set(times)
  }
  for works in map(works_of.get, times):
    before = [np.zeros_like(x), *at_work[:-1]]
    at_work = [a * (1 - works) + b * works for a, b in zip(at_work, before)]
  return float(np.trapezoid(1 - sum(at_work), x))
