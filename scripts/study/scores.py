"""What the strategies of a study have learnt, as a table."""

from scripts.study import results
from scripts.study import table

_LABELS = {
  'anp_top5': 'top-5', 'adjective_top1': 'adjective', 'noun_top1': 'noun',
}  # fmt: skip


def rows(
  points: list[results.Point], target: float | None
) -> list[tuple[str, ...]]:
  """One point a row, after a head; columns that no point fills are left out.

  Args:
    points: of the study.
    target: accuracy from 0 to 1 to which the simulated time is shown; None:
      none is.
  """
  places = table.places(points)
  head = [*places[0], 'learning rate', 'top-1', *_LABELS.values(), 'staleness',
          'at most']  # fmt: skip
  simulated = any(p.simulated for p in points)
  if simulated and target is not None:
    head.append(f'simulated time to {100 * target:g} %')
  if simulated:
    head.append('simulated time')
  body = []
  for p, place in zip(points, places[1:]):
    row = [*place, table.number(p.learning_rate), percent(p.accuracy)]
    row += [_score(p, name) for name in _LABELS]
    stalest = [r.max_staleness for r in p.runs.values() if r.staleness]
    row.append(table.text(p.over_runs(lambda r: r.mean_staleness), '.2f'))
    row.append(str(max(stalest)) if stalest else '-')
    if simulated and target is not None:
      row.append(table.reached(p, target))
    if simulated:
      row.append(table.duration(p.over_runs(lambda r: r.end)))
    body.append((*row, table.seeds(p)))
  return table.filled([(*head, 'seeds'), *body], len(places[0]))


def percent(spread: results.Spread | None, form: str = '.1f') -> str:
  """'mean ± half of the 95 % interval %'; '-' for no number."""
  if spread is None:
    return '-'
  text = f'{100 * spread.mean:{form}}'
  if spread.interval is not None:
    text += f' ± {100 * spread.interval:.1f}'
  return f'{text} %'


def _score(point, name):
  return percent(point.over_runs(lambda r: r.scores.get(name)))
