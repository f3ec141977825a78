"""Some examples of a source, as a source."""

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import index_shuffle
from anp_jax.data.sources import source as source_lib

_FACTORS = ('adjective', 'noun')


class Subset(source_lib.Source):
  """Some examples of a source."""

  def __init__(self, source, indices: np.ndarray, name: str, labels=None):
    """Creates the subset; no example is read.

    Args:
      source: all of it.
      indices: (n,) of its examples.
      name: what messages call the part.
      labels: (n,) int32 of these examples; None: read on demand.
    """
    self.kind = source.kind
    self.vocabulary = source.vocabulary
    self.name = name
    self._source = source
    self._indices = indices
    self._labels = labels

  def __len__(self):
    return len(self._indices)

  def read(self, indices):
    """Returns images by index in the subset, and labels."""
    return self._source.read(self._indices[np.asarray(indices)])

  def labels(self):
    """Returns (n,) int32, of the examples of the subset."""
    if self._labels is None:
      self._labels = self._source.labels()[self._indices]
    return self._labels

  def example_name(self, index):
    """Returns the name that the whole source has for an example."""
    return self._source.example_name(int(self._indices[index]))

  def listing(self):
    """Returns the files that the whole source has for the examples."""
    files = self._source.listing()
    return None if files is None else [files[i] for i in self._indices]


def wrap(source, config):
  """The training examples without those that the config leaves out.

  The keys are config.data.held_out and imbalance.

  Args:
    source: of the training split.
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


def complete_labels(source) -> np.ndarray:
  """The labels (n,) int32 of a source, if every example has one.

  Raises:
    ConfigError: naming the first example without.
  """
  labels = source.labels()
  if len(labels) and labels.min() < 0:
    example = source.example_name(int(np.argmax(labels < 0)))
    raise config_lib.ConfigError(
      f'{example} has no label, which config.data.balance, imbalance and held_out need'
    )
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
    imbalance: 1 or more; 1: all examples.
    seed: of the choice among a class's examples.

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
  if not sizes.min():
    raise config_lib.ConfigError(
      f'config.data.imbalance={imbalance!r}: expected less, for which the '
      'smallest class keeps an example'
    )
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
  if names and not vocabulary.is_anp:
    raise config_lib.ConfigError(
      f'config.data.held_out={tuple(names)!r}: expected () for {source.name}, '
      'whose classes are no adjective_noun pairs'
    )
  number = {name: i for i, name in enumerate(vocabulary.names)}
  for name in names:
    if name not in number:
      raise config_lib.ConfigError(
        f'config.data.held_out: {source.name} has no class {name!r}'
        f'{config_lib.nearest(name, vocabulary.names)}'
      )
  indices = np.flatnonzero(~np.isin(labels, [number[name] for name in names]))
  for factor, ids in zip(_FACTORS, (vocabulary.adjective_ids(), vocabulary.noun_ids())):
    trained = set(ids[labels[indices]].tolist()) if names else ()
    for name in names:
      if ids[number[name]] not in trained:
        word = name.split('_')[_FACTORS.index(factor)]
        raise config_lib.ConfigError(
          f'config.data.held_out: {name!r} leaves {source.name} without any '
          f'example of the {factor} {word!r}'
        )
  return indices
