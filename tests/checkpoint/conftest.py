"""What the tests of checkpoints share."""

import jax
import pytest

from anp_jax import config as config_lib, train
from anp_jax.config import command_line


@pytest.fixture(scope='module')
def averaged(tmp_path_factory, quick_compiles):
  """A run of a user's network with averaged weights: newest 8 and 12, best 6 or 12."""
  config = config_lib.replaced(
    command_line.load('configs/resnet_anp.py:tiny', {}),
    {'model.name': 'tests.user_network:WithoutDropout', 'log.tensorboard': False, 'ema': 0.5},
  )
  folder, device = tmp_path_factory.mktemp('averaged'), jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'devices', lambda: device)
    train.run(config, str(folder))
  return folder
