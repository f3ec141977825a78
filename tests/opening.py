"""What the tests of data sets share: one is opened, or refused."""

import pytest

from anp_jax import config as config_lib
from anp_jax.data import sources


def source(config, kind, path='', split='train'):
  config.data.source = kind
  config.data.path = str(path)
  config.data.train_split = split
  return sources.open_source(config, training=True)


def refused(words, config, *args, **kwargs):
  """The config is refused, in one line that holds all words."""
  with pytest.raises(config_lib.ConfigError) as e:
    source(config, *args, **kwargs)
  text = str(e.value)
  assert '\n' not in text
  for word in words:
    assert str(word) in text, text
