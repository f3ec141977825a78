"""Which convolutions are split, and how many features each device computes."""

from collections.abc import Sequence
import math
import re


class Shares:
  """The same shares for every convolution."""

  def __init__(self, shares: Sequence[float], layers: str):
    """Makes it.

    Args:
      shares: of each device, in proportion; () for equal ones.
      layers: regular expression, searched for in a layer's path; others are
        not split.
    """
    self._shares = tuple(shares)
    self._layers = re.compile(layers)

  def counts(
    self, layer: str, features: int, devices: int
  ) -> tuple[int, ...] | None:
    """Features of each device; None for a layer that is not split."""
    if devices == 1 or not self._layers.search(layer):
      return None
    return apportion(features, self._shares or (1,) * devices)


def apportion(
  features: int, shares: Sequence[float], multiple: int = 1
) -> tuple[int, ...]:
  """Whole numbers in proportion to shares, by the largest remainder.

  Args:
    features: their sum.
    shares: of each device, 0 or more.
    multiple: that each is of, but that of the largest share.

  Returns:
    As many numbers as shares.
  """
  units = features // multiple
  exact = [units * s / sum(shares) for s in shares]
  counts = [math.floor(e) for e in exact]
  # Of equal remainders the first: the order of the devices is fixed.
  by_remainder = sorted(
    range(len(shares)), key=lambda i: (counts[i] - exact[i], i)
  )
  for i in by_remainder[: units - sum(counts)]:
    counts[i] += 1
  counts = [n * multiple for n in counts]
  counts[max(range(len(shares)), key=lambda i: shares[i])] += (
    features - units * multiple
  )
  return tuple(counts)
