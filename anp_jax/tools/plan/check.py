"""Compares predictions with published rates of ResNet-50.

Twice: from data sheets alone, with no row of the system that is predicted, and
with one or two of its rows, which predict its other rows.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools

from anp_jax.config import command_line, recipes
from anp_jax.costs import work
from anp_jax.system import markdown
from anp_jax.tools.plan import fit as fit_lib, published_rates, workload as workload_lib

# ImageNet's 1,281,167 training images of 1,000 classes, at 224 px.
_EXAMPLES, _CLASSES = 1281167, 1000
# Mean absolute errors of predictions from data sheets alone, and from one or two
# rows of the system, as `errors` computes them of the published rows.
SHEET_ERROR, FEW_ERROR = 0.096, 0.046


@dataclasses.dataclass(frozen=True)
class Comparison:
  """One published row and its predictions, in images/s.

  Attributes:
    row: published row.
    sheet: rate predicted without any row of its system.
    few: rate predicted with one or two rows of its system; None if the system has no other row.
    is_fitted: whether this row is one of those two.
  """

  row: published_rates.Row
  sheet: float
  few: float | None
  is_fitted: bool

  @property
  def sheet_error(self) -> float:
    """The relative error of `sheet`."""
    return self.sheet / self.row.rate - 1

  @property
  def few_error(self) -> float | None:
    """The relative error of `few`; None for a fitted row, and where there is no other."""
    if self.few is None or self.is_fitted:
      return None
    return self.few / self.row.rate - 1


@functools.cache
def resnet50(dtype: str) -> work.Workload:
  """The workload of the published rows.

  Args:
    dtype: 'float32', 'float16' or 'bfloat16'; the latter two cost the same.
  """
  recipe = f'{recipes.shipped() / "resnet_anp.py"}:modern'
  is_half = dtype in ('float16', 'bfloat16')
  config = command_line.load(
    recipe,
    {'model.dtype': 'bfloat16' if is_half else dtype, 'ema': '0', 'data.source': 'synthetic'},
  )
  workload = workload_lib.count(config, _EXAMPLES, _CLASSES)
  return dataclasses.replace(workload, dtype=dtype)


def chosen(rows: Sequence[published_rates.Row]) -> list[published_rates.Row]:
  """The rows of a system from which its others are predicted: at most two.

  The first is that of the fewest devices. Of three rows or more, the second is
  the one whose images a device differ most from it, or, if none differ, that of
  the most devices. Of two rows, the other is left to be predicted.
  """
  first = min(rows, key=lambda r: r.cluster.size)
  if len(rows) < 2:
    return []
  if len(rows) == 2:
    return [first]

  def distance(row):
    larger = max(row.images, first.images)
    return larger / min(row.images, first.images), row.cluster.size

  return [first, max((r for r in rows if r is not first), key=distance)]


def compare(
  rows: Sequence[published_rates.Row], workloads: Callable[[str], work.Workload] = resnet50
) -> list[Comparison]:
  """Predicts every row in both ways.

  Args:
    rows: published rows.
    workloads: function from a dtype to the workload of the network that they trained.
  """
  cases = fit_lib.cases(rows, workloads)
  result = []
  for system in dict.fromkeys(row.system for row in rows):
    inside = [c for c in cases if c.row.system == system]
    outside = [c for c in cases if c.row.system != system]
    sheet = fit_lib.fit_cases(outside)
    picks = chosen([c.row for c in inside])
    used = [c for c in inside if any(c.row is p for p in picks)]
    few = fit_lib.fit_cases([*outside, *used]) if used else None
    for case in inside:
      images = case.row.images * case.row.cluster.size
      few_rate = images / fit_lib.predict(few, case) if few else None
      result.append(
        Comparison(case.row, images / fit_lib.predict(sheet, case), few_rate, case in used)
      )
  return result


def errors(comparisons: Sequence[Comparison]) -> dict[str, float]:
  """Mean and largest absolute errors: sheet_mean, few_mean and so on."""
  sheet = [abs(c.sheet_error) for c in comparisons]
  few = [abs(c.few_error) for c in comparisons if c.few_error is not None]
  result = {'sheet_mean': sum(sheet) / len(sheet), 'sheet_worst': max(sheet)}
  if few:
    result |= {'few_mean': sum(few) / len(few), 'few_worst': max(few)}
  return result


def lines(comparisons: Sequence[Comparison]) -> str:
  """Returns the comparison as a table for a terminal, with the means."""
  head = 'system', 'devices', 'images', 'published'
  rows = [(*head, 'data sheet', 'error', 'one or two rows', 'error')]
  for c in comparisons:
    error = 'fitted' if c.is_fitted else '-'
    if c.few_error is not None:
      error = f'{100 * c.few_error:+.1f} %'
    row = c.row.system, f'{c.row.cluster.size}', f'{c.row.images}', f'{c.row.rate:,.0f}'
    few = '-' if c.few is None else f'{c.few:,.0f}'
    rows.append((*row, f'{c.sheet:,.0f}', f'{100 * c.sheet_error:+.1f} %', few, error))
  summary = errors(comparisons)
  text = f'{markdown.plain(rows, "lr")}\n'
  for name, what in (
    ('sheet', 'from data sheets alone, no row of the system'),
    ('few', 'from one or two rows of the system, the rest'),
  ):
    if f'{name}_mean' in summary:
      mean, worst = (100 * summary[f'{name}_{which}'] for which in ('mean', 'worst'))
      text += f'\n{what}: mean error {mean:.1f} %, worst {worst:.1f} %'
  return text
