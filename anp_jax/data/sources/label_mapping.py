"""A source whose labels are those of another vocabulary."""

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import class_texts, source as source_lib


def map_labels(
  source: source_lib.Source, vocabulary: vocabulary_lib.Vocabulary
) -> source_lib.Source:
  """The source with the classes of a run, which are matched by name.

  Args:
    source: any examples, whose classes are among the run's.
    vocabulary: the run's classes.

  Raises:
    ConfigError: for a class that the run does not have, with the nearest.
  """
  if source.vocabulary == vocabulary:
    return source
  ids, names = {name: i for i, name in enumerate(vocabulary.names)}, source.vocabulary.names
  vocabularies = source.vocabulary, vocabulary
  if all(v.names == class_texts.numbered(len(v)) for v in vocabularies):
    # Numbers are as wide as the highest, which a set may lack.
    names = vocabulary.names[: len(names)] + names[len(vocabulary) :]
  for name in names:
    if name not in ids:
      raise config_lib.ConfigError(
        f'{source.name} has the class {name!r}, which is none of the '
        f'{len(vocabulary)} that the run was trained to name'
        f'{vocabulary_lib.nearest(name, vocabulary.names)}'
      )
  return _MappedLabels(source, vocabulary, [ids[name] for name in names])


def of_words(source: source_lib.Source, words: str) -> source_lib.Source:
  """The source with the adjectives, or the nouns, of its pairs as its classes.

  Args:
    source: examples of pairs.
    words: 'adjectives' or 'nouns'.
  """
  names, ids = next((n, ids) for f, n, ids in source.vocabulary.factors if words == f'{f}s')
  return _MappedLabels(source, vocabulary_lib.Vocabulary(names, (), ()), ids)


class _MappedLabels(source_lib.Wrapper):
  """A source whose class i is the class ids[i] of another vocabulary."""

  def __init__(self, source, vocabulary, ids):
    super().__init__(source)
    self.vocabulary = vocabulary
    # An example without a class keeps -1; a label beyond the classes stays beyond them.
    self._ids = np.array([*ids, len(vocabulary), -1], np.int32)

  def read(self, indices):
    images, labels = self._source.read(indices)
    return images, self._mapped(labels)

  def labels(self):
    return self._mapped(self._source.labels())

  def _mapped(self, labels):
    return self._ids[np.clip(labels, -1, len(self._ids) - 2)]
