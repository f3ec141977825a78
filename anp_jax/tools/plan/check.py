"""Compares predictions with published rates of ResNet-50.

Twice: from data sheets alone, with no rate of the device that is predicted, and
with one or two rates of the system on its fewest nodes, which predict its others.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import statistics

import numpy as np

from anp_jax.reporting import report_kit
from anp_jax.tools.plan import fit as fit_lib, intervals, published_rates


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A published rate and its prediction.

  Attributes:
    row: published row.
    rate: predicted images/s.
    logged: error of the prediction, as intervals are made of it.
    interval: interval of the prediction, from errors of other systems; None: no rate is like it.
  """

  row: published_rates.Row
  rate: float
  logged: intervals.Error
  interval: intervals.Interval | None

  @property
  def error(self) -> float:
    """The relative error of the prediction."""
    return self.rate / self.row.rate - 1

  @property
  def is_covered(self) -> bool:
    """Whether the published rate lies in the interval, where there is one."""
    i = self.interval
    return i is not None and i.low <= self.row.rate / self.rate <= i.high


def chosen(rows: Sequence[published_rates.Row]) -> list[published_rates.Row]:
  """The rows of a system from which its others are predicted: at most two.

  Both have the fewest nodes. The first is that of the fewest devices. The second
  is the one whose images a device differ most from it, or, if none differ, that
  of the most devices; there is none if no row would be left to be predicted.
  """
  first = min(rows, key=lambda r: r.cluster.size)
  if len(rows) < 2:
    return []

  def distance(row):
    larger = max(row.images, first.images)
    return larger / min(row.images, first.images), row.cluster.size

  near = [r for r in rows if r is not first and r.cluster.nodes == first.cluster.nodes]
  return [first, max(near, key=distance)] if near and len(rows) > 2 else [first]


def compare(rows: Sequence[published_rates.Row]) -> list[Comparison]:
  """Predicts every published row in both ways."""
  result = []
  for device in dict.fromkeys(row.device.name for row in rows):
    fit = fit_lib.fit_rows([r for r in rows if r.device.name != device])
    for row in rows:
      if row.device.name == device:
        result.append(_comparison(fit, row, 'sheet', 1))
  for system in dict.fromkeys(row.system for row in rows):
    inside = [r for r in rows if r.system == system]
    if picks := chosen(inside):
      fit = fit_lib.fit_rows([*(r for r in rows if r.system != system), *picks])
      for row in inside:
        if row not in picks:
          result.append(_comparison(fit, row, 'few', picks[0].cluster.nodes))
  return result


def _comparison(fit, row, mode, nodes) -> Comparison:
  seconds = fit_lib.predict(fit, row, row.system)
  kind = mode, fit_lib.units(row.device, row.dtype), row.cluster.nodes > nodes
  error = intervals.Error(*kind, row.system, round(math.log(seconds / row.seconds), 4))
  interval = intervals.find(intervals.published(), *kind, row.system)
  return Comparison(row, row.images * row.cluster.size / seconds, error, interval)


def errors(comparisons: Sequence[Comparison]) -> dict[str, float]:
  """Summaries of absolute errors and intervals by mode: sheet_mean, sheet_p95 and so on.

  Keys end in mean, p95 and worst (relative errors), rates (number of predictions),
  intervals (number of predictions with one) and covered (share of the intervals
  in which the published rate lies).
  """
  result: dict[str, float] = {}
  for mode in intervals.MODES:
    of_mode = [c for c in comparisons if c.logged.mode == mode]
    if of_mode:
      sizes = [abs(c.error) for c in of_mode]
      coverage = [c.is_covered for c in of_mode if c.interval]
      values = {
        'mean': statistics.mean(sizes),
        'p95': np.quantile(sizes, 0.95),
        'worst': max(sizes),
        'rates': len(sizes),
        'intervals': len(coverage),
        'covered': sum(coverage) / max(len(coverage), 1),
      }
      result |= {f'{mode}_{name}': round(float(v), 4) for name, v in values.items()}
  return result


def lines(comparisons: Sequence[Comparison]) -> str:
  """Returns the comparison as a table for each mode, for a terminal, and its summaries."""
  head = 'system', 'devices', 'images', 'published', 'predicted', 'error', '90 % interval'
  blocks: list[report_kit.Table | str] = []
  for mode, words in intervals.MODES.items():
    rows = [_cells(c) for c in comparisons if c.logged.mode == mode]
    blocks.append(report_kit.Table([head, *rows], caption=words))
  return report_kit.plain([*blocks, '\n'.join(summary(errors(comparisons)))])


def _cells(c) -> tuple[str, ...]:
  interval = c.interval
  text = interval.text(c.rate) if interval else intervals.NONE
  if interval and not c.is_covered:
    text += ' missed'
  sizes = c.row.system, f'{c.row.cluster.size}', f'{c.row.images}'
  return *sizes, f'{c.row.rate:,.0f}', f'{c.rate:,.0f}', f'{100 * c.error:+.1f} %', text


def summary(values: Mapping[str, float]) -> list[str]:
  """Returns a sentence for each mode of `errors`; docs/planner.md has them."""
  result = []
  for mode, words in intervals.MODES.items():
    if f'{mode}_rates' in values:
      mean, p95, worst, covered = (
        100 * values[f'{mode}_{name}'] for name in ('mean', 'p95', 'worst', 'covered')
      )
      rates, count = values[f'{mode}_rates'], values[f'{mode}_intervals']
      result.append(
        f'{words}: mean error {mean:.1f} %, 95th percentile {p95:.1f} %, worst {worst:.1f} % of '
        f'{rates:g} rates; {covered:.0f} % of {count:g} lie in their 90 % interval'
      )
  return result
