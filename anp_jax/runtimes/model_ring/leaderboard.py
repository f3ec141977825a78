"""The scores of all models of a ring, and their ranking."""

from collections.abc import Sequence
import math
import os
import time

from anp_jax.runtimes.model_ring import candidates as candidates_lib, ring as ring_lib
from anp_jax.system import files, markdown
from anp_jax.training import metric_labels

LOG = 'model_ring.jsonl'
PAGE = 'leaderboard.md'
# Status of a model, as it stands in the leaderboard.
GO_ON, FINISHED, FAILED = 'goes on', 'finished', 'failed'


class Leaderboard:
  """Process 0's record of scores and failures, kept in workdir/model_ring.jsonl."""

  def __init__(
    self,
    workdir: str,
    candidates: Sequence[candidates_lib.Candidate],
    laps: ring_lib.Laps,
    best_metric: str,
  ):
    """Reads the record of the workdir.

    Args:
      workdir: folder of the run.
      candidates: all models.
      laps: number of laps of each model, and those after which it is scored.
      best_metric: config.checkpoint.best_metric.
    """
    self._workdir, self._candidates, self._laps = workdir, candidates, laps
    self._metric = metric_labels.key(best_metric)
    self._scores: dict[tuple[int, int], dict] = {}  # (model, laps done) to its record
    self._failures: dict[int, str] = {}  # model to the reason
    for record in files.read_json_lines(os.path.join(workdir, LOG)):
      self._include(record)

  def missing_scores(self, model: int, laps: int) -> list[int]:
    """Returns those of a model's laps that are due and have no score."""
    return [
      k for k in range(1, laps + 1) if self._laps.is_score_due(k) and (model, k) not in self._scores
    ]

  def add(self, model: int, laps: int, step: int, scores: dict) -> bool:
    """Records scores; returns False if they are recorded already."""
    if (model, laps) in self._scores:
      return False
    self._record({'model': model, 'laps': laps, 'step': step, **scores})
    return True

  def fail(self, model: int, step: int, reason: str) -> None:
    """Records that a model cannot go on."""
    if model not in self._failures:
      self._record({'model': model, 'step': step, 'failed': reason})

  def status(self, model: int, laps: int) -> str:
    """Returns GO_ON, FINISHED or FAILED for a model that has done so many laps."""
    if model in self._failures:
      return FAILED
    return FINISHED if laps == self._laps.total else GO_ON

  def best(self) -> dict:
    """Returns the last scores of the best model; {} if there are none."""
    return self.last_scores(self._ranking()[0])

  def last_scores(self, model: int) -> dict:
    """Returns a model's last scores; {} if there are none."""
    laps = max((k for m, k in self._scores if m == model), default=0)
    return self._scores.get((model, laps), {})

  def all_scores(self, model: int) -> list[dict]:
    """Returns all scores of a model, in the order in which they came."""
    return [r for (m, _), r in self._scores.items() if m == model]

  def table(self) -> str:
    """Returns the leaderboard as Markdown, the best model first."""
    rows = [(self._candidates[m], self.last_scores(m)) for m in self._ranking()]
    labels = metric_labels.labels(set().union(*(scores for _, scores in rows)))
    lines = [['', 'model', 'what differs', 'laps', 'state', *labels.values()]]
    for place, (candidate, scores) in enumerate(rows, 1):
      model, laps = candidate.index, scores.get('laps', 0)
      status = self.status(model, laps) if laps else ''
      if model in self._failures:
        status = f'failed: {self._failures[model]}'
      fields = [f'{place}', candidate.name, candidate.text or 'nothing']
      values = [metric_labels.format_value(k, scores[k]) if k in scores else '' for k in labels]
      lines.append([*fields, f'{laps} of {self._laps.total}', status, *values])
    return markdown.table(lines)

  def write(self) -> None:
    """Writes the leaderboard to the workdir."""
    path = os.path.join(self._workdir, PAGE)
    files.write_atomic(path, f'# Leaderboard\n\n{self.table()}\n')

  def _ranking(self):
    """Returns all models by their last scores; failed ones are the last."""

    def rank(model):
      value = self.last_scores(model).get(self._metric, math.nan)
      loss = value if self._metric == 'loss' else -value
      return model in self._failures, math.inf if math.isnan(loss) else loss, model

    return sorted((c.index for c in self._candidates), key=rank)

  def _record(self, record):
    record = {**record, 'time': time.time()}
    files.append_json_line(os.path.join(self._workdir, LOG), record)
    self._include(record)

  def _include(self, record):
    if 'failed' in record:
      self._failures[record['model']] = record['failed']
    else:
      self._scores[record['model'], record['laps']] = record
