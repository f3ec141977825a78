"""Expected time of the slowest of many devices whose step times are random."""

from collections.abc import Sequence

import numpy as np

_POINTS = 4000


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
  if count < 2 or not jitter * seconds:
    return sorted(times)[-1 - late]
  from scipy import special  # slow to import, and a run that predicts nothing does without

  # The mean of a positive number is the integral of the probability that it exceeds
  # x: that more than `late` devices are still working at time x.
  x = np.linspace(0, max(times) * (1 + 9 * jitter), _POINTS)
  exceeds = {time: special.ndtr((1 - x / time) / jitter) for time in set(times)}
  usual = max(exceeds, key=times.count)
  exceptions = [time for time in times if time != usual]
  # By number: the chance that so many of the exceptions are still working
  working = [np.ones_like(x), *(np.zeros_like(x) for _ in exceptions[:late])]
  for time in exceptions:
    before = [np.zeros_like(x), *working[:-1]]
    working = [w * (1 - exceeds[time]) + b * exceeds[time] for w, b in zip(working, before)]
  alike = count - len(exceptions)
  for number, chance in enumerate(working):
    chance *= special.bdtr(min(late - number, alike), alike, exceeds[usual])
  return float(np.trapezoid(1 - np.sum(working, axis=0), x))
