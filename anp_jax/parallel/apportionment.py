"""Division of a whole number among unequal devices."""

from collections.abc import Sequence
import math


def apportion(total: int, shares: Sequence[float], multiple: int = 1) -> tuple[int, ...]:
  """Whole numbers in proportion to shares, by the largest remainder.

  Args:
    total: sum of the numbers.
    shares: share of each device, 0 or more.
    multiple: divisor of each number but that of the largest share.

  Returns:
    A number for each share.
  """
  units = total // multiple
  exact = [units * s / sum(shares) for s in shares]
  counts = [math.floor(e) for e in exact]
  # The first of equal remainders wins: the order of the devices is fixed.
  by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
  for i in by_remainder[: units - sum(counts)]:
    counts[i] += 1
  counts = [n * multiple for n in counts]
  counts[max(range(len(shares)), key=lambda i: shares[i])] += total - units * multiple
  return tuple(counts)
