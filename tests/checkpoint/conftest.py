"""What the tests of checkpoints share."""

import pytest

from anp_jax import config as config_lib
from anp_jax.config import command_line
from tests import builders


@pytest.fixture(scope='module')
def averaged(tmp_path_factory):
  """A run of a user's network with averaged weights: newest 8 and 12, best 6 or 12."""
  config = config_lib.replaced(
    command_line.load('configs/resnet_anp.py:tiny', {}),
    {'model.name': 'tests.user_network:WithoutDropout', 'log.tensorboard': False, 'ema': 0.5},
  )
  folder = tmp_path_factory.mktemp('averaged')
  builders.train_alone(config, folder)
  return folder
