"""What the strategies of a study have learnt, as a table."""

from collections.abc import Sequence
import math

from anp_jax.reporting import summaries
from anp_jax.tools.study import study_results, study_table

_BASELINE = 'sync'
_SAMPLES = 0.01  # relative: epochs are cut into whole steps
_LABELS = {'anp_top5': 'top-5', 'adjective_top1': 'adjective', 'noun_top1': 'noun'}


def rows(points: list[study_results.Point], targets: Sequence[float]) -> list[tuple[str, ...]]:
  """Returns a head, then a row per point; columns that no point fills are left out.

  Args:
    points: points of the study.
    targets: accuracies from 0 to 1 to which the simulated time and the images are shown.
  """

  def score(name) -> study_table.Column:
    return _LABELS[name], lambda p: study_table.score(p.summarize(lambda r: r.scores.get(name)))

  columns: list[study_table.Column] = [
    ('learning rate', lambda p: study_table.number(p.learning_rate)),
    ('top-1', lambda p: study_table.score(p.accuracy)),
    ('points over sync', lambda p: difference(over_sync(p, points))),
    *map(score, _LABELS),
    ('staleness', lambda p: study_table.text(p.summarize(lambda r: r.mean_staleness), '.2f')),
    ('at most', _stalest),
  ]
  if any(p.simulated for p in points):
    columns += study_table.reaching(targets, 'simulated time')
    columns.append(('simulated time', lambda p: study_table.duration(p.summarize(lambda r: r.end))))
  return study_table.rows(points, [*columns, ('seeds', study_table.seeds)])


def over_sync(
  point: study_results.Point, points: list[study_results.Point]
) -> summaries.Summary | None:
  """Returns the accuracy less that of `sync`, each at its best rate, seed by seed.

  Differences are paired because runs of one seed share their first weights and the order of
  their batches. `sync` has the same varied keys, as far as it has them, and as many samples;
  if there is one of the same size, that one counts.

  Args:
    point: point of the study.
    points: all points.

  Returns:
    None for `sync` itself, and where no seed is common.
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
  return summaries.summarize(
    run.accuracy[-1] - best.runs[seed].accuracy[-1]
    for seed, run in point.runs.items()
    if seed in best.runs
    and math.isclose(run.samples[-1], best.runs[seed].samples[-1], rel_tol=_SAMPLES)
  )


def difference(summary: summaries.Summary | None) -> str:
  """Returns points with the 95 % interval, and whether it contains no difference."""
  text = study_table.score(summary, '+.1f', '')
  if summary is None or summary.interval is None:
    return text
  return text + ', not distinguishable' * (abs(summary.mean) <= summary.interval)


def _keys(point):
  """Its varied keys, without how its batch scales."""
  return {k: v for k, v in point.varied.items() if k != study_results.SCALING}


def _stalest(point):
  most = [r.max_staleness for r in point.runs.values() if r.max_staleness is not None]
  return str(max(most)) if most else '-'
