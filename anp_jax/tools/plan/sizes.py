"""The sizes of a plan, and how a batch divides over them."""

import math

import ml_collections

from anp_jax import config as config_lib, models
from anp_jax.config import strategy as strategy_lib
from anp_jax.costs import collectives

MOST_DEVICES = 4096
SCALINGS = ('auto', 'strong', 'weak')


def images_per_device(
  config: ml_collections.ConfigDict, cluster: collectives.Cluster, scaling: str, per_device: int = 0
) -> int:
  """Returns the images that a device computes in a step.

  Args:
    config: resolved config.
    cluster: nodes and devices.
    scaling: 'strong' and 'weak': config.batch_size divides over the devices;
      'auto': it does as far as it divides, then each device has the fewest
      images that hold it.
    per_device: images of each device on any number of devices, with which a
      caller scales weakly; 0: those of config.batch_size, or else of
      config.batch_size_per_device.

  Raises:
    ConfigError: where the batch does not divide.
  """
  parts, micro = strategy_lib.find(config).planned_parts(config, cluster)
  least = unit(config) * micro
  batch = config.batch_size
  if per_device or not batch:
    if scaling == 'strong':
      raise config_lib.ConfigError(
        '--scaling=strong: expected a config.batch_size, which stays on any number of devices, '
        'and no --images_per_device'
      )
    images = per_device or config.batch_size_per_device
    if images % least:
      raise config_lib.ConfigError(
        f'{images} images a device: expected a multiple of {least} '
        '(config.model.norm_group, config.accumulate)'
      )
    return images
  if batch % (parts * least) == 0:
    return batch // parts
  if scaling == 'auto':
    return least * math.ceil(batch / (parts * least))
  raise config_lib.ConfigError(
    f'config.batch_size={batch} does not divide by {parts} devices of '
    f'{least} images or a multiple; nearest: '
    f'{max(1, round(batch / parts / least)) * parts * least}'
  )


def unit(config: ml_collections.ConfigDict) -> int:
  """Returns the smallest number of images that a device computes."""
  group = config.model.norm_group if models.has_batch_norm(config) else 0
  pairs = 2 if config.data.mixup or config.data.cutmix else 1
  return math.lcm(group or 1, pairs)
