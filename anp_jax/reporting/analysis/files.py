"""The folder of an evaluation: scores, tables, figures, examples, a page."""

import contextlib
import csv
import json
import os
import shutil

from anp_jax.reporting.analysis import figures
from anp_jax.reporting.analysis import page
from anp_jax.reporting.analysis import pictures


def write(folder: str, config, source, results, facts: dict) -> dict:
  """Writes everything about an evaluation; what was there is replaced.

  Args:
    folder: where it goes; made if it is missing.
    config: the run's config, which says how images are cut.
    source: of the examples.
    results: `results.Results`.
    facts: what else is known, JSON values by name: step, scores and so on.

  Returns:
    What scores.json holds: the facts, files by what they show, and examples.
  """
  os.makedirs(folder, exist_ok=True)
  with contextlib.suppress(FileNotFoundError):  # until it is whole again
    os.remove(os.path.join(folder, page.SCORES))
  shutil.rmtree(os.path.join(folder, page.EXAMPLES), ignore_errors=True)
  said = dict(facts, files={}, examples=[])

  def place(what, name):
    said['files'][what] = name
    return os.path.join(folder, name)

  classes = results.classes()
  _table(place('classes', 'classes.csv'), list(classes[0]), classes)
  # The columns of an example that could be read.
  index = int(results.rows['weight'].argmax())
  columns = list(_prediction(results, index, ''))
  _table(
    place('predictions', 'predictions.csv'), columns,
    _predictions(source, results),
  )  # fmt: skip
  first = results.parts[0]
  if len(results.seen):
    for part in results.parts[1:] or results.parts:
      what = f'confusion_{part.plural}'
      figures.confusion(place(what, f'{what}.png'), part)
    figures.calibration(place('calibration', 'calibration.png'), results.parts)
  if len(results.seen) and results.training is not None:
    figures.sizes(place('sizes', 'class_sizes.png'), first, results.training)
  if source.kind != 'synthetic':
    choice = pictures.choose(results)
    images = pictures.read(config, source, choice.indices)
    if choice.pairs:
      pictures.pairs(
        place('pairs', 'confused_pairs.png'), results, choice, images
      )
    said['examples'] = pictures.save(
      os.path.join(folder, page.EXAMPLES), results, source, choice, images
    )
  said['confusions'] = [
    [first.names[label], first.names[predicted], count]
    for label, predicted, count in first.confusions[:20]
  ]
  _text(os.path.join(folder, page.PAGE), page.text(said, results))
  # Last, so that a folder with scores is whole.
  _text(os.path.join(folder, page.SCORES), json.dumps(said, indent=1))
  return said


def _predictions(source, results):
  """A row for each example, in the order of the source."""
  for i, where in enumerate(_places(source, len(results.rows['label']))):
    yield _prediction(results, i, where)


def _prediction(results, i, where):
  """The row of an example; short where it could not be read."""
  rows, known = results.rows, results.vocabulary
  row = {'index': i, 'file': where}
  if not rows['weight'][i]:
    return row  # its label is that of the example that stood in for it
  row |= {
    'label': known.names[rows['label'][i]],
    'predicted': known.names[rows['classes'][i, 0]],
    'probability': _rounded(rows['probabilities'][i, 0]),
    'rank_of_label': int(rows['rank'][i]),
    'probability_of_label': _rounded(rows['own'][i]),
    'loss': _rounded(rows['loss'][i]),
  }
  for name, words in (('adjective', known.adjectives), ('noun', known.nouns)):
    if name in rows:
      row[name] = words[rows[name][i]]
      row[f'{name}_probability'] = _rounded(rows[f'{name}_probability'][i])
  for j in range(1, rows['classes'].shape[1]):
    row[f'predicted_{j + 1}'] = known.names[rows['classes'][i, j]]
    row[f'probability_{j + 1}'] = _rounded(rows['probabilities'][i, j])
  return row


def _places(source, count):
  if source.kind == 'synthetic':
    return (f'{source.name}, example {i}' for i in range(count))
  return (source.example_name(i) for i in range(count))


def _rounded(value):
  return f'{value:.6g}'


def _table(path, columns, rows):
  """A CSV file; a missing value is an empty cell."""
  with _opened(path) as f:
    writer = csv.DictWriter(f, columns, lineterminator='\n')
    writer.writeheader()
    # One at a time: a million images would be gigabytes of rows.
    writer.writerows(
      {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()}
      for row in rows
    )


def _text(path, text):
  """Written whole, or not at all."""
  with _opened(path + '.new') as f:
    f.write(text)
  os.replace(path + '.new', path)


def _opened(path):
  # A file's name that is not UTF-8 holds surrogates.
  return open(
    path, 'w', newline='', encoding='utf-8', errors='backslashreplace'
  )
