"""Results of an evaluation, example by example, and the scores that follow."""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from anp_jax.data import vocabulary as vocabulary_lib

BINS = 15  # of the calibration, as in Guo et al.


@dataclasses.dataclass(frozen=True)
class Part:
  """Answers to one question: the class, the adjective or the noun of each example.

  Attributes:
    name: 'class', 'adjective' or 'noun'.
    plural: 'classes' and so on.
    names: all possible answers.
    labels: (n,) int, the right answers.
    predicted: (n,) int, the predicted answers.
    confidence: (n,) float, the probability of the predicted answer.
  """

  name: str
  plural: str
  names: tuple[str, ...]
  labels: np.ndarray
  predicted: np.ndarray
  confidence: np.ndarray

  @functools.cached_property
  def hits(self) -> np.ndarray:
    """(n,) bool: whether the prediction is right; False where scores are not finite."""
    return (self.labels == self.predicted) & np.isfinite(self.confidence)

  @functools.cached_property
  def counts(self) -> np.ndarray:
    """(names,) int64: examples of each name."""
    return self._count(self.labels)

  @functools.cached_property
  def recalls(self) -> np.ndarray:
    """(names,) float: share of a name's examples predicted right; NaN without any."""
    return _ratio(self._count(self.labels[self.hits]), self.counts)

  @functools.cached_property
  def precisions(self) -> np.ndarray:
    """(names,) float: share of a name's predictions that are right; NaN without any."""
    return _ratio(self._count(self.labels[self.hits]), self._count(self.predicted))

  @functools.cached_property
  def f1(self) -> np.ndarray:
    """(names,) float: harmonic mean of precision and recall; NaN without examples."""
    right = self._count(self.labels[self.hits])
    f1 = _ratio(2 * right, self.counts + self._count(self.predicted))
    return np.where(self.counts > 0, f1, np.nan)

  @property
  def macro_accuracy(self) -> float:
    """Mean of the recalls of the names with examples."""
    return mean(self.recalls[self.counts > 0])

  @functools.cached_property
  def calibration(self) -> 'Calibration':
    """Accuracy by confidence, over `BINS` bins."""
    return calibration(self.confidence, self.hits)

  @functools.cached_property
  def confusions(self) -> list[tuple[int, int, int]]:
    """(label, predicted, count) of wrong predictions, the most frequent first."""
    # Where a score is not a number nothing is a hit, nor a confusion.
    wrong = ~self.hits & (self.labels != self.predicted)
    size = len(self.names)
    code = self.labels[wrong].astype(np.int64) * size + self.predicted[wrong]
    codes, counts = np.unique(code, return_counts=True)
    order = np.argsort(-counts, kind='stable')
    return [(*divmod(int(codes[i]), size), int(counts[i])) for i in order]

  def matrix(self, chosen: np.ndarray) -> np.ndarray:
    """(k, k) int64: examples of each chosen name (rows) by predicted name."""
    place = np.full(len(self.names), -1)
    place[chosen] = np.arange(len(chosen))
    rows, columns = place[self.labels], place[self.predicted]
    is_shown = (rows >= 0) & (columns >= 0)
    counts = np.zeros((len(chosen), len(chosen)), np.int64)
    np.add.at(counts, (rows[is_shown], columns[is_shown]), 1)
    return counts

  def _count(self, answers):
    return np.bincount(answers, minlength=len(self.names))


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Accuracy by confidence.

  Attributes:
    counts: (bins,) int64 examples.
    accuracies: (bins,) float, NaN where there are no examples.
    confidences: (bins,) float, the mean confidence, likewise.
    error: expected calibration error.
  """

  counts: np.ndarray
  accuracies: np.ndarray
  confidences: np.ndarray
  error: float


@dataclasses.dataclass(frozen=True)
class Results:
  """The rows of an evaluation, with the classes that they name.

  Attributes:
    vocabulary: classes of the run.
    rows: arrays with a row per example, from `eval_loop.examples`.
    training: (classes,) int training images of each class; None: unknown.
    held_out: classes without training images.
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
    vocabulary = self.vocabulary
    rows = {name: values[self.seen] for name, values in self.rows.items()}
    labels, predicted = rows['label'], rows['classes'][:, 0]
    parts = [
      Part('class', 'classes', vocabulary.names, labels, predicted, rows['probabilities'][:, 0])
    ]
    for name, words, ids in self._factors:
      if name in rows:
        confidence = rows[f'{name}_probability']
        parts.append(Part(name, f'{name}s', words, ids[labels], rows[name], confidence))
    return tuple(parts)

  @property
  def _factors(self):
    """(name, words, word of each class) of the adjectives and of the nouns."""
    vocabulary = self.vocabulary
    return (
      ('adjective', vocabulary.adjectives or (), vocabulary.adjective_ids()),
      ('noun', vocabulary.nouns or (), vocabulary.noun_ids()),
    )

  def scores(self) -> dict:
    """Returns further scores of an evaluation, name to number."""
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
    """Returns a row per class: name of a column to its value, None if undefined."""
    vocabulary, part = self.vocabulary, self.parts[0]
    is_in_top5 = (self.rows['classes'][self.seen] == part.labels[:, None]).any(1)
    top5 = _ratio(np.bincount(part.labels[is_in_top5], minlength=len(vocabulary)), part.counts)
    worst: dict[int, tuple[str, int]] = {}
    for label, predicted, count in part.confusions:
      worst.setdefault(label, (vocabulary.names[predicted], count))
    rows = []
    for i, name in enumerate(vocabulary.names):
      row: dict[str, object] = {'class': name}
      if vocabulary.is_anp:
        row |= {factor: words[ids[i]] for factor, words, ids in self._factors}
      if self.training is not None:
        row['training_images'] = int(self.training[i])
      confused_with, times = worst.get(i, ('', 0))
      row |= {
        'images': int(part.counts[i]),
        'top1': number(part.recalls[i]),
        'top5': number(top5[i]),
        'precision': number(part.precisions[i]),
        'recall': number(part.recalls[i]),
        'f1': number(part.f1[i]),
        'most_confused_with': confused_with,
        'times': times,
      }
      rows.append(row)
    return rows


def calibration(
  confidence: Sequence[float] | np.ndarray, hits: Sequence[bool] | np.ndarray, bins: int = BINS
) -> Calibration:
  """Returns accuracy by confidence, over bins of equal width.

  Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks",
  ICML 2017, arXiv:1706.04599: the expected calibration error is the mean of
  |accuracy - confidence| of the bins, weighted by their examples.

  Args:
    confidence: (n,) probabilities of the predictions.
    hits: (n,) bool, whether they are right.
    bins: number of bins; bin i holds confidences in (i / bins, (i + 1) / bins].
  """
  values, right = np.asarray(confidence, np.float64), np.asarray(hits, np.float64)
  finite = np.isfinite(values)
  values, right = values[finite], right[finite]
  place = np.clip(np.ceil(values * bins).astype(np.int64) - 1, 0, bins - 1)
  counts = np.bincount(place, minlength=bins)
  accuracies = _ratio(np.bincount(place, right, bins), counts)
  confidences = _ratio(np.bincount(place, values, bins), counts)
  gaps = np.nan_to_num(np.abs(accuracies - confidences))
  error = float((gaps * counts).sum() / counts.sum()) if len(values) else np.nan
  return Calibration(counts, accuracies, confidences, error)


def mean(values: np.ndarray) -> float:
  """Returns the mean; NaN for no values."""
  return float(np.mean(values)) if len(values) else float('nan')


def number(value: float) -> float | None:
  """Returns a value as JSON and CSV can hold it: None for NaN."""
  return float(value) if np.isfinite(value) else None


def _ratio(above, below):
  return np.where(below > 0, above / np.maximum(below, 1), np.nan)
