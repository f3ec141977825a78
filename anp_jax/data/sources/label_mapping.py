"""A source whose labels are those of another vocabulary."""

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib


def map_labels(source, known: vocabulary_lib.Vocabulary):
  """The source with the classes of a run, found by their names.

  Args:
    source: of any examples; its classes may be some of the run's.
    known: the run's vocabulary.

  Raises:
    ConfigError: for a class that the run does not know, with the nearest.
  """
  names = source.vocabulary.names
  if source.vocabulary == known:
    return source
  ids = {name: i for i, name in enumerate(known.names)}
  for name in names:
    if name not in ids:
      raise config_lib.ConfigError(
        f'{source.name} has the class {name!r}, which is none of the '
        f'{len(known)} that the run was trained to name'
        f'{config_lib.nearest(name, known.names)}'
      )
  return _Relabelled(source, known, [ids[name] for name in names])


class _Relabelled:
  """See `map_labels`."""

  def __init__(self, source, known, ids):
    self.kind = source.kind
    self.name = source.name
    self.vocabulary = known
    # A synthetic source names no example.
    self.example_name = getattr(source, 'example_name', None)
    self._source = source
    self._ids = np.array(ids, np.int32)

  def __len__(self):
    return len(self._source)

  def read(self, indices):
    """See `sources.Source.read`."""
    images, labels = self._source.read(indices)
    return images, self._ids[labels]

  def labels(self):
    """See `sources.Source.labels`."""
    return self._ids[self._source.labels()]
