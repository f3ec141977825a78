"""What the metrics of a run are called, by people and in files."""

import re

# Scores in the order people read them, adjective and noun next to their pair.
LABELS = {
  'loss': 'loss',
  'anp_top1': 'ANP top-1',
  'adjective_top1': 'adjective',
  'noun_top1': 'noun',
  'anp_top5': 'ANP top-5',
  'anp_top10': 'ANP top-10',
  'anp_top100': 'ANP top-100',
}

# What the keys of LABELS may also be called; files have those of LABELS.
_ALIAS = re.compile('class_(?=top)')


def key(name: str) -> str:
  """The key under which files have a metric that people may call `name`."""
  return _ALIAS.sub('anp_', name)


def names(keys) -> dict[str, str]:
  """Names by key for the metrics of a run, as people type or read them.

  Args:
    keys: of all its metrics. Only pairs have some of adjective and noun; a run
      on plain classes calls anp_top1 class_top1.
  """
  if _has_pairs(keys):
    return {k: k for k in keys}
  return {k: k.replace('anp_', 'class_') for k in keys}


def labels(keys) -> dict[str, str]:
  """LABELS for the metrics of a run; of plain classes they say class, not ANP.

  Args:
    keys: see `names`.
  """
  word = 'ANP' if _has_pairs(keys) else 'class'
  return {k: label.replace('ANP', word) for k, label in LABELS.items() if k in keys}


def format_value(name: str, value: float) -> str:
  """Returns a metric's value for people: accuracies as 12.3%."""
  return f'{100 * value:.1f}%' if '_top' in name else f'{value:.4g}'


def _has_pairs(keys):
  return 'adjective_top1' in keys or 'noun_top1' in keys
