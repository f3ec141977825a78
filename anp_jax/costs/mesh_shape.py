"""How devices divide into the axes of a mesh."""

import math

from ml_collections import ConfigDict

from anp_jax import config as config_lib


def shape(config: ConfigDict, devices: int, platform: str = '') -> tuple[int, int]:
  """Returns the number of devices along 'data' and 'model'.

  Args:
    config: resolved config.
    devices: number of devices of the mesh.
    platform: platform of the devices, for the error line; '': unknown.

  Raises:
    ConfigError: if config.mesh does not fit so many devices.
  """
  sizes = config.mesh.data, config.mesh.model
  fixed = math.prod(n for n in sizes if n > 0)
  free = sizes.count(-1)
  if free > 1 or devices % fixed or (not free and fixed != devices):
    kind = f'{devices} {platform}'.rstrip()
    raise config_lib.ConfigError(
      f'config.mesh (data={sizes[0]}, model={sizes[1]}) does not fit {kind} devices'
    )
  data, model = (devices // fixed if n == -1 else n for n in sizes)
  return data, model
