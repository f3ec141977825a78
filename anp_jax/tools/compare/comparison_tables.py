"""Tables of several runs: differences of their configs, and results."""

import dataclasses
import math
import os

from anp_jax.reporting import metric_lines, telemetry
from anp_jax.reporting.run_page import run_tables
from anp_jax.system import progress
from anp_jax.tools.compare import runs as runs_lib
from anp_jax.training import metric_labels

NONE = '-'
_FACTS = 'network', 'parameters', 'devices'
_RATES = 'input wait (median)', 'MFU (median)'
_DATA = 'data.source', 'data.path', 'data.lists', 'data.dir'
_SCORED = *_DATA, 'data.eval_split'
_TRAINED = *_DATA, 'data.train_split', 'data.held_out', 'data.imbalance'
# What a training loss measures.
_TARGETS = 'label_smoothing', 'data.mixup', 'data.cutmix'
_LOSS = *_TARGETS, 'model.head', 'model.head_weights', 'data.balance', 'data.balance_power'
SPEED, APART = 'images/s (median)', ' †'  # of a speed that is not compared
_FINISHED = {True: 'yes', False: 'no', None: NONE}


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a table.

  Attributes:
    label: name of the quantity.
    cells: text of each run.
    best: indices of the best runs.
  """

  label: str
  cells: tuple[str, ...]
  best: frozenset[int] = frozenset()


def differences(runs: list[runs_lib.Run]) -> list[Row]:
  """Returns a row for each key of the config that the runs differ in."""
  keys = sorted(set().union(*(run.config for run in runs)))
  rows = [
    Row(key, tuple(_value(run.config[key]) if key in run.config else NONE for run in runs))
    for key in keys
  ]
  return [row for row in rows if len(set(row.cells)) > 1]


def results(runs: list[runs_lib.Run]) -> list[Row]:
  """Returns the scores of the runs, their length, speed and size.

  The best runs are marked where scores differ, if all were scored on the same images;
  the fastest is marked if all were trained on the same images, and the lowest training
  loss if it is the same loss of these.
  """
  rows = []
  are_scores, are_losses = were_scored_alike(runs), _agree(runs, (*_TRAINED, *_LOSS))
  for name, label in metrics(runs):
    named = [run if run.labels.get(name) == label else None for run in runs]
    for what, choose in (('best', run_tables.best_line), ('last', run_tables.last_line)):
      lines = [choose(name, run.validation) if run else {} for run in named]
      if any(lines):
        rows.append(_score_row(f'{label}, {what} validation', name, lines, are_scores))
    if name == 'loss':
      lines = [run_tables.last_line(name, run.train) for run in runs]
      rows.append(_score_row(f'{label}, last training', name, lines, are_losses))
  facts = [dict(run_tables.facts(run.train, run.validation)) for run in runs]
  ends = [max(run.train + run.validation, key=lambda r: r['step'], default={}) for run in runs]
  rows += [
    Row('epochs', tuple(_text(end.get('epoch'), '.4g') for end in ends)),
    Row('steps', tuple(_text(end.get('step'), ',') for end in ends)),
    Row('finished', tuple(_FINISHED[run.is_finished] for run in runs)),
    Row('training time', tuple(_time(run) for run in runs)),
    Row('losses and joins', tuple(_losses_and_joins(run) for run in runs)),
    _speed_row(runs),
  ]
  for labels, texts in ((_RATES, facts), (_FACTS, [run.facts for run in runs])):
    rows += [Row(label, tuple(f.get(label, NONE) for f in texts)) for label in labels]
  return [row for row in rows if set(row.cells) != {NONE}]


def metrics(runs: list[runs_lib.Run]) -> list[tuple[str, str]]:
  """Returns (name, label) of all scores, in the order of `metric_labels`.

  A name has one label for pairs and another for plain classes.
  """
  labels = dict.fromkeys(item for run in runs for item in run.labels.items())
  names = list(metric_labels.LABELS)
  return sorted((x for x in labels if x[0] in names), key=lambda x: names.index(x[0]))


def were_scored_alike(runs: list[runs_lib.Run]) -> bool:
  """Returns whether all runs name the same classes, and were scored on the same images."""
  counts = {run.validation[-1].get('examples') for run in runs if run.validation}
  return len(counts) < 2 and _agree(runs, _SCORED)


def _agree(runs, keys):
  """Whether all runs name the same classes, and have the same values of keys."""
  values = [[run.classes, *(_place(key, run.config.get(key)) for key in keys)] for run in runs]
  return all(v == values[0] for v in values)


def _place(key, value):
  """A value of a config; the same for two spellings of one folder."""
  is_folder = key in ('data.path', 'data.dir') and value and '://' not in value
  return os.path.abspath(value) if is_folder else value


def _score_row(label, name, lines, are_compared):
  cells = (metric_labels.format_value(name, line[name]) if line else NONE for line in lines)
  values = [line.get(name) for line in lines]
  best = _best(values, lowest=name == 'loss') if are_compared else frozenset()
  return Row(label, tuple(cells), best)


def _speed_row(runs):
  rates = [run_tables.images_per_second(run.train) for run in runs]
  cells = tuple(_text(rate, ',.0f') for rate in rates)
  if not _agree(runs, _TRAINED):
    return Row(SPEED + APART, cells)
  return Row(SPEED, cells, _best(rates))


def _best(values, lowest=False):
  """Indices of the best values, if the values differ."""
  ranked = {v for v in values if v is not None and math.isfinite(v)}
  if len(ranked) < 2:
    return frozenset()
  best = min(ranked) if lowest else max(ranked)
  return frozenset(i for i, value in enumerate(values) if value == best)


def _text(value, form):
  return NONE if value is None else format(value, form)


def _time(run):
  if not any('seconds' in line for line in run.train):
    return NONE
  return progress.duration(sum(line.get('seconds', 0) for line in run.train))


def _losses_and_joins(run):
  seconds = [line['seconds'] for line in telemetry.of_kind(run.path, metric_lines.RESTART)]
  return f'{len(seconds)}, {sum(seconds):.0f} s' if seconds else NONE


def _value(value):
  """A value of a config: the repr of what is no text, or an empty one."""
  return value if isinstance(value, str) and value else repr(value)
