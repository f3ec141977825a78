"""Some examples of a source, as a source."""

from collections.abc import Sequence

import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import errors
from anp_jax.data import index_shuffle
from anp_jax.data.sources import source as source_lib


class Subset(source_lib.Wrapper):
  """Some examples of a source."""

  def __init__(
    self,
    source: source_lib.Source,
    indices: np.ndarray,
    name: str,
    labels: np.ndarray | None = None,
  ):
    """Creates the subset; no example is read.

    Args:
      source: all examples.
      indices: (n,) indices in the source.
      name: name of the subset in messages.
      labels: (n,) int32 of these examples; None: read on demand.
    """
    super().__init__(source)
    self.name = name
    self._indices = indices
    self._labels = labels

  def __len__(self) -> int:
    return len(self._indices)

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Images by index in the subset, and labels."""
    return self._source.read(self._indices[np.asarray(indices)])

  def labels(self) -> np.ndarray:
    """(n,) int32, of the examples of the subset."""
    if self._labels is None:
      self._labels = self._source.labels()[self._indices]
    return self._labels

  def example_name(self, index: int) -> str:
    """The name that the whole source has for an example."""
    return self._source.example_name(int(self._indices[index]))

  def listing(self) -> Sequence[str] | None:
    """The files that the whole source has for the examples."""
    files = self._source.listing()
    return None if files is None else [files[i] for i in self._indices]


def wrap(source: source_lib.Source, config: ml_collections.ConfigDict) -> source_lib.Source:
  """The training examples without those that the config leaves out.

  The keys are config.data.held_out and imbalance.

  Args:
    source: training split.
    config: the run's config.

  Raises:
    ConfigError: for a pair that cannot be held out, or an imbalance that would
      leave a class without examples.
  """
  d = config.data
  if not d.held_out and d.imbalance == 1:
    return source
  labels = complete_labels(source)
  indices = _without(source, labels, d.held_out)
  indices = indices[cut(labels[indices], d.imbalance, config.seed)]
  name = f'{source.name}, {len(indices)} of {len(source)}'
  return Subset(source, indices, name, labels[indices])


def complete_labels(source: source_lib.Source) -> np.ndarray:
  """The labels (n,) int32 of a source, if every example has one.

  Raises:
    ConfigError: naming the first example without.
  """
  labels = source.labels()
  source_lib.check_labelled(source, labels)
  return labels


def cut(labels: np.ndarray, imbalance: float, seed: int) -> np.ndarray:
  """Chooses examples so that class sizes fall exponentially.

  The classes that have examples, in their order, keep numbers that fall from
  the first to the last by the factor `imbalance`, rounded down (Cui et al.,
  "Class-balanced loss based on effective number of samples", CVPR 2019, arXiv
  1901.05555); as many as the classes have. Where classes have one size, a
  stronger imbalance keeps a subset of what a weaker one keeps.

  Args:
    labels: (n,) int, the class of each example.
    imbalance: largest class over the smallest, 1 or more; 1: all examples.
    seed: seed of the choice among a class's examples.

  Returns:
    Indices, ascending int64.

  Raises:
    ConfigError: if the last class would have none.
  """
  if imbalance == 1:
    return np.arange(len(labels))
  counts = np.bincount(labels)
  present = np.flatnonzero(counts)
  steps = np.arange(len(present)) / max(len(present) - 1, 1)
  shares = imbalance**-steps
  # So that 0.07 x 100 is not 6 by its last bit.
  first = np.floor((counts[present] / shares).min() + 1e-6)
  sizes = np.floor(first * shares + 1e-6).astype(np.int64)
  words = 'less, for which the smallest class keeps an example'
  errors.check(sizes.min(), 'data.imbalance', imbalance, words)
  by_class = np.split(np.argsort(labels, kind='stable'), np.cumsum(counts)[:-1])
  chosen = []
  for label, size in zip(present, sizes, strict=True):
    members = by_class[label]
    # An epoch of its own for each class: another permutation.
    places = np.arange(size) + label * len(members)
    chosen.append(members[index_shuffle.shuffled(places, seed, len(members))])
  return np.sort(np.concatenate(chosen))


def _without(source, labels, names):
  """Indices of the examples of all classes but those named."""
  vocabulary = source.vocabulary
  words = f'() for {source.name}, whose classes are no adjective_noun pairs'
  errors.check(not names or vocabulary.is_anp, 'data.held_out', tuple(names), words)
  ids = {name: i for i, name in enumerate(vocabulary.names)}
  for name in names:
    if name not in ids:
      raise config_lib.ConfigError(
        f'config.data.held_out: {source.name} has no class {name!r}'
        f'{config_lib.nearest(name, vocabulary.names)}'
      )
  indices = np.flatnonzero(~np.isin(labels, [ids[name] for name in names]))
  for name in names:
    for factor, words, of_class in vocabulary.factors:
      word = of_class[ids[name]]
      if word not in of_class[labels[indices]]:
        raise config_lib.ConfigError(
          f'config.data.held_out: {name!r} leaves {source.name} without any '
          f'example of the {factor} {words[word]!r}'
        )
  return indices
