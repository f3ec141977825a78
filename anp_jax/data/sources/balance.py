"""Classes of unequal sizes, balanced in the stream or in the loss."""

import ml_collections
import numpy as np

from anp_jax.data import index_shuffle
from anp_jax.data.sources import source as source_lib, subset


class Sampler:
  """The endless stream in which every class comes equally often."""

  def __init__(self, labels: np.ndarray):
    """Counts a set's classes.

    Args:
      labels: (n,) int, the class of each example.
    """
    self._by_class = np.argsort(labels, kind='stable')
    self._counts = np.bincount(labels)
    self._starts = np.cumsum(self._counts) - self._counts

  def indices(self, positions: np.ndarray, seed: int) -> np.ndarray:
    """The examples at positions of the stream, by `index_shuffle.balanced`.

    Args:
      positions: (n,) int64, at least 0.
      seed: the run's seed.

    Returns:
      (n,) int64 in [0, examples).
    """
    classes, members = index_shuffle.balanced(positions, seed, self._counts)
    return self._by_class[self._starts[classes] + members]


def sampler(config: ml_collections.ConfigDict, source: source_lib.Source) -> Sampler | None:
  """The sampler of config.data.balance='sample'; None for other values."""
  if config.data.balance != 'sample':
    return None
  return Sampler(subset.complete_labels(source))


def class_weights(
  config: ml_collections.ConfigDict, source: source_lib.Source
) -> tuple[float, ...]:
  """The weights of config.data.balance='weights'; () for other values.

  Args:
    config: the run's config.
    source: training examples.

  Returns:
    A weight for each class, inversely proportional to its number of examples to
    the power of config.data.balance_power; the mean over the examples is 1. A
    class without examples has 0.
  """
  if config.data.balance != 'weights':
    return ()
  labels = subset.complete_labels(source)
  counts = np.bincount(labels, minlength=len(source.vocabulary))
  weights = np.maximum(counts, 1.0) ** -config.data.balance_power * (counts > 0)
  return tuple((weights * counts.sum() / (weights @ counts)).tolist())
