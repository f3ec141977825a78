"""A source without data, whose batches `input.random_batches` makes."""

import ml_collections

from anp_jax.data import vocabulary
from anp_jax.data.sources import class_texts, source as source_lib


class Synthetic(source_lib.Source):
  """Random images and labels, made on the device; for measuring."""

  kind = 'synthetic'

  def __init__(self, d: ml_collections.ConfigDict, split: str):
    """Creates the source; there is nothing to read.

    Args:
      d: the run's config.data.
      split: name of the split.
    """
    self.name = f'synthetic/{split}'
    self._examples = d.synthetic_examples
    self.vocabulary = vocabulary.Vocabulary(
      class_texts.number_classes(self.name, range(d.synthetic_classes))
    )

  def __len__(self) -> int:
    return self._examples
