"""Equal times for devices that are about equally fast."""

from collections.abc import Callable, Sequence

import numpy as np

_SIMILAR = 1.1  # largest ratio of their times


def averaging(seconds: Sequence[float]) -> Callable[[Sequence], list]:
  """Returns a function that gives devices of about these seconds the mean of their values.

  Their times differ by chance, and shares would follow the difference.

  Args:
    seconds: seconds of each device for the same work.
  """
  groups: dict[int, list[int]] = {}  # fastest device to those about as fast
  for d in sorted(range(len(seconds)), key=lambda d: seconds[d]):
    fastest = next((f for f in groups if seconds[d] <= _SIMILAR * seconds[f]), d)
    groups.setdefault(fastest, []).append(d)
  group_of = {d: group for group in groups.values() for d in group}

  def mean(values):
    return [np.mean([values[i] for i in group_of[d]], 0).tolist() for d in range(len(values))]

  return mean
