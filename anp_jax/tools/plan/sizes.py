"""Which sizes are planned for, and how a batch divides over them."""

import math
import re

from anp_jax import config as config_lib, models
from anp_jax.config import strategy as strategy_lib
from anp_jax.tools.plan import collectives

MOST_DEVICES = 4096
SCALINGS = ('auto', 'strong', 'weak')
_ELLIPSES = ('...', '…')


def numbers(flag: str, text: str) -> tuple[int, ...]:
  """Whole numbers from 1, such as '1,2,4' or '1,2,4,...,512'.

  Three points stand for what goes on as it began: by equal differences if the
  numbers before them have these, else by equal ratios.

  Args:
    flag: named where the text is refused.
    text: as typed.

  Returns:
    The numbers, sorted, each once.

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
  """The terms from a start to the last one; None if they do not get there."""
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
  config, cluster: collectives.Cluster, scaling: str, per_device: int = 0
) -> int:
  """Images that a device computes in a step.

  Args:
    config: resolved.
    cluster: its nodes and devices.
    scaling: 'strong' and 'weak': config.batch_size divides over the devices;
      'auto': it does as far as it divides, then the fewest images a device
      that do.
    per_device: as many images whatever the devices, which is how a caller
      scales weakly; 0: of the batch size, or config.batch_size_per_device.

  Raises:
    ConfigError: where the batch does not divide.
  """
  parts, micro = _parts(config, cluster)
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


def unit(config) -> int:
  """Images that a device cannot divide."""
  group = config.model.norm_group if models.has_batch_norm(config) else 0
  pairs = 2 if config.data.mixup or config.data.cutmix else 1
  return math.lcm(group or 1, pairs)


def mesh(config, devices: int) -> tuple[int, int]:
  """Devices along 'data' and 'model', as `parallel.mesh` divides them.

  Raises:
    ConfigError: if config.mesh does not fit so many devices.
  """
  shape = config.mesh.data, config.mesh.model
  fixed = math.prod(n for n in shape if n > 0)
  free = shape.count(-1)
  if free > 1 or devices % fixed or (not free and fixed != devices):
    raise config_lib.ConfigError(
      f'config.mesh (data={shape[0]}, model={shape[1]}) does not fit {devices} devices'
    )
  data, model = (devices // fixed if n == -1 else n for n in shape)
  return data, model


def _parts(config, cluster) -> tuple[int, int]:
  """Into how many parts the batch is cut, and micro-batches of each.

  Raises:
    ConfigError: where the strategy cannot have so many devices.
  """
  name, s = config.strategy.name, config.strategy
  if name == 'model_ring':
    return (1 if s.station == 'device' else cluster.devices), config.accumulate
  if name == 'channel_split':
    return mesh(config, cluster.size)[0], config.accumulate
  if name == 'parameter_server':
    workers = 1
    if s.mode == 'synchronous':
      serving = s.servers if s.dedicated else 0
      workers = cluster.nodes - serving - s.backup_workers
    if workers < 1 or cluster.nodes <= s.servers * bool(s.dedicated):
      raise config_lib.ConfigError(
        f'{cluster.nodes} nodes are too few for config.strategy.servers='
        f'{s.servers} and backup_workers={s.backup_workers}'
      )
    return workers * cluster.devices, config.accumulate
  if mesh(config, cluster.size)[1] > 1:
    raise config_lib.ConfigError(
      f'config.mesh.model={config.mesh.model}: only planned for channel_split, expected 1'
    )
  if name == 'invariant':
    shards = s.logical_shards
    if shards % cluster.size:
      raise config_lib.ConfigError(
        f'{cluster.size} devices do not divide config.strategy.logical_shards={shards}'
      )
    return cluster.size, shards // cluster.size
  strategy_lib.find(config).groups(config, cluster.size)
  return cluster.size, config.accumulate
