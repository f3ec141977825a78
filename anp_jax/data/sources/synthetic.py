"""A source without data, whose batches `input.synthetic` makes."""

from anp_jax.data import vocabulary
from anp_jax.data.sources import source as source_lib


class Synthetic(source_lib.Source):
  """Random images and labels, made on the device; for measuring."""

  kind = 'synthetic'

  def __init__(self, d, split: str):
    """Creates the source; there is nothing to read.

    Args:
      d: the run's config.data.
      split: its name.
    """
    self.name = f'synthetic/{split}'
    self._examples = d.synthetic_examples
    width = len(str(d.synthetic_classes - 1))
    self.vocabulary = vocabulary.Vocabulary(
      tuple(f'class{i:0{width}}' for i in range(d.synthetic_classes))
    )

  def __len__(self):
    return self._examples
