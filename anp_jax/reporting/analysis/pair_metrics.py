"""Metrics of a set's scores in plain NumPy: rankings, unseen pairs, sentiment."""

from collections.abc import Iterable, Iterator

import numpy as np

RETRIEVED = (1, 5, 10)
_CHUNK = 2**22  # scores of all combinations in memory at once


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Returns the logarithms of probabilities, (n, classes) float64, NaN where a logit is."""
  # Of images that a network is sure of, float32 ones are alike: all 0.
  logits = np.asarray(logits, np.float64)
  shifted = logits - logits.max(-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def ranking(scores: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
  """Returns how well each class's scores rank the images: retrieval by name.

  Args:
    scores: (n, classes) float, comparable between images, as log-probabilities.
    labels: (n,) int, the right classes.

  Returns:
    Arrays (classes,) float, NaN for a class without an image: average_precision,
    the sum over the distinct scores of (gain in recall) * precision, without
    interpolation; and precision_at_K, the share of the K images with the highest
    scores that are of the class. Of equal scores the first image comes first. A NaN
    is the lowest score; a class of whose scores none is a number has NaN.
  """
  names = ('average_precision', *(f'precision_at_{k}' for k in RETRIEVED))
  values = np.full((len(names), scores.shape[1]), np.nan)
  for c in np.unique(labels):
    if np.isnan(scores[:, c]).all():
      continue
    column = np.where(np.isnan(scores[:, c]), -np.inf, scores[:, c])
    order = np.argsort(-column, kind='stable')
    ordered = column[order]
    hits = np.cumsum(labels[order] == c)
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    precision, gains = hits[last] / (last + 1), np.diff(hits[last], prepend=0)
    retrieved = (hits[min(k, len(hits)) - 1] / k for k in RETRIEVED)
    values[:, c] = (gains @ precision / hits[-1], *retrieved)
  return dict(zip(names, values))


def bias_sweep(
  chunks: Iterable[np.ndarray],
  labels: np.ndarray,
  seen_columns: np.ndarray,
  unseen_columns: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the accuracies of seen and of unseen pairs for every bias that differs.

  Chao, Changpinyo, Gong and Sha, "An Empirical Study and Analysis of Generalized
  Zero-Shot Learning for Object Recognition in the Wild", ECCV 2016,
  arXiv:1605.04253, and Purushwalkam et al., "Task-Driven Modular Networks for
  Zero-Shot Compositional Learning", ICCV 2019, arXiv:1905.05908: a bias is added to
  the scores of unseen pairs. An image's answer changes once, where the bias exceeds
  the lead of its best seen pair over its best unseen one, so that a sort of these
  leads gives the whole curve.

  Args:
    chunks: (rows, columns) float scores, n rows in all; a column is a pair.
    labels: (n,) int, columns of the right pairs.
    seen_columns: columns of the pairs with training images.
    unseen_columns: columns of the other pairs that may be answers.

  Returns:
    Two arrays (points,) float, from the bias -inf to +inf: the shares of the images
    of seen pairs, and of all others, that are named right. NaN without such images.
  """
  best = []
  for scores in chunks:
    tops = []
    for columns in (seen_columns, unseen_columns):
      chosen = scores[:, columns]
      index = chosen.argmax(1)
      tops += [columns[index], chosen[np.arange(len(index)), index]]
    best.append(tops)
  seen_column, seen_score, unseen_column, unseen_score = map(np.concatenate, zip(*best))
  leads = seen_score - unseen_score
  order = np.argsort(leads)
  order = order[~np.isnan(leads[order])]
  leads, label = leads[order], labels[order]
  ends = np.append(leads[1:] != leads[:-1], True)[: len(leads)]  # none without a lead
  changes = np.append(0, 1 + np.flatnonzero(ends))
  lost = np.append(0, np.cumsum(seen_column[order] == label))
  won = np.append(0, np.cumsum(unseen_column[order] == label))
  seen_images = np.isin(labels, seen_columns).sum()
  unseen_images = len(labels) - seen_images
  seen_accuracy = (lost[-1] - lost[changes]) / (seen_images or np.nan)
  return seen_accuracy, won[changes] / (unseen_images or np.nan)


def sweep_scores(seen_accuracy: np.ndarray, unseen_accuracy: np.ndarray) -> dict[str, float]:
  """Returns the figures of a curve from `bias_sweep`, by name.

  Returns:
    best_seen, best_unseen; harmonic_mean, the highest of the two accuracies; auc,
    the area under the accuracy of unseen pairs over that of seen ones.
  """
  total, product = seen_accuracy + unseen_accuracy, seen_accuracy * unseen_accuracy
  harmonic = np.where(total > 0, 2 * product / np.where(total > 0, total, 1), total)
  return {
    'best_seen': float(seen_accuracy[0]),
    'best_unseen': float(unseen_accuracy[-1]),
    'harmonic_mean': float(harmonic.max()),
    'auc': float(np.trapezoid(unseen_accuracy[::-1], seen_accuracy[::-1])),
  }


def combinations(adjective: np.ndarray, noun: np.ndarray) -> Iterator[np.ndarray]:
  """Yields the scores of all adjectives with all nouns, some images at a time.

  Args:
    adjective: (n, adjectives) float scores, which add up with those of nouns.
    noun: (n, nouns) float.

  Yields:
    (rows, adjectives * nouns) float; column a * nouns + b is adjective a, noun b.
  """
  rows = max(1, _CHUNK // (adjective.shape[1] * noun.shape[1]))
  for i in range(0, len(adjective), rows):
    scores = adjective[i : i + rows, :, None] + noun[i : i + rows, None, :]
    yield scores.reshape(len(scores), -1)


def expected(
  logits: np.ndarray, labels: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns a lexicon's values of the images whose pair it has.

  Args:
    logits: (n, classes) float.
    labels: (n,) int, the right classes.
    table: (classes, ...) float, values of each class; NaN where the lexicon lacks it.

  Returns:
    Three arrays (images, ...): values of the right pair; their mean under the softmax
    over the pairs of the lexicon; values of the best of these.
  """
  in_lexicon = np.isfinite(table.reshape(len(table), -1)).all(1)
  images = in_lexicon[labels] & np.isfinite(logits).all(1)
  chosen, values = logits[images][:, in_lexicon], table[in_lexicon]
  return table[labels[images]], np.exp(log_softmax(chosen)) @ values, values[chosen.argmax(1)]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
  """Returns the rank correlation of two (n,) arrays; NaN where one is constant.

  Spearman 1904; equal values have the mean of their ranks.
  """
  from scipy import stats  # takes a second

  ranks = np.stack([stats.rankdata(a), stats.rankdata(b)])
  ranks -= ranks.mean(1, keepdims=True) if len(a) else 0
  norm = np.sqrt((ranks[0] @ ranks[0]) * (ranks[1] @ ranks[1]))
  return float(ranks[0] @ ranks[1] / norm) if norm else float('nan')


def sign_agreement(a: np.ndarray, b: np.ndarray) -> float:
  """Returns the share of equal signs where `a`, (n,), is not 0; NaN for none."""
  values = np.sign(a) == np.sign(b)
  return float(values[a != 0].mean()) if (a != 0).any() else float('nan')
