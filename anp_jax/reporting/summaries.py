"""Means over seeds, with their intervals."""

from collections.abc import Iterable
import dataclasses
import math
import statistics


@dataclasses.dataclass(frozen=True)
class Summary:
  """Mean and standard deviation over seeds (of a sample: n - 1).

  Attributes:
    mean: mean of the values.
    deviation: standard deviation; 0 of a single value.
    count: number of values.
  """

  mean: float
  deviation: float
  count: int

  @property
  def interval(self) -> float | None:
    """Half of the mean's 95 % interval (Student's t); None of one value."""
    if self.count < 2:
      return None
    from scipy import stats  # takes a second

    quantile = stats.t.ppf(0.975, self.count - 1)
    return float(quantile * self.deviation / self.count**0.5)


def summarize(values: Iterable[float | None]) -> Summary | None:
  """Returns the summary of the numbers that are not None; None if there is none."""
  numbers = [v for v in values if v is not None]
  if not numbers:
    return None
  mean, deviation = statistics.fmean(numbers), 0.0
  if len(numbers) > 1:
    deviation = statistics.stdev(numbers) if math.isfinite(mean) else math.nan
  return Summary(mean, deviation, len(numbers))
