"""Names and labels of metrics, in files and for people."""

from collections.abc import Collection
import re

# Scores in the order in which people read them, adjective and noun next to their pair.
LABELS = {
  'loss': 'loss',
  'anp_top1': 'ANP top-1',
  'adjective_top1': 'adjective',
  'noun_top1': 'noun',
  'anp_top5': 'ANP top-5',
  'anp_top10': 'ANP top-10',
  'anp_top100': 'ANP top-100',
}

# People may write class_top1 for anp_top1; files have the keys of LABELS.
_ALIAS = re.compile('class_(?=top)')


def key(name: str) -> str:
  """The key in files of a metric that people call `name`."""
  return _ALIAS.sub('anp_', name)


def names(keys: Collection[str]) -> dict[str, str]:
  """Names for people, by key, of the metrics of a run.

  Args:
    keys: keys of all metrics. Without those of adjective and noun the classes
      are plain, and anp_top1 is called class_top1.
  """
  if _has_pairs(keys):
    return {k: k for k in keys}
  return {k: k.replace('anp_', 'class_') for k in keys}


def labels(keys: Collection[str]) -> dict[str, str]:
  """LABELS of the metrics of a run, with 'class' for 'ANP' if classes are plain.

  Args:
    keys: keys of all metrics.
  """
  word = 'ANP' if _has_pairs(keys) else 'class'
  return {k: label.replace('ANP', word) for k, label in LABELS.items() if k in keys}


def text(metrics: dict[str, float]) -> str:
  """Returns the scores of a run in one line, for people."""
  return ', '.join(
    f'{label} {format_value(name, metrics[name])}' for name, label in labels(metrics).items()
  )


def format_value(name: str, value: float) -> str:
  """Returns a metric's value for people: accuracies as 12.3%."""
  return f'{100 * value:.1f}%' if '_top' in name else f'{value:.4g}'


def _has_pairs(keys):
  return 'adjective_top1' in keys or 'noun_top1' in keys
