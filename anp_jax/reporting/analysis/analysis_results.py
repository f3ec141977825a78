"""What an evaluation found, example by example, and what follows from it."""

import dataclasses
import functools

import numpy as np

from anp_jax.data import vocabulary as vocabulary_lib

BINS = 15  # of the calibration, as in Guo et al.


@dataclasses.dataclass(frozen=True)
class Part:
  """One question that was asked: which class, which adjective, which noun.

  Attributes:
    name: 'class', 'adjective' or 'noun'.
    plural: 'classes' and so on.
    names: of all answers.
    labels: (n,) int, the right answers.
    predicted: (n,) int.
    confidence: (n,) float, the probability of what was predicted.
  """

  name: str
  plural: str
  names: tuple[str, ...]
  labels: np.ndarray
  predicted: np.ndarray
  confidence: np.ndarray

  @functools.cached_property
  def hits(self) -> np.ndarray:
    """(n,) bool: whether it is right; never where scores are no numbers."""
    return (self.labels == self.predicted) & np.isfinite(self.confidence)

  @functools.cached_property
  def counts(self) -> np.ndarray:
    """(names,) int64: examples of each."""
    return np.bincount(self.labels, minlength=len(self.names))

  @functools.cached_property
  def recalls(self) -> np.ndarray:
    """(names,) float: share of each that is named right; NaN without any."""
    right = np.bincount(self.labels[self.hits], minlength=len(self.names))
    return _ratio(right, self.counts)

  @functools.cached_property
  def precisions(self) -> np.ndarray:
    """(names,) float: share of what is called so that is; NaN where none is."""
    right = np.bincount(self.labels[self.hits], minlength=len(self.names))
    called = np.bincount(self.predicted, minlength=len(self.names))
    return _ratio(right, called)

  @property
  def macro_accuracy(self) -> float:
    """Mean of the recalls of those names that have examples."""
    return mean(self.recalls[self.counts > 0])

  @functools.cached_property
  def calibration(self) -> 'Calibration':
    """How far confidence is from accuracy, over `BINS` bins."""
    return calibration(self.confidence, self.hits)

  @functools.cached_property
  def confusions(self) -> list[tuple[int, int, int]]:
    """(label, predicted, count) of what is wrong, the most frequent first."""
    # Where a score is not a number nothing is a hit, nor a confusion.
    wrong = ~self.hits & (self.labels != self.predicted)
    size = len(self.names)
    code = self.labels[wrong].astype(np.int64) * size + self.predicted[wrong]
    codes, counts = np.unique(code, return_counts=True)
    order = np.argsort(-counts, kind='stable')
    return [(*divmod(int(codes[i]), size), int(counts[i])) for i in order]

  def matrix(self, chosen: np.ndarray) -> np.ndarray:
    """(k, k) int64: how often each of `chosen` (rows) is called each."""
    place = np.full(len(self.names), -1)
    place[chosen] = np.arange(len(chosen))
    rows, columns = place[self.labels], place[self.predicted]
    is_shown = (rows >= 0) & (columns >= 0)
    counts = np.zeros((len(chosen), len(chosen)), np.int64)
    np.add.at(counts, (rows[is_shown], columns[is_shown]), 1)
    return counts


@dataclasses.dataclass(frozen=True)
class Calibration:
  """How often an answer is right, by how sure it is.

  Attributes:
    counts: (bins,) int64 examples.
    accuracies: (bins,) float, NaN where there are none.
    confidences: (bins,) float, their mean, likewise.
    error: the expected calibration error.
  """

  counts: np.ndarray
  accuracies: np.ndarray
  confidences: np.ndarray
  error: float


@dataclasses.dataclass(frozen=True)
class Results:
  """The rows of an evaluation, with what they are about.

  Attributes:
    vocabulary: of the run.
    rows: of `evaluate.examples`.
    training: (classes,) int images that each class was trained on; None where
      that is not known.
    held_out: classes that were not trained on.
  """

  vocabulary: vocabulary_lib.Vocabulary
  rows: dict[str, np.ndarray]
  training: np.ndarray | None = None
  held_out: tuple[int, ...] = ()

  @functools.cached_property
  def seen(self) -> np.ndarray:
    """(n,) int64: indices of the examples that could be read."""
    return np.flatnonzero(self.rows['weight'] > 0)

  @functools.cached_property
  def parts(self) -> tuple[Part, ...]:
    """The class, and where classes are pairs the adjective and the noun."""
    vocabulary, rows = self.vocabulary, self.rows
    labels = rows['label'][self.seen]
    parts = [
      Part(
        'class',
        'classes',
        vocabulary.names,
        labels,
        rows['classes'][self.seen, 0],
        rows['probabilities'][self.seen, 0],
      )
    ]
    for name, ids, words in (
      ('adjective', vocabulary.adjective_ids(), vocabulary.adjectives),
      ('noun', vocabulary.noun_ids(), vocabulary.nouns),
    ):
      if name in rows:
        parts.append(
          Part(
            name,
            f'{name}s',
            words,
            ids[labels],
            rows[name][self.seen],
            rows[f'{name}_probability'][self.seen],
          )
        )
    return tuple(parts)

  def scores(self) -> dict:
    """What these rows add to the means of an evaluation, name to number."""
    first, *factors = self.parts
    scores = {'macro_accuracy': first.macro_accuracy, 'ece': first.calibration.error}
    for part in factors:
      scores[f'{part.name}_macro_accuracy'] = part.macro_accuracy
      scores[f'{part.name}_ece'] = part.calibration.error
    if self.held_out:
      is_held_out = np.isin(first.labels, self.held_out)
      among = self.rows['held_out'][self.seen] == first.labels
      scores['seen_classes'] = mean(first.hits[~is_held_out])
      scores['held_out_classes'] = mean(first.hits[is_held_out])
      scores['held_out_among_themselves'] = mean(among[is_held_out])
    return scores

  def classes(self) -> list[dict]:
    """A row for each class, in the order of the vocabulary.

    Returns:
      Name of a column to its value; None where there is none.
    """
    vocabulary, part = self.vocabulary, self.parts[0]
    top = np.bincount(
      part.labels[(self.rows['classes'][self.seen] == part.labels[:, None]).any(1)],
      minlength=len(vocabulary),
    )
    top5 = _ratio(top, part.counts)
    worst = {}
    for label, predicted, count in part.confusions:
      worst.setdefault(label, (vocabulary.names[predicted], count))
    rows = []
    for i, name in enumerate(vocabulary.names):
      precision, recall = part.precisions[i], part.recalls[i]
      row = {'class': name}
      if vocabulary.is_anp:
        row['adjective'] = vocabulary.adjectives[vocabulary.adjective_ids()[i]]
        row['noun'] = vocabulary.nouns[vocabulary.noun_ids()[i]]
      if self.training is not None:
        row['training_images'] = int(self.training[i])
      row |= {
        'images': int(part.counts[i]),
        'top1': number(recall),
        'top5': number(top5[i]),
        'precision': number(precision),
        'recall': number(recall),
        'f1': number(_f1(precision, recall)),
        'most_confused_with': worst.get(i, ('', 0))[0],
        'times': worst.get(i, ('', 0))[1],
      }
      rows.append(row)
    return rows


def calibration(confidence, hits, bins: int = BINS) -> Calibration:
  """How far confidence is from accuracy, over bins of equal width.

  Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks",
  ICML 2017, arXiv:1706.04599: the expected calibration error is the mean of
  |accuracy - confidence| of the bins, weighted by their examples.

  Args:
    confidence: (n,) probabilities of what was predicted.
    hits: (n,) bool.
    bins: their number; bin i holds confidences in (i / bins, (i + 1) / bins].
  """
  confidence = np.float64(confidence)
  finite = np.isfinite(confidence)
  confidence, hits = confidence[finite], np.float64(hits)[finite]
  place = np.ceil(confidence * bins).astype(np.int64) - 1
  place = np.clip(place, 0, bins - 1)
  counts = np.bincount(place, minlength=bins)
  accuracies = _ratio(np.bincount(place, hits, bins), counts)
  confidences = _ratio(np.bincount(place, confidence, bins), counts)
  gaps = np.abs(accuracies - confidences)[counts > 0]
  error = float((gaps * counts[counts > 0]).sum() / counts.sum()) if len(confidence) else np.nan
  return Calibration(counts, accuracies, confidences, error)


def mean(values) -> float:
  """NaN of nothing."""
  return float(np.mean(values)) if len(values) else float('nan')


def number(value: float) -> float | None:
  """What JSON and CSV can hold: None for NaN."""
  return float(value) if np.isfinite(value) else None


def _ratio(above, below):
  return np.where(below > 0, above / np.maximum(below, 1), np.nan)


def _f1(precision, recall):
  """0 where nothing is right; NaN where the class has no examples."""
  if np.isnan(recall):
    return np.nan
  precision = 0.0 if np.isnan(precision) else precision
  total = precision + recall
  return 2 * precision * recall / total if total else 0.0
