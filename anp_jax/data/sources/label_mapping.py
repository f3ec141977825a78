"""A source whose labels are those of another vocabulary."""

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import source as source_lib


def map_labels(
  source: source_lib.Source, vocabulary: vocabulary_lib.Vocabulary
) -> source_lib.Source:
  """The source with the classes of a run, found by their names.

  Args:
    source: of any examples; its classes may be some of the run's.
    vocabulary: the run's.

  Raises:
    ConfigError: for a class that the run does not have, with the nearest.
  """
  names = source.vocabulary.names
  if source.vocabulary == vocabulary:
    return source
  ids = {name: i for i, name in enumerate(vocabulary.names)}
  for name in names:
    if name not in ids:
      raise config_lib.ConfigError(
        f'{source.name} has the class {name!r}, which is none of the '
        f'{len(vocabulary)} that the run was trained to name'
        f'{vocabulary_lib.nearest(name, vocabulary.names)}'
      )
  return _MappedLabels(source, vocabulary, [ids[name] for name in names])


class _MappedLabels(source_lib.Source):
  """A source whose class i is the class ids[i] of another vocabulary."""

  def __init__(self, source, vocabulary, ids):
    self.kind = source.kind
    self.name = source.name
    self.vocabulary = vocabulary
    self._source = source
    self._ids = np.array(ids, np.int32)

  def __len__(self):
    return len(self._source)

  def read(self, indices):
    images, labels = self._source.read(indices)
    return images, self._ids[labels]

  def labels(self):
    return self._ids[self._source.labels()]

  def example_name(self, index):
    return self._source.example_name(index)

  def listing(self):
    return self._source.listing()
