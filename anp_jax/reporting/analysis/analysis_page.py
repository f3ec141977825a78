"""The page of an evaluation as Markdown, and what other pages show of it."""

import os

from anp_jax.data import vocabulary
from anp_jax.reporting import report_kit
from anp_jax.system import files, markdown
from anp_jax.training import metric_labels

FOLDER = 'evaluation'  # in a workdir, with a folder for each
# Of an evaluation's folder.
SCORES, PAGE, EXAMPLES = 'scores.json', 'evaluation.md', 'examples'
_EACH = 10  # classes in the tables of the best and the worst

LABELS = {
  'macro_accuracy': 'macro accuracy',
  'ece': 'calibration error',
  'adjective_macro_accuracy': 'adjective, macro',
  'adjective_ece': 'adjective, calibration error',
  'noun_macro_accuracy': 'noun, macro',
  'noun_ece': 'noun, calibration error',
  'seen_classes': 'classes trained on',
  'held_out_classes': 'classes held out',
  'held_out_among_themselves': 'held out, among themselves',
}

_FIGURES = (
  ('confusion_classes', 'Confusion of classes'),
  ('confusion_adjectives', 'Confusion of adjectives'),
  ('confusion_nouns', 'Confusion of nouns'),
  ('pairs', 'Most confused pairs'),
  ('calibration', 'Calibration'),
  ('sizes', 'Accuracy by class size'),
)

# Figures of photographs, whose colours are not to be changed.
PHOTOGRAPHS = {'Most confused pairs'}


def load(folder: str) -> dict:
  """What `analysis_files.write` returned; {} where there is no complete evaluation."""
  return files.read_json_object(os.path.join(folder, SCORES))


def lines(scores: dict) -> list[tuple[str, str]]:
  """(label, value) of an evaluation's scores, as people read them."""
  rows = []
  for name, label in (metric_labels.labels(scores) | LABELS).items():
    if scores.get(name) is not None:
      rows.append((label, score(name, scores[name])))
  return rows


def score(name: str, value: float) -> str:
  """A score's value for people."""
  if name in LABELS:
    return f'{100 * value:.1f}%'
  return metric_labels.format_value(name, value)


def figures(files: dict) -> list[tuple[str, str]]:
  """(title, file) of the figures among an evaluation's files."""
  return [(title, files[what]) for what, title in _FIGURES if what in files]


def confusions(rows: list) -> report_kit.Table:
  """A table of the first of the (true, predicted, count) rows."""
  cells = [(a, b, str(n)) for a, b, n in rows[:_EACH]]
  return report_kit.Table([('true', 'predicted', 'count'), *cells], 'l')


def text(evaluation: dict, results) -> str:
  """The text of the page.

  Args:
    evaluation: what scores.json holds.
    results: `analysis_results.Results`.
  """
  what = f'Checkpoint of step {evaluation["step"]}'
  if evaluation.get('weights'):
    what = f'Weights of {markdown.escape(evaluation["weights"])}'
  images = vocabulary.counted(evaluation['scores']['examples'], 'image')
  blocks = [
    f'{what}, {images}'
    + (f'; {evaluation["damaged"]:,} of them could not be read' if evaluation['damaged'] else ''),
    report_kit.Table([('', ''), *lines(evaluation['scores'])], 'l'),
    'Macro accuracy is the mean of the accuracies of the classes, whatever '
    'their sizes. The calibration error (ECE) is the mean distance between '
    'confidence and accuracy over 15 bins of equal width (Guo et al., 2017).',
  ]
  if evaluation['confusions']:
    blocks += ['## Most confused', confusions(evaluation['confusions'])]
  blocks += _best_and_worst(results)
  drawings = figures(evaluation['files'])
  if 'examples' in evaluation['files']:  # other pages show them one by one
    drawings.insert(0, ('Examples', evaluation['files']['examples']))
  for title, file in drawings:
    blocks += [f'## {title}', report_kit.Figure(title, file)]
  blocks.append(
    'All classes: [classes.csv](classes.csv). All images: [predictions.csv](predictions.csv).'
  )
  return report_kit.text(markdown.escape(evaluation['data']), blocks)


def _best_and_worst(results):
  rows = [r for r in results.classes() if r['images']]
  rows.sort(key=lambda r: (r['recall'], r['f1']))
  if not rows:
    return []
  head = ('class', 'images', 'top-1', 'top-5', 'precision', 'confused with')

  def table(chosen):
    return report_kit.Table([head, *map(_class_row, chosen)], 'l')

  if len(rows) <= 2 * _EACH:
    return ['## Classes, the hardest first', table(rows)]
  return [
    f'## The {_EACH} hardest classes',
    table(rows[:_EACH]),
    f'## The {_EACH} easiest classes',
    table(rows[: -_EACH - 1 : -1]),
  ]


def _class_row(row):
  return (
    row['class'],
    str(row['images']),
    _percent(row['top1']),
    _percent(row['top5']),
    _percent(row['precision']),
    row['most_confused_with'],
  )


def _percent(value):
  return '-' if value is None else f'{100 * value:.1f}%'
