"""What tests of data share: a config and trees whose files lie in a folder of the test."""

import pytest

from tests import builders


@pytest.fixture
def config(config, tmp_path):
  """The tiny recipe, a fresh copy for each test."""
  config.data.dir = str(tmp_path / 'data')
  return config


@pytest.fixture(scope='module')
def faulty(tmp_path_factory):
  """A tree with a file of every kind."""
  from tests import prepared

  return builders.write_tree(tmp_path_factory.mktemp('faulty'), prepared.files_of_every_kind())


@pytest.fixture
def tree(tmp_path):
  """The flags of a tree of one-coloured PNG files in tmp_path."""
  from tests import showing

  return showing.tree_flags(tmp_path / 'tree')
