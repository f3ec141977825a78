"""A config whose prepared sets and tables lie in a folder of the test."""

import pytest


@pytest.fixture
def config(config, tmp_path):
  """The tiny recipe, a fresh copy for each test."""
  config.data.dir = str(tmp_path / 'data')
  return config
