"""How a step's batch divides over the devices of a mesh."""

import jax
from ml_collections import ConfigDict

from anp_jax import config as config_lib, models
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel import mesh as mesh_lib


def check(config: ConfigDict, batch_size: int, mesh: jax.sharding.Mesh) -> None:
  """Refuses a batch that does not divide into whole groups on each device.

  Args:
    config: config of the run.
    batch_size: images per step over all devices.
    mesh: mesh of the run.

  Raises:
    ConfigError: naming the keys and values that would fit.
  """
  strategy = strategy_lib.find(config)
  strategy.check_mesh(config, mesh)
  division = strategy.batch_division(config, mesh_lib.batch_devices(mesh))
  if batch_size % division.parts:
    raise config_lib.ConfigError(
      f'config.batch_size={batch_size} does not divide by '
      f'{division.description}; the nearest that does is '
      f'{division.parts * max(1, round(batch_size / division.parts))}'
    )
  micro = batch_size // division.parts
  has_batch_norm = models.has_batch_norm(config)
  group = config.model.norm_group if has_batch_norm else 0
  if group and micro % group:
    raise config_lib.ConfigError(
      f'config.model.norm_group={group}: a device computes {micro} images at '
      f'a time ({batch_size} / ({division.description})), expected a multiple '
      f'of {group}'
    )
  if has_batch_norm and not group and division.parts > division.at_once:
    raise config_lib.ConfigError(
      'config.model.norm_group=0: statistics of the whole batch need it at '
      f'once, not in {division.parts // division.at_once} parts '
      f'({division.description})'
    )
  if (config.data.mixup or config.data.cutmix) and micro % 2:
    raise config_lib.ConfigError(
      f'config.data.mixup and cutmix pair images: {micro} images a device and '
      'micro-batch is not an even number'
    )
