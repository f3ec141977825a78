"""The page of an evaluation as Markdown, and the parts that other pages show."""

import math
import os

from anp_jax.data import vocabulary
from anp_jax.reporting import report_kit
from anp_jax.reporting.analysis import analysis_results as results_lib, pair_metrics
from anp_jax.system import files, markdown
from anp_jax.training import metric_labels

FOLDER = 'evaluation'  # in a workdir, with a folder for each
# Names in the folder of an evaluation.
SCORES, PAGE, EXAMPLES = 'scores.json', 'evaluation.md', 'examples'
_EACH = 10  # classes in the tables of the best and the worst


def _sweep(prefix, world):
  """Labels of the figures of `pair_metrics.sweep_scores`."""
  return {
    f'{prefix}best_unseen': f'best unseen, {world}',
    f'{prefix}harmonic_mean': f'best harmonic mean, {world}',
    f'{prefix}auc': f'AUC, {world}',
  }


LABELS = {
  'macro_accuracy': 'macro accuracy',
  'ece': 'calibration error',
  'adjective_macro_accuracy': 'adjective, macro',
  'adjective_ece': 'adjective, calibration error',
  'noun_macro_accuracy': 'noun, macro',
  'noun_ece': 'noun, calibration error',
  'adjective_of_pair': 'adjective of the best pair',
  'adjective_of_pair_macro': 'adjective of the best pair, macro',
  'noun_of_pair': 'noun of the best pair',
  'noun_of_pair_macro': 'noun of the best pair, macro',
  'mean_average_precision': 'mAP',
  **{f'mean_precision_at_{k}': f'retrieval P@{k}' for k in pair_metrics.RETRIEVED},
  'seen_classes': 'classes trained on',
  'unseen_classes': 'unseen classes',
  'unseen_images': 'images of unseen classes',
  'seen_top1': 'seen, no bias',
  'unseen_top1': 'unseen, no bias',
  'best_seen': 'best seen',
  **_sweep('', 'closed world'),
  'open_pairs': 'other pairs, open world',
  **_sweep('open_', 'open world'),
  'sentiment_images': 'images with a sentiment',
  'sentiment_spearman': 'sentiment, rank correlation',
  'sentiment_sign': 'sentiment, same sign',
  'sentiment_spearman_of_pair': 'sentiment of the best pair, rank correlation',
  'sentiment_sign_of_pair': 'sentiment of the best pair, same sign',
  'emotion_images': 'images with emotions',
  'emotion_top1': 'strongest of 8 emotions',
  'emotion_top1_of_pair': 'strongest of 8 emotions, best pair',
}

_FIGURES = (
  ('confusion_classes', 'Confusion of classes'),
  ('confusion_adjectives', 'Confusion of adjectives'),
  ('confusion_nouns', 'Confusion of nouns'),
  ('pairs', 'Most confused pairs'),
  ('calibration', 'Calibration'),
  ('sizes', 'Accuracy by class size'),
)

_UNSEEN = (
  'Unseen classes have no training image. A bias is added to their scores and runs over all '
  'values (Chao et al., 2016; Purushwalkam et al., 2019): the best accuracies of seen and '
  'unseen images, the best harmonic mean of both, and the area under their curve. The closed '
  'world has the classes alone, the open world all adjectives with all nouns.'
)

# Figures of photographs, whose colours are not to be changed.
PHOTOGRAPHS = {'Most confused pairs'}


def load(folder: str) -> dict:
  """Returns what `analysis_files.write` returned; {} without a complete evaluation, or for ''."""
  return files.read_json_object(os.path.join(folder, SCORES)) if folder else {}


def lines(scores: dict) -> list[tuple[str, str]]:
  """Returns (label, value) of an evaluation's scores, as people read them."""
  from scipy import stats  # slow to import

  labels = metric_labels.labels(scores) | LABELS
  rows = [
    (label, score(name, scores[name]))
    for name, label in labels.items()
    if scores.get(name) is not None
  ]
  if count := scores.get('examples'):
    # Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    hits = stats.binomtest(round(scores['anp_top1'] * count), count)
    low, high = (score('anp_top1', share) for share in hits.proportion_ci(method='wilson'))
    rows.append((f'{labels["anp_top1"]}, 95 % interval', f'{low} to {high}'))
  return rows


def score(name: str, value: float) -> str:
  """Returns a score's value for people; '-' for the score of no image."""
  if isinstance(value, int):
    return f'{value:,}'
  if name in LABELS and math.isnan(value):
    return '-'
  if 'spearman' in name:
    return f'{value:.3f}'
  if name in LABELS:
    return f'{100 * value:.1f}%'
  return metric_labels.format_value(name, value)


def figures(files: dict) -> list[tuple[str, str]]:
  """Returns (title, file) of the figures among an evaluation's files."""
  return [(title, files[what]) for what, title in _FIGURES if what in files]


def confusions(rows: list) -> report_kit.Table:
  """Returns a table of the first of the (true, predicted, count) rows."""
  cells = [(a, b, str(n)) for a, b, n in rows[:_EACH]]
  return report_kit.Table([('true', 'predicted', 'count'), *cells], 'l')


def text(evaluation: dict, results: results_lib.Results) -> str:
  """Returns the text of the page.

  Args:
    evaluation: content of scores.json.
    results: scores of the examples.
  """
  what = f'Checkpoint of step {evaluation["step"]}'
  if evaluation.get('weights'):
    what = f'Weights of {markdown.escape(evaluation["weights"])}'
  images = vocabulary.counted(evaluation['scores']['examples'], 'image')
  blocks: list[report_kit.Block | None] = [
    f'{what}, {images}'
    + (f'; {evaluation["damaged"]:,} more could not be read' if evaluation['damaged'] else ''),
    report_kit.facts(lines(evaluation['scores'])),
    'Macro accuracy is the mean of the accuracies of the classes, whatever '
    'their sizes. The calibration error (ECE) is the mean distance between '
    'confidence and accuracy over 15 bins of equal width (Guo et al., 2017).',
  ]
  if 'harmonic_mean' in evaluation['scores']:
    blocks.append(_UNSEEN)
  if evaluation['confusions']:
    blocks += ['## Most confused', confusions(evaluation['confusions'])]
  blocks += _best_and_worst(results)
  drawings = figures(evaluation['files'])
  if 'examples' in evaluation['files']:  # other pages show them one by one
    drawings.insert(0, ('Examples', evaluation['files']['examples']))
  for title, file in drawings:
    blocks += [f'## {title}', report_kit.Figure(title, file)]
  tables = [file for file in evaluation['files'].values() if not file.endswith('.png')]
  blocks.append('Tables and scores: ' + ', '.join(f'[{file}]({file})' for file in tables) + '.')
  return report_kit.text(markdown.escape(evaluation['data']), blocks)


def _best_and_worst(results):
  rows = [r for r in results.classes() if r['images']]
  rows.sort(key=lambda r: (r['top1'], r['f1']))
  if not rows:
    return []

  def table(chosen):
    cells = [
      (
        row['class'],
        str(row['images']),
        *('-' if row[k] is None else f'{100 * row[k]:.1f}%' for k in ('top1', 'top5', 'precision')),
        row['most_confused_with'],
      )
      for row in chosen
    ]
    header = ('class', 'images', 'top-1', 'top-5', 'precision', 'confused with')
    return report_kit.Table([header, *cells], 'l')

  if len(rows) <= 2 * _EACH:
    return ['## Classes, the hardest first', table(rows)]
  return [
    f'## The {_EACH} hardest classes',
    table(rows[:_EACH]),
    f'## The {_EACH} easiest classes',
    table(rows[: -_EACH - 1 : -1]),
  ]
