"""What the tests of data sets share: one is opened, or refused."""

import numpy as np

from anp_jax.data import sources
from tests import builders, prepared


def source(config, kind, path='', split='train', training=True):
  config.data.source = kind
  config.data.path = str(path)
  config.data.train_split = split
  return sources.open_source(config, training)


def assert_read(source, indices, photos, labels):
  """Asserts the files and labels that a source has at these indices."""
  images, read_labels = source.read(np.array(indices))
  assert images == [prepared.photo(i) for i in photos]
  assert read_labels.tolist() == labels and read_labels.dtype == np.int32


def refused(words, config, *args, **kwargs):
  """The config is refused, in one line that holds all words."""
  builders.assert_refused(words, source, config, *args, **kwargs)
