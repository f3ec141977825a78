"""Intervals of predicted rates, from errors of predicting published ones.

Errors are leave-one-out: no rate helped to predict itself. Those count that are
alike in what was known of the device (`MODES`), in the units that compute, and in
whether the cluster has more nodes than any rate that was fitted.
"""

from collections.abc import Sequence
import csv
import dataclasses
import functools
import math
import os
import statistics

from scipy import stats

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'errors.csv')
MODES = {'sheet': 'from data sheets', 'few': 'from one or two rates'}
SHARE = 0.9
NONE = 'no published rate like this'
# As many systems of all errors of a mode count as systems of errors that are alike.
_BORROWED = 2


@dataclasses.dataclass(frozen=True)
class Error:
  """The error of one prediction of a published rate.

  Attributes:
    mode: one of MODES.
    units: one of `fit.UNITS`.
    more_nodes: whether it has more nodes than each rate of its device or system that was fitted,
      or than one.
    system: system that was predicted.
    log: logarithm of the published rate over the predicted one.
  """

  mode: str
  units: str
  more_nodes: bool
  system: str
  log: float


@dataclasses.dataclass(frozen=True)
class Interval:
  """Where the rate lies with a probability of SHARE.

  Attributes:
    low, high: ends over the predicted rate.
    rates: number of published rates behind it.
    systems: number of systems that they are of.
  """

  low: float
  high: float
  rates: int
  systems: int

  def text(self, rate: float) -> str:
    """The interval of a predicted rate, with the number of published rates behind it."""
    return f'{rate * self.low:,.0f} to {rate * self.high:,.0f} ({self.rates})'

  def to_json(self, rate: float) -> dict:
    """The interval of a predicted rate, and what is behind it."""
    ends = {'low': round(rate * self.low, 2), 'high': round(rate * self.high, 2)}
    return ends | {'share': SHARE, 'rates': self.rates, 'systems': self.systems}


@functools.cache
def published() -> tuple[Error, ...]:
  """Returns the errors of the published rates, as `check.compare` makes them."""
  with open(FILE, encoding='utf-8', newline='') as f:
    return tuple(
      Error(r['mode'], r['units'], r['more_nodes'] == 'True', r['system'], float(r['log']))
      for r in csv.DictReader(f)
    )


def find(
  errors: Sequence[Error], mode: str, units: str, more_nodes: bool, system: str = ''
) -> Interval | None:
  """Returns the interval of a prediction; None: no published rate is like it.

  Systems count alike, and the rates of a system share its weight. With few of
  them the variance is also that of all errors of the mode, and the quantile is
  Student's.

  Args:
    errors: errors of predictions.
    mode: mode of the prediction.
    units: units of the prediction.
    more_nodes: whether the prediction has more nodes than what was fitted.
    system: system whose errors do not count.
  """
  of_mode = [e for e in errors if e.mode == mode and e.system != system]
  alike = [e for e in of_mode if (e.units, e.more_nodes) == (units, more_nodes)]
  if not alike:
    return None
  squares = _squares(alike)
  count = _BORROWED + len(squares)
  variance = (_BORROWED * statistics.mean(_squares(of_mode)) + sum(squares)) / count
  half = stats.t.ppf((1 + SHARE) / 2, count) * math.sqrt(variance)
  return Interval(math.exp(-half), math.exp(half), len(alike), len(squares))


def _squares(errors) -> list[float]:
  """The mean square of each system's errors."""
  systems: dict[str, list[float]] = {}
  for e in errors:
    systems.setdefault(e.system, []).append(e.log**2)
  return [statistics.mean(values) for values in systems.values()]
