"""The folder of an evaluation: scores, tables, figures, examples, a page."""

import contextlib
import csv
import math
import os
import shutil

import ml_collections
import numpy as np

from anp_jax.data import sources
from anp_jax.reporting.analysis import (
  analysis_page,
  analysis_results as results_lib,
  figures,
  pictures,
)
from anp_jax.system import files, untrusted_text


def write(
  folder: str,
  config: ml_collections.ConfigDict,
  source: sources.Source,
  results: results_lib.Results,
  facts: dict,
) -> dict:
  """Writes the folder of an evaluation; earlier content is replaced.

  Args:
    folder: path of the folder, created if it is missing.
    config: the run's config, which says how images are cut.
    source: evaluated examples.
    results: scores of the examples.
    facts: further JSON values by name: step, scores and so on.

  Returns:
    What scores.json holds: the facts, files by what they show, and examples.
  """
  os.makedirs(folder, exist_ok=True)
  files.unlink_links(os.path.join(folder, analysis_page.EXAMPLES))
  earlier = [os.path.join(folder, name) for name in (analysis_page.SCORES, analysis_page.PAGE)]
  if any(map(os.path.exists, earlier)):  # else its examples may be somebody's
    with contextlib.suppress(FileNotFoundError):  # until it is whole again
      os.remove(earlier[0])
    shutil.rmtree(os.path.join(folder, analysis_page.EXAMPLES), ignore_errors=True)
  evaluation = dict(facts, files={}, examples=[])

  def place(what, name):
    evaluation['files'][what] = name
    return os.path.join(folder, name)

  _write_tables(place, source, results)
  _write_figures(place, results)
  first = results.parts[0]
  if source.has_images:
    choice = pictures.choose(results)
    images = pictures.read(config, source, choice.indices)
    if choice.pairs:
      pictures.pairs(place('pairs', 'confused_pairs.png'), results, choice, images)
    if choice.right or choice.wrong:
      pictures.sheet(place('examples', 'examples.png'), results, choice, images)
    evaluation['examples'] = pictures.save(
      os.path.join(folder, analysis_page.EXAMPLES), results, source, choice, images
    )
  evaluation['confusions'] = [
    [first.names[label], first.names[predicted], count]
    for label, predicted, count in first.confusions[:20]
  ]
  files.write_atomic(
    os.path.join(folder, analysis_page.PAGE), analysis_page.text(evaluation, results)
  )
  # Last, so that a folder with scores is whole.
  files.write_json(os.path.join(folder, analysis_page.SCORES), evaluation)
  return evaluation


def _write_tables(place, source, results):
  """Writes a row per class and word, a row per example, and all scores."""
  for what, table in {'classes': results.classes(), **results.words()}.items():
    _write_csv(place(what, f'{what}.csv'), list(table[0]), table)
  with files.atomic_path(place('logits', 'logits.npz')) as draft, open(draft, 'wb') as file:
    np.savez(file, **results.saved)
  # The columns of an example that could be read.
  index = int(results.rows['weight'].argmax())
  columns = list(_prediction(results, index, ''))
  _write_csv(place('predictions', 'predictions.csv'), columns, _predictions(source, results))


def _write_figures(place, results):
  """Draws what can be drawn of the examples that could be read."""
  if not len(results.readable):
    return
  for part in results.parts[1:] or results.parts:
    what = f'confusion_{part.plural}'
    figures.confusion(place(what, f'{what}.png'), part)
  figures.calibration(place('calibration', 'calibration.png'), results.parts)
  if results.training is not None and len(np.unique(results.training)) > 1:
    path = place('sizes', 'class_sizes.png')
    figures.sizes(path, results.parts[0], results.training)


def _predictions(source, results):
  """A row for each example, in the order of the source."""
  for i in range(len(results.rows['label'])):
    is_named = source.kind != 'synthetic'
    where = source.example_name(i) if is_named else f'{source.name}, example {i}'
    yield _prediction(results, i, where)


def _prediction(results, i, where):
  """The row of an example; short where it could not be read."""
  rows, vocabulary = results.rows, results.vocabulary
  log_probability = rows['log_probabilities'][i, rows['label'][i]]
  row = {'index': i, 'file': where}
  if not rows['weight'][i]:
    return row  # its label is that of the example that stood in for it
  row |= {
    'label': vocabulary.names[rows['label'][i]],
    'predicted': vocabulary.names[rows['classes'][i, 0]],
    'probability': float(rows['probabilities'][i, 0]),
    'rank_of_label': int(rows['rank'][i]),
    'probability_of_label': math.exp(log_probability),
    'loss': -float(log_probability),
  }
  for name, words, _ in vocabulary.factors:
    row[name] = words[rows[name][i]]
    row[f'{name}_probability'] = float(rows[f'{name}_probability'][i])
  for j in range(1, rows['classes'].shape[1]):
    row[f'predicted_{j + 1}'] = vocabulary.names[rows['classes'][i, j]]
    row[f'probability_{j + 1}'] = float(rows['probabilities'][i, j])
  return row


def _cell(value):
  return f'{value:.6g}' if isinstance(value, float) else untrusted_text.csv_cell(value)


def _write_csv(path, columns, rows):
  """Writes a CSV file; a missing value is an empty cell."""
  # A file's name that is not UTF-8 holds surrogates.
  with (
    files.atomic_path(path) as draft,
    open(draft, 'w', newline='', encoding='utf-8', errors='backslashreplace') as f,
  ):
    writer = csv.DictWriter(f, columns, lineterminator='\n')
    writer.writeheader()
    # One at a time: a million images would be gigabytes of rows.
    writer.writerows({k: _cell(v) for k, v in row.items()} for row in rows)
