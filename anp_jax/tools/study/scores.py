"""What the strategies of a study have learnt, as a table."""

import math

from anp_jax.tools.study import study_results, study_table

_BASELINE = 'sync'
_SAMPLES = 0.01  # relative: epochs are cut into whole steps
_LABELS = {'anp_top5': 'top-5', 'adjective_top1': 'adjective', 'noun_top1': 'noun'}


def rows(points: list[study_results.Point], target: float | None) -> list[tuple[str, ...]]:
  """One point a row, after a head; columns that no point fills are left out.

  Args:
    points: of the study.
    target: accuracy from 0 to 1 to which the simulated time is shown; None:
      none is.
  """
  places = study_table.places(points)
  head = [
    *places[0],
    'learning rate',
    'top-1',
    'points over sync',
    *_LABELS.values(),
    'staleness',
    'at most',
  ]
  simulated = any(p.simulated for p in points)
  if simulated and target is not None:
    head.append(f'simulated time to {100 * target:g} %')
  if simulated:
    head.append('simulated time')
  body = []
  for p, place in zip(points, places[1:]):
    row = [
      *place,
      study_table.number(p.learning_rate),
      percent(p.accuracy),
      difference(over_sync(p, points)),
    ]
    row += [_score(p, name) for name in _LABELS]
    stalest = [r.max_staleness for r in p.runs.values() if r.staleness]
    row.append(study_table.text(p.over_runs(lambda r: r.mean_staleness), '.2f'))
    row.append(str(max(stalest)) if stalest else '-')
    if simulated and target is not None:
      row.append(study_table.reached(p, target))
    if simulated:
      row.append(study_table.duration(p.over_runs(lambda r: r.end)))
    body.append((*row, study_table.seeds(p)))
  return study_table.filled([(*head, 'seeds'), *body], len(places[0]))


def percent(spread: study_results.Spread | None, form: str = '.1f') -> str:
  """'mean ± half of the 95 % interval %'; '-' for no number."""
  if spread is None:
    return '-'
  text = f'{100 * spread.mean:{form}}'
  if spread.interval is not None:
    text += f' ± {100 * spread.interval:.1f}'
  return f'{text} %'


def over_sync(
  point: study_results.Point, points: list[study_results.Point]
) -> study_results.Spread | None:
  """The accuracy less that of `sync`, each at its best rate, seed by seed.

  Paired, since runs of one seed share their first weights and the order of
  their batches. `sync` has the same varied keys, as far as it has them, and as
  many samples; of the same size if the study has that.

  Args:
    point: of the study.
    points: all of them.

  Returns:
    None of `sync` itself, and where none has a seed in common.
  """
  candidates = [
    p for p in points if p.strategy == _BASELINE and _keys(p).items() <= _keys(point).items()
  ]
  if point.strategy == _BASELINE or not candidates:
    return None

  def nearness(p):
    same_size = (p.nodes, p.devices) == (point.nodes, point.devices)
    same_scaling = (study_results.SCALING in p.varied) == (study_results.SCALING in point.varied)
    return same_size, same_scaling, p.runs != {}

  best = max(candidates, key=nearness)
  return study_results.spread(
    run.accuracy[-1] - best.runs[seed].accuracy[-1]
    for seed, run in point.runs.items()
    if seed in best.runs
    and math.isclose(run.samples[-1], best.runs[seed].samples[-1], rel_tol=_SAMPLES)
  )


def difference(spread: study_results.Spread | None) -> str:
  """Points with the 95 % interval, and whether it contains no difference."""
  if spread is None:
    return '-'
  text = f'{100 * spread.mean:+.1f}'
  if spread.interval is None:
    return text
  text += f' ± {100 * spread.interval:.1f}'
  same = abs(spread.mean) <= spread.interval
  return text + ', not distinguishable' * same


def _keys(point):
  """Its varied keys, without how its batch scales."""
  return {k: v for k, v in point.varied.items() if k != study_results.SCALING}


def _score(point, name):
  return percent(point.over_runs(lambda r: r.scores.get(name)))
