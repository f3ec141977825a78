"""The scores of all models, and who goes on."""

import contextlib
import json
import math
import os
import time

from anp_jax.system import markdown
from anp_jax.training import metric_labels

LOG = 'relay.jsonl'
PAGE = 'leaderboard.md'
GO_ON, FINISHED, RETIRED, FAILED, WAIT = (
  'goes on', 'finished', 'retired', 'failed', 'wait',
)  # fmt: skip


class Laps:
  """After which laps something happens; the same on all processes."""

  def __init__(self, config, laps: int, every: int):
    """Makes it.

    Args:
      config: the run's config.
      laps: of a model that goes on to the end.
      every: laps between two scores.
    """
    self.count = laps
    self._every = every
    self._halving = config.strategy.halving

  def is_due(self, laps: int) -> bool:
    """Whether a model is scored after so many laps."""
    last = laps == self.count
    return last or laps % self._every == 0 or self.is_rung(laps)

  def is_rung(self, laps: int) -> bool:
    """Whether some models leave the ring after so many laps."""
    if not self._halving or not 0 < laps < self.count:
      return False
    while laps % self._halving == 0:
      laps //= self._halving
    return laps == 1


class Board:
  """Process 0's record of scores and failures, kept in workdir/relay.jsonl.

  Who goes on is a function of this record alone, so a run that is started
  again decides as it would have.
  """

  def __init__(self, workdir: str, candidates, laps: Laps, config):
    """Reads what is there.

    Args:
      workdir: of the run.
      candidates: all `candidates.Candidate`.
      laps: of a model.
      config: the run's config.
    """
    self._workdir = workdir
    self._candidates = candidates
    self._laps = laps
    self._halving = config.strategy.halving
    self._metric = metric_labels.key(config.checkpoint.best_metric)
    self._scores = {}  # (model, laps done) to its record
    self._failed = {}
    for record in _records(os.path.join(workdir, LOG)):
      self._take(record)

  def lacking(self, model: int, laps: int) -> list[int]:
    """Of a model's laps, those that are due and have no score."""
    return [
      k for k in range(1, laps + 1)
      if self._laps.is_due(k) and (model, k) not in self._scores
    ]  # fmt: skip

  def add(self, model: int, laps: int, step: int, scores: dict) -> bool:
    """Records scores; False if they were known."""
    if (model, laps) in self._scores:
      return False
    self._record({'model': model, 'laps': laps, 'step': step, **scores})
    return True

  def fail(self, model: int, step: int, text: str) -> None:
    """Records that a model cannot go on."""
    if model not in self._failed:
      self._record({'model': model, 'step': step, 'failed': text})

  def decide(self, model: int, laps: int) -> str:
    """What becomes of a model that has done so many laps.

    After 1, h, h^2 ... laps, h being config.strategy.halving, those go on that
    are among the best 1/h (rounded up) of the models up to this one that have
    come so far. Successive halving as in Li et al. 2020 (arXiv 1810.05934):
    nobody waits for those that come later. Models enter in their order and go
    round once a lap, so no model overtakes another.

    Returns:
      GO_ON, FINISHED, RETIRED, FAILED, or WAIT while a score is missing.
    """
    if model in self._failed:
      return FAILED
    if laps == self._laps.count:
      return FINISHED
    if not self._laps.is_rung(laps):
      return GO_ON
    reached = []
    for other in range(model + 1):
      if (other, laps) in self._scores:
        reached.append(other)
      elif not self._left_before(other, laps):
        return WAIT
    ranked = sorted(reached, key=lambda m: (-self._value(m, laps), m))
    kept = ranked[: math.ceil(len(ranked) / self._halving)]
    return GO_ON if model in kept else RETIRED

  def outcome(self, model: int, laps: int) -> str:
    """As `decide`, of one that may have left after an earlier lap."""
    for earlier in range(1, laps):
      if self._laps.is_rung(earlier) and self.decide(model, earlier) != GO_ON:
        return self.decide(model, earlier)
    return self.decide(model, laps)

  def finished(self) -> list[int]:
    """Models that have come to the end."""
    ended = {model for model, laps in self._scores if laps == self._laps.count}
    return sorted(ended - self._failed.keys())

  def best(self) -> dict:
    """The last scores of the best model; {} if there are none."""
    return self.scores(self._ranked()[0])

  def scores(self, model: int) -> dict:
    """A model's last scores; {} if there are none."""
    laps = max((k for m, k in self._scores if m == model), default=0)
    return self._scores.get((model, laps), {})

  def all_scores(self, model: int) -> list[dict]:
    """All scores of a model, in the order in which they came."""
    return [r for (m, _), r in self._scores.items() if m == model]

  def table(self) -> str:
    """The leaderboard as Markdown, best first."""
    rows = [(self._candidates[m], self.scores(m)) for m in self._ranked()]
    labels = metric_labels.labels(set().union(*(found for _, found in rows)))
    names = list(labels)
    head = ['', 'model', 'what differs', 'laps', 'state']
    head += labels.values()
    lines = [head]
    for place, (c, found) in enumerate(rows, 1):
      values = [
        metric_labels.format_value(n, found[n]) if n in found else ''
        for n in names
      ]
      laps = found.get('laps', 0)
      lines.append(
        [f'{place}', c.name, c.text or 'nothing',
         f'{laps} of {self._laps.count}', self._state(c.index, laps), *values]
      )  # fmt: skip
    return markdown.table(lines)

  def write(self, below: str = '') -> None:
    """Writes the leaderboard to the workdir."""
    path = os.path.join(self._workdir, PAGE)
    with open(path + '.new', 'w') as f:
      f.write(f'# Leaderboard\n\n{self.table()}\n{below}')
    os.replace(path + '.new', path)

  def _ranked(self):
    """All models: by their last score, those that failed at the end."""

    def key(model):
      found = self.scores(model)
      value = self._value(model, found['laps']) if found else -math.inf
      return (model in self._failed, -value, model)

    return sorted((c.index for c in self._candidates), key=key)

  def _state(self, model, laps):
    if model in self._failed:
      return f'failed: {self._failed[model]}'
    if not laps:
      return ''
    state = self.outcome(model, laps)
    return 'goes on' if state == WAIT else state

  def _left_before(self, model, laps):
    """Whether a model has left the ring before it had done so many laps."""
    if model in self._failed:
      return True
    return any(
      self._laps.is_rung(k) and self.decide(model, k) == RETIRED
      for k in range(1, laps)
    )

  def _value(self, model, laps):
    value = self._scores[model, laps].get(self._metric, math.nan)
    if math.isnan(value):
      return -math.inf
    return -value if self._metric == 'loss' else value

  def _record(self, record):
    record = {**record, 'time': time.time()}
    with open(os.path.join(self._workdir, LOG), 'a') as f:
      f.write(json.dumps(record) + '\n')
    self._take(record)

  def _take(self, record):
    if 'failed' in record:
      self._failed[record['model']] = record['failed']
    else:
      self._scores[record['model'], record['laps']] = record


def _records(path):
  """What is recorded; a line torn by the end of a process is closed."""
  if not os.path.exists(path):
    return []
  with open(path, 'rb') as f:
    text = f.read()
  if text and not text.endswith(b'\n'):
    with open(path, 'ab') as f:
      f.write(b'\n')
  records = []
  for line in text.split(b'\n'):
    with contextlib.suppress(ValueError):
      records.append(json.loads(line))
  return records
