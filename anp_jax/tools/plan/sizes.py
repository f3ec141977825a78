"""The sizes of a plan, and how a batch divides over them."""

import math
import re

import ml_collections

from anp_jax import config as config_lib, models
from anp_jax.config import strategy as strategy_lib
from anp_jax.costs import collectives

MOST_DEVICES = 4096
SCALINGS = ('auto', 'strong', 'weak')
_ELLIPSES = ('...', '…')


def numbers(flag: str, text: str) -> tuple[int, ...]:
  """Returns whole numbers from 1, such as '1,2,4' or '1,2,4,...,512', sorted, each once.

  Three points continue the numbers before them: by equal differences if the
  numbers have these, else by equal ratios.

  Args:
    flag: flag that an error names.
    text: text of the flag.

  Raises:
    ConfigError: naming the flag, the text and what was expected.
  """
  parts = [p.strip() for p in text.split(',')]
  gaps = [i for i, p in enumerate(parts) if p in _ELLIPSES]
  plain = [p for p in parts if p not in _ELLIPSES]
  if not all(re.fullmatch('[0-9]{1,9}', p) and int(p) for p in plain):
    raise config_lib.ConfigError(
      f'{flag}={text!r}: expected whole numbers from 1, such as 1,2,4 or 1,2,4,...,512'
    )
  if not gaps:
    return tuple(sorted(set(map(int, plain))))
  start, after = [int(p) for p in parts[: gaps[0]]], parts[gaps[0] + 1 :]
  terms = None
  if len(gaps) == 1 and len(start) >= 2 and len(after) == 1:
    terms = _progression(start, int(after[0]))
  if terms is None:
    raise config_lib.ConfigError(
      f'{flag}={text!r}: expected two or more numbers of equal differences or '
      'ratios, three points and a last number that they reach, such as '
      '1,2,4,...,512'
    )
  return tuple(terms)


def _progression(start, last) -> list[int] | None:
  """The terms from a start to the last one; None if they do not reach it."""
  first, second = start[:2]
  if second <= first or last < start[-1] or last - first > 2**20:
    return None
  arithmetic = list(range(first, last + 1, second - first))
  ratio, geometric = second // first, [first]
  while second % first == 0 and geometric[-1] < last:
    geometric.append(geometric[-1] * ratio)
  for terms in (arithmetic, geometric):
    if terms[: len(start)] == start and terms[-1] == last:
      return terms
  return None


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
