"""What the tests of data sets share: one is opened, or refused."""

from anp_jax.data import sources
from tests import builders


def source(config, kind, path='', split='train', training=True):
  config.data.source = kind
  config.data.path = str(path)
  config.data.train_split = split
  return sources.open_source(config, training)


def refused(words, config, *args, **kwargs):
  """The config is refused, in one line that holds all words."""
  builders.assert_refused(words, source, config, *args, **kwargs)
