"""Examples to look at: their choice, and their images as the network saw them."""

import dataclasses
import os

import ml_collections
import numpy as np
from PIL import Image

from anp_jax.data import sources
from anp_jax.data.input import batch_sampler, pipeline
from anp_jax.reporting.analysis import analysis_results as results_lib
from anp_jax.system import drawing, files

_PAIRS = 8  # of the sheet
_WRONG, _OTHERS = 5, 3  # images of a pair: confused ones, and of the other name
_EXAMPLES = 12  # right ones, and as many wrong ones
_SMALL, _LARGE = 72, 112  # pixels of an image on the sheet: at least, at most
_BETWEEN = 12  # pixels between the confused ones and those of the other name
_NAME = 18  # letters of a name above images
_RIGHT, _WRONG_NAME = ('✓ {}', '✗ predicted {}')  # told apart without their colours

_PAIRS_TITLE = [
  'Most confused pairs',
  'left: images of the true class; right: of the class predicted for them',
]
_EXAMPLES_TITLE = [
  'Classified correctly (✓), and wrongly (✗) where the network was surest',
  'blue: the true class, predicted; black: the true class; orange: predicted',
]


@dataclasses.dataclass(frozen=True)
class Choice:
  """The examples that are shown.

  Attributes:
    pairs: (label, predicted, count, indices of confused examples, indices of
      examples of the predicted class), the most frequent first.
    right: indices of examples that are classified correctly, from all over the set.
    wrong: indices of the errors with the highest confidence, one of each pair of
      label and prediction.
  """

  pairs: list[tuple]
  right: list[int]
  wrong: list[int]

  @property
  def indices(self) -> np.ndarray:
    """All indices, ascending, each once."""
    indices = {*self.right, *self.wrong}
    for *_, confused, examples in self.pairs:
      indices |= {*confused, *examples}
    return np.array(sorted(indices), np.int64)


def choose(results: results_lib.Results) -> Choice:
  """Returns the examples that say most; a function of the rows alone."""
  part, readable = results.parts[0], results.readable
  by_confidence = np.argsort(-np.nan_to_num(part.confidence), kind='stable')
  wrong = by_confidence[~part.hits[by_confidence]]
  right = np.flatnonzero(part.hits)
  count = min(_EXAMPLES, len(right))
  right = right[(np.arange(count) + 0.5).astype(int) * len(right) // max(count, 1)]
  pairs = []
  for label, predicted, times in part.confusions[:_PAIRS]:
    is_confused = (part.labels == label) & (part.predicted == predicted)
    confused = by_confidence[is_confused[by_confidence]][:_WRONG]
    # As it looks where the network names it right, if it ever does.
    is_predicted = part.labels == predicted
    examples = by_confidence[(is_predicted & part.hits)[by_confidence]]
    if not len(examples):
      examples = np.flatnonzero(is_predicted)
    pairs.append(
      (label, predicted, times, readable[confused].tolist(), readable[examples[:_OTHERS]].tolist())
    )
  # One of each pair, or a frequent confusion would be all there is.
  _, firsts = np.unique(
    np.stack((part.labels[wrong], part.predicted[wrong])), axis=1, return_index=True
  )
  wrong = wrong[np.sort(firsts)[:_EXAMPLES]]
  return Choice(pairs, readable[right].tolist(), readable[wrong].tolist())


def read(
  config: ml_collections.ConfigDict, source: sources.Source, indices: np.ndarray
) -> dict[int, np.ndarray]:
  """Returns examples as evaluation cuts them.

  Args:
    config: the run's config.
    source: examples of kind 'encoded' or 'pixels'.
    indices: (n,) int64, the chosen examples.

  Returns:
    Index to (size, size, 3) uint8.
  """
  if not len(indices):
    return {}
  sampler = batch_sampler.OneBatch(config, len(source), len(indices), indices, training=False)
  (batch,) = pipeline.batches(source, sampler)
  return dict(zip(indices.tolist(), batch['image']))


def pairs(path: str, results: results_lib.Results, choice: Choice, images: dict) -> None:
  """Writes the most confused pairs, a row each, with images of both.

  Args:
    path: path of the PNG.
    results: scores of the examples.
    choice: chosen examples, with at least one pair.
    images: image by index, from `read`.
  """
  names = results.vocabulary.names
  totals = results.parts[0].counts
  size = next(iter(images.values())).shape[0]
  side = size * -(-_SMALL // size) if size < _SMALL else min(size, _LARGE)
  pitch = side + drawing.ContactSheet.GAP
  row = (_WRONG + _OTHERS) * pitch + _BETWEEN, drawing.ContactSheet.LINE + side
  sheet = drawing.ContactSheet(_PAIRS_TITLE, len(choice.pairs), 1, row)
  for i, (label, predicted, times, confused, examples) in enumerate(choice.pairs):
    left, upper = sheet.corner(i)
    pair = names[label], names[predicted]
    called = f'{{}}, predicted {{}}: {times:,} of {totals[label]:,}'
    second = left + _WRONG * pitch + _BETWEEN
    for x, form, words, count, color, indices in (
      (left, called, pair, _WRONG, drawing.INK, confused),
      (second, '{}', pair[1:], _OTHERS, drawing.SOFT, examples),
    ):
      width = count * pitch
      text = form.format(*(drawing.shortened(name, _NAME) for name in words))
      sheet.text((x, upper), text, width, color)
      for j, index in enumerate(indices):
        place = x + j * pitch, upper + drawing.ContactSheet.LINE
        sheet.picture(place, images[index], side)
  sheet.save(path)


def sheet(path: str, results: results_lib.Results, choice: Choice, images: dict) -> None:
  """Writes the right and the wrong examples on one sheet.

  Args:
    path: path of the PNG.
    results: scores of the examples.
    choice: chosen examples, at least one.
    images: image by index, from `read`.
  """
  names, rows = results.vocabulary.names, results.rows
  size = next(iter(images.values())).shape[0]
  side = size * -(-_LARGE // size) if size < _LARGE else _LARGE
  line = drawing.ContactSheet.LINE
  # The wrong ones begin a row.
  columns = _EXAMPLES // 2
  first_wrong = -(-len(choice.right) // columns) * columns
  contact_sheet = drawing.ContactSheet(
    _EXAMPLES_TITLE, first_wrong + len(choice.wrong), columns, (side, 2 * line + side)
  )
  places = [*enumerate(choice.right), *enumerate(choice.wrong, first_wrong)]
  for place, index in places:
    left, upper = contact_sheet.corner(place)
    label, lower = names[rows['label'][index]], (left, upper + line)
    if place < first_wrong:
      contact_sheet.text(lower, _RIGHT.format(label), side, drawing.BLUE)
    else:
      called = _WRONG_NAME.format(names[rows['classes'][index, 0]])
      contact_sheet.text((left, upper), label, side)
      contact_sheet.text(lower, called, side, drawing.ORANGE)
    contact_sheet.picture((left, upper + 2 * line), images[index], side)
  contact_sheet.save(path)


def save(
  folder: str, results: results_lib.Results, source: sources.Source, choice: Choice, images: dict
) -> list[dict]:
  """Writes the right and the wrong examples as files of their own.

  Args:
    folder: path of the folder, created if it is missing.
    results: scores of the examples.
    source: evaluated examples.
    choice: chosen examples.
    images: image by index, from `read`.

  Returns:
    A record per example: file, where, label, predicted, probability, right.
  """
  os.makedirs(folder, exist_ok=True)
  names, rows = results.vocabulary.names, results.rows
  records = []
  for index in (*choice.right, *choice.wrong):
    file = f'{index}.png'
    with files.atomic_path(os.path.join(folder, file)) as draft:
      Image.fromarray(images[index]).save(draft, 'PNG')
    records.append(
      {
        'file': file,
        'where': source.example_name(index),
        'label': names[rows['label'][index]],
        'predicted': names[rows['classes'][index, 0]],
        'probability': float(rows['probabilities'][index, 0]),
        'right': index in choice.right,
      }
    )
  return records
