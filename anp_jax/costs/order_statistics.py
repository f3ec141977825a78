"""Expected time of the slowest of many devices whose step times are random."""

from collections.abc import Sequence
import functools

import numpy as np

_POINTS = 20001


@functools.cache
def normal_max(count: int, rank: int = 0) -> float:
  """The mean of the largest of `count` standard normal numbers.

  Args:
    count: number of normal numbers.
    rank: larger numbers to skip: 0 for the largest, k where the k slowest
      devices are not waited for.

  Returns:
    Standard deviations above the mean; integrated numerically (David and
    Nagaraja 2003, chapter 3), to about 1e-6.
  """
  from scipy import special  # slow to import, and a run that predicts nothing does without

  # The integral of the chance that the number is above x.
  x = np.linspace(-9, 9, _POINTS)
  return float(np.trapezoid(1 - special.bdtr(rank, count, special.ndtr(-x)), x)) - 9


def slowest(
  seconds: float, jitter: float, count: int, backups: int = 0, factors: Sequence[float] = ()
) -> float:
  """The mean time until all but `backups` of `count` devices are done.

  Args:
    seconds: mean of one device.
    jitter: standard deviation over the mean, normal.
    count: number of devices.
    backups: slowest devices that are not waited for.
    factors: slowdown of each slow device; the others have 1.
  """
  late = min(backups, count - 1)
  times = [seconds * f for f in factors][:count]
  times += [seconds] * (count - len(times))
  if count < 2 or not jitter:
    return sorted(times)[-1 - late]
  if times.count(seconds) == count:
    return max(0.0, seconds * (1 + jitter * normal_max(count, late)))
  from scipy import special

  # The mean of a positive number is the integral of the probability that it exceeds
  # x: that more than `late` devices are still working at time x.
  x = np.linspace(0, max(times) * (1 + 9 * jitter), _POINTS // 5)
  working = [np.ones_like(x), *(np.zeros_like(x) for _ in range(late))]
  exceeds = {time: special.ndtr((1 - x / time) / jitter) for time in set(times)}
  for time in times:
    before = [np.zeros_like(x), *working[:-1]]
    working = [w * (1 - exceeds[time]) + b * exceeds[time] for w, b in zip(working, before)]
  return float(np.trapezoid(1 - np.sum(working, axis=0), x))
