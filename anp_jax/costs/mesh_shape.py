"""How devices divide into the axes of a mesh."""

import math

from anp_jax import config as config_lib


def shape(config, devices: int) -> tuple[int, int]:
  """Devices along 'data' and 'model', as `parallel.mesh` divides them.

  Raises:
    ConfigError: if config.mesh does not fit so many devices.
  """
  sizes = config.mesh.data, config.mesh.model
  fixed = math.prod(n for n in sizes if n > 0)
  free = sizes.count(-1)
  if free > 1 or devices % fixed or (not free and fixed != devices):
    raise config_lib.ConfigError(
      f'config.mesh (data={sizes[0]}, model={sizes[1]}) does not fit {devices} devices'
    )
  data, model = (devices // fixed if n == -1 else n for n in sizes)
  return data, model
