"""Results of an evaluation, example by example, and the scores that follow."""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.reporting.analysis import pair_metrics

BINS = 15  # of the calibration, as in Guo et al.
TOP = 5
_CHUNK = 2**22  # scores that are ranked at once


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
    scores: (n, names) float, logarithms of probabilities.
  """

  name: str
  plural: str
  names: tuple[str, ...]
  labels: np.ndarray
  predicted: np.ndarray
  confidence: np.ndarray
  scores: np.ndarray | None = None

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
  def ranking(self) -> dict[str, np.ndarray]:
    """How well the scores of each name rank the examples; see `pair_metrics.ranking`."""
    return {} if self.scores is None else pair_metrics.ranking(self.scores, self.labels)

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
  """The scores of an evaluation, with the classes that they name.

  Attributes:
    vocabulary: classes of the run.
    saved: arrays with a row per example, from `eval_loop.examples`.
    training: (classes,) int training images of each class; None: unknown.
    held_out: (h,) int, classes without training images, where `training` is unknown.
    scores_all_combinations: as that of the run's `heads.Head`.
    lexicon: values of the classes, from `lexicons.Lexicons.by_class`.
  """

  vocabulary: vocabulary_lib.Vocabulary
  saved: dict[str, np.ndarray]
  training: np.ndarray | None = None
  held_out: Sequence[int] = ()
  scores_all_combinations: bool = False
  lexicon: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def rows(self) -> dict[str, np.ndarray]:
    """A few numbers per example, its label and its weight.

    Among equal scores the lower class comes first, as in the metrics.

    Returns:
      Arrays (n, ...): classes, the best k ones, k the smaller of 5 and the classes,
      and their probabilities; rank of the true class, from 1; log_probabilities (n,
      classes). For pairs also adjective and noun, the best word, with
      adjective_probability and noun_probability.
    """
    saved, logits, label = self.saved, self.saved['logits'], self.saved['label']
    size = max(1, _CHUNK // logits.shape[1])
    starts = range(0, len(logits), size)
    logs = np.empty(logits.shape)
    chunks = [
      _ranked(logits[i : i + size], label[i : i + size], logs[i : i + size]) for i in starts
    ]
    ranked = (np.concatenate(values) for values in zip(*chunks))
    rows = {'label': label, 'weight': saved['weight'], 'log_probabilities': logs}
    rows |= dict(zip(('classes', 'probabilities', 'rank'), ranked))
    for name, *_ in self.vocabulary.factors:
      rows[name] = saved[name].argmax(1)
      rows[f'{name}_probability'] = np.exp(saved[name].max(1))
    return rows

  @functools.cached_property
  def readable(self) -> np.ndarray:
    """(n,) int64: indices of the examples that could be read."""
    return np.flatnonzero(self.saved['weight'] > 0)

  def _of_readable(self, values):
    """Rows of the examples that could be read; no copy where all could."""
    return values if len(self.readable) == len(values) else values[self.readable]

  @functools.cached_property
  def parts(self) -> tuple[Part, ...]:
    """The class, and where classes are pairs the adjective and the noun."""
    rows = {name: self._of_readable(values) for name, values in self.rows.items()}
    labels, predicted, logs = rows['label'], rows['classes'][:, 0], rows['log_probabilities']
    confidence = rows['probabilities'][:, 0]
    names = self.vocabulary.names
    parts = [Part('class', 'classes', names, labels, predicted, confidence, logs)]
    for name, words, ids in self.vocabulary.factors:
      answers = ids[labels], rows[name], rows[f'{name}_probability']
      parts.append(Part(name, f'{name}s', words, *answers, self._of_readable(self.saved[name])))
    return tuple(parts)

  @functools.cached_property
  def of_pairs(self) -> tuple[Part, ...]:
    """The adjective and the noun of the best pair."""
    first, *words = self.parts
    return tuple(
      dataclasses.replace(part, predicted=ids[first.predicted], confidence=first.confidence)
      for part, (_, _, ids) in zip(words, self.vocabulary.factors)
    )

  @functools.cached_property
  def contributions(self) -> dict[str, np.ndarray]:
    """(classes,) float by file of features: its mean contribution to a class's logit.

    Two files of pairs are those of adjective and noun. See `models.linear`.
    """
    if 'contributions' not in self.saved:
      return {}
    values = self._of_readable(self.saved['contributions']).T
    names = [name for name, *_ in self.vocabulary.factors]
    if len(values) != len(names):
      names = [f'file_{i}' for i in range(1, len(values) + 1)]
    first = self.parts[0]
    sums = (np.bincount(first.labels, v, len(first.names)) for v in values)
    return {name: _ratio(total, first.counts) for name, total in zip(names, sums)}

  def scores(self) -> dict:
    """Returns further scores of an evaluation, name to number."""
    first, *words = self.parts
    scores = {'macro_accuracy': first.macro_accuracy, 'ece': first.calibration.error}
    for part, of_pair in zip(words, self.of_pairs):
      scores[f'{part.name}_macro_accuracy'] = part.macro_accuracy
      scores[f'{part.name}_ece'] = part.calibration.error
      scores[f'{part.name}_of_pair'] = mean(of_pair.hits)
      scores[f'{part.name}_of_pair_macro'] = of_pair.macro_accuracy
    for name, values in first.ranking.items():
      scores[f'mean_{name}'] = mean(values[first.counts > 0])
    return scores | self._zero_shot() | self._lexicon_scores()

  def _zero_shot(self):
    """Scores of seen and unseen pairs; {} where no example is of an unseen one."""
    first, size = self.parts[0], len(self.vocabulary)
    is_unseen = np.isin(np.arange(size), self.held_out)
    if self.training is not None:
      is_unseen = self.training == 0
    image = is_unseen[first.labels]
    if not image.any():
      return {}
    columns = np.flatnonzero(~is_unseen), np.flatnonzero(is_unseen)
    scores = {
      'seen_classes': len(columns[0]),
      'unseen_classes': len(columns[1]),
      'unseen_images': int(image.sum()),
      'seen_top1': mean(first.hits[~image]),
      'unseen_top1': mean(first.hits[image]),
    }
    logits = self._of_readable(self.saved['logits'])
    curve = pair_metrics.bias_sweep((logits,), first.labels, *columns)
    scores |= pair_metrics.sweep_scores(*curve)
    if not self.scores_all_combinations:
      return scores
    (_, adjectives, adjective), (_, nouns, noun) = self.vocabulary.factors
    code = adjective * len(nouns) + noun
    seen_pairs = np.sort(code[columns[0]])  # of equal scores the first one is the answer
    words = [part.scores for part in self.parts[1:]]
    unseen_pairs = np.setdiff1d(np.arange(len(adjectives) * len(nouns)), seen_pairs)
    chunks = pair_metrics.combinations(*words)
    curve = pair_metrics.bias_sweep(chunks, code[first.labels], seen_pairs, unseen_pairs)
    scores['open_pairs'] = len(unseen_pairs)
    figures = pair_metrics.sweep_scores(*curve)
    for name in ('best_unseen', 'harmonic_mean', 'auc'):  # the best of seen ones is the same
      scores[f'open_{name}'] = figures[name]
    return scores

  def _lexicon_scores(self):
    """Agreement of the predictions with the lexicons, of the images whose pair they have."""
    scores, logits = {}, self._of_readable(self.saved['logits'])
    for lexicon, table in self.lexicon.items():
      true, mean_value, best = pair_metrics.expected(logits, self.parts[0].labels, table)
      scores[f'{lexicon}_images'] = len(true)
      for suffix, values in ('', mean_value), ('_of_pair', best):
        if lexicon == 'sentiment':
          scores[f'sentiment_spearman{suffix}'] = pair_metrics.spearman(true, values)
          scores[f'sentiment_sign{suffix}'] = pair_metrics.sign_agreement(true, values)
        else:
          scores[f'emotion_top1{suffix}'] = mean(true.argmax(1) == values.argmax(1))
    return scores

  def classes(self) -> list[dict]:
    """Returns a row per class: name of a column to its value, None if undefined."""
    part = self.parts[0]
    is_in_top5 = self.rows['rank'][self.readable] <= TOP
    top5 = _ratio(np.bincount(part.labels[is_in_top5], minlength=len(part.names)), part.counts)
    factors = {name: [words[i] for i in ids] for name, words, ids in self.vocabulary.factors}
    more = {} if self.training is None else {'training_images': self.training.tolist()}
    parts = {f'{name}_contribution': v for name, v in self.contributions.items()}
    return _table(part, factors | more, {'top5': top5, **parts})

  def words(self) -> dict[str, list[dict]]:
    """Returns a row per adjective and per noun, by the plural of its kind."""
    tables = {}
    factors = self.vocabulary.factors
    for part, of_pair, (*_, ids) in zip(self.parts[1:], self.of_pairs, factors):
      more = {'pairs': np.bincount(ids, minlength=len(part.names)).tolist()}
      if self.training is not None:
        images = np.bincount(ids, self.training, len(part.names))
        more['training_images'] = images.astype(int).tolist()
      tables[part.plural] = _table(part, more, {'top1_of_pair': of_pair.recalls})
    return tables


def _ranked(logits, label, logs):
  """Best classes, their probabilities and rank of the label; fills `logs`."""
  logs[:] = pair_metrics.log_softmax(logits)
  target = logits[np.arange(len(label)), label][:, None]
  # Ranked by logits: probabilities far below the best are all 0.
  classes = np.argsort(-logits, 1, 'stable')[:, :TOP].copy()  # not a view of all
  lower = np.arange(logits.shape[1]) < label[:, None]
  before = ((logits > target) | ((logits == target) & lower)).sum(1)
  # A rank that is not known (a score is not a number) is the last one.
  rank = np.where(np.isfinite(logits).all(1), 1 + before, logits.shape[1])
  return classes, np.exp(np.take_along_axis(logs, classes, 1)), rank


def _table(part, first_columns, shares):
  """Returns a row per name of a part; values of its columns, None if undefined."""
  worst: dict[int, tuple[str, int]] = {}
  for label, predicted, count in part.confusions:
    worst.setdefault(label, (part.names[predicted], count))
  shares = {
    'top1': part.recalls,
    **shares,
    'precision': part.precisions,
    'f1': part.f1,
    **part.ranking,
  }
  return [
    {
      part.name: name,
      **{column: values[i] for column, values in first_columns.items()},
      'images': int(part.counts[i]),
      **{column: number(values[i]) for column, values in shares.items()},
      **dict(zip(('most_confused_with', 'times'), worst.get(i, ('', 0)))),
    }
    for i, name in enumerate(part.names)
  ]


def calibration(
  confidence: Sequence[float] | np.ndarray, hits: Sequence[bool] | np.ndarray
) -> Calibration:
  """Returns accuracy by confidence, over bins of equal width: (i, i + 1] / BINS.

  Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks",
  ICML 2017, arXiv:1706.04599: the expected calibration error is the mean of
  |accuracy - confidence| of the bins, weighted by their examples.

  Args:
    confidence: (n,) probabilities of the predictions.
    hits: (n,) bool, whether they are right.
  """
  values, right = np.asarray(confidence, np.float64), np.asarray(hits, np.float64)
  finite = np.isfinite(values)
  values, right = values[finite], right[finite]
  place = np.clip(np.ceil(values * BINS).astype(np.int64) - 1, 0, BINS - 1)
  counts = np.bincount(place, minlength=BINS)
  accuracies = _ratio(np.bincount(place, right, BINS), counts)
  confidences = _ratio(np.bincount(place, values, BINS), counts)
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
