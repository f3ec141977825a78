"""Synchronous training whose bits do not depend on the number of devices.

The config fixes the number of logical shards of the batch. A device computes its
shards one after another with one compiled program, the same for any number of
devices, and all shards' gradients are added in one fixed binary tree: its lower
levels within devices, its upper ones between them. Evaluation works alike.
Gonzalez Tallada (PPoPP 2016) adds in an order that is fixed for one number of
threads; this order is the same for any number of devices. On a CPU the config also
fixes the number of threads: Eigen, which computes XLA's products and convolutions
there, cuts their inner sums by the size of its pool.
"""

from collections.abc import Callable, Sequence
import copy
import math
import os
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib, step_sums
from anp_jax.parallel.sync import sync_step as sync, sync_strategy
from anp_jax.system import xla_flags


class InvariantStep(sync.SyncStep):
  """Sums in the order of a tree over the logical shards.

  Between devices, sums are sent as slices: each device receives every device's part
  of one slice (all-to-all), adds them, and all slices are gathered. That moves
  the bytes of a ring's sum, or more: see `_partial_sums`.
  """

  # In one program, the fusion of a gradient or an update with the sums next to it
  # would depend on their number.
  separate_programs = True

  def micro_batches(self) -> int:
    """The most logical shards of a device."""
    return max(self._shard_counts(lax.axis_size(mesh_lib.DATA)))

  def parts(self) -> int:
    """The logical shards of the whole batch."""
    return self._config.strategy.logical_shards

  def shards_per_device(self, mesh: jax.sharding.Mesh) -> int:
    """The most logical shards that a device of a mesh computes."""
    return max(self._shard_counts(mesh_lib.batch_devices(mesh)))

  def for_evaluation(self) -> 'InvariantStep':
    """The strategy of steps without a gradient, whose batches divide equally."""
    step = copy.copy(self)
    if 'rows' in self._config.strategy:  # not of every strategy that inherits
      step._config = config_lib.replaced(self._config, {'strategy.rows': sync_strategy.EQUAL})
    return step

  def compute_shard(self, compute: Callable[[Any], Any], shard: Any, index: jax.Array) -> Any:
    """compute(shard), or zeros where this device has no shard of that index."""
    counts = self._shard_counts(lax.axis_size(mesh_lib.DATA))
    if len(set(counts)) == 1:
      return compute(shard)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(compute, shard))
    has_shard = index < jnp.asarray(counts)[lax.axis_index(mesh_lib.DATA)]
    return lax.cond(has_shard, compute, lambda _: zeros, shard)

  def add_shards(self, shards: Sequence[Any]) -> Any:
    """Adds the logical shards of this device, as far as the tree adds within it.

    Args:
      shards: a pytree of arrays (...) for each of the device's shards.

    Returns:
      The pytree of their sums (...), or of n partial sums (n, ...) if the tree
      joins some of them with another device's first.
    """
    return jax.tree.map(lambda *x: self._add(jnp.stack(x)), *shards)

  def sum_scores(self, sums: Any) -> Any:
    """The sums of an evaluation over the whole batch, from one device's sums."""

    def total(x):
      if self._partial_sums(x) > 1:
        x = x.reshape(-1, *x.shape[2:])
      return tree_sum(x)

    return jax.tree.map(total, lax.all_gather(sums, mesh_lib.BATCH))

  def _shard_counts(self, devices) -> tuple[int, ...]:
    """The logical shards of each device."""
    shards = self._config.strategy.logical_shards
    rows = self._row_counts(devices)
    if not rows:
      return (shards // devices,) * devices
    return tuple(n * shards // sum(rows) for n in rows)

  def weighted(self, metrics: step_sums.Metrics) -> step_sums.Metrics:
    """The metrics: statistics are sums over logical shards, which are of one size."""
    return metrics

  def _partial_sums(self, x) -> int:
    """The number of partial sums of a device's shards.

    The size of each is the largest power of two that divides every device's shards:
    the tree joins such neighbours on any number of devices. n partial sums are
    sent as (n + 1) / 2 times the bytes of one. Integers are exact in any order:
    they have one sum.
    """
    exact = not jnp.issubdtype(x.dtype, jnp.inexact)
    if exact or lax.axis_size(mesh_lib.DATA) == 1:
      return 1
    counts = self._shard_counts(lax.axis_size(mesh_lib.DATA))
    unit = math.gcd(*counts)
    return max(counts) // (unit & -unit)

  def _add(self, x):
    partial = self._partial_sums(x)
    if partial == 1:
      return tree_sum(x)
    return jax.vmap(tree_sum)(x.reshape(partial, -1, *x.shape[1:]))

  def _flat(self, x):
    return x.reshape(self._partial_sums(x), -1)

  def _shaped(self, total, x):
    return total.reshape(x.shape[self._partial_sums(x) > 1 :])

  def _sum(self, x):
    """The sum (size,) of all devices' partial sums (n, size)."""
    devices, (partial, size) = lax.axis_size(mesh_lib.DATA), x.shape
    slices = jnp.pad(x, ((0, 0), (0, -size % devices)))
    slices = slices.reshape(partial, devices, -1).swapaxes(0, 1)
    slices = lax.all_to_all(slices, mesh_lib.DATA, 0, 0)
    slices = slices.reshape(devices * partial, -1)
    counts = np.array(self._shard_counts(devices))
    if partial > 1 and len(set(counts)) > 1:
      # A device with fewer shards than another has no sums in its last places.
      sums = partial * counts // max(counts)
      slices = slices[np.flatnonzero(np.arange(partial) < sums[:, None])]
    total = tree_sum(slices)
    return lax.all_gather(total, mesh_lib.DATA, tiled=True)[:size]


def tree_sum(x: jax.Array) -> jax.Array:
  """The sum over the first axis, of any length: neighbours in pairs.

  The last of an odd number waits for the next level: twelve are six sums, then
  three, then (a + b) and c, then one. So 2^k neighbours, the first of them at
  a multiple of 2^k, are joined to one sum, whatever the length.
  """
  while len(x) > 1:
    pairs = x[0 : len(x) - 1 : 2] + x[1::2]
    x = jnp.concatenate([pairs, x[-1:]]) if len(x) % 2 else pairs
  return x[0]


def check(config: ConfigDict, devices: int, platform: str) -> None:
  """Refuses values that would make the bits depend on the number of devices.

  Args:
    config: config of the run.
    devices: number of devices over which the batch is divided.
    platform: platform of the mesh.

  Raises:
    ConfigError: naming the key and the expected value.
  """
  shards = config.strategy.logical_shards
  if shards % devices:
    divisors = [n for n in range(1, shards + 1) if shards % n == 0]
    raise config_lib.ConfigError(
      f'config.strategy.logical_shards={shards}: {devices} devices do not '
      f'divide it, only {", ".join(map(str, divisors))} do; expected '
      f'a multiple of {devices}, the nearest is '
      f'{_nearest(shards, devices, config.batch_size)}, the same for every run '
      'to compare'
    )
  for key, value, expected in (
    ('accumulate', config.accumulate, 1),
    ('strategy.reduce_dtype', config.strategy.reduce_dtype, config.model.param_dtype),
  ):
    if value != expected:
      raise config_lib.ConfigError(
        f'config.{key}={value!r}: expected {expected!r} with '
        "config.strategy.name='invariant', or sums within a device and between "
        'devices differ'
      )
  _check_threads(config, platform)
  if any(rule != 'replicate' for _, rule in config.sharding):
    raise config_lib.ConfigError(
      f"config.sharding={config.sharding!r}: expected 'replicate' alone with "
      "config.strategy.name='invariant': norms of divided parameters are "
      'added by device'
    )
  if missing := xla_flags.not_deterministic(platform):
    raise config_lib.ConfigError(
      f"config.strategy.name='invariant' on a {platform} needs XLA_FLAGS="
      f'{" ".join(missing)}; XLA_FLAGS is '
      f'{os.environ.get("XLA_FLAGS", "")!r}'
    )


def _nearest(shards, devices, batch_size):
  """The multiple of `devices` nearest to `shards`, if possible a divisor of the batch."""
  multiples = range(devices, max(shards + devices, batch_size) + 1, devices)
  fitting = [n for n in multiples if n > 1 and batch_size % n == 0]
  return min(fitting or multiples, key=lambda n: abs(n - shards))


def _check_threads(config, platform):
  """Refuses a process whose CPU pool has another size than the config's.

  XLA's CPU client does not expose its number of threads: `xla_flags.cpu_threads`
  derives it, as XLA does, from the environment and the devices.
  """
  if platform != 'cpu':
    return
  devices = jax.local_device_count('cpu')
  threads, pool = config.strategy.threads, xla_flags.cpu_threads(devices)
  if devices > threads:
    raise config_lib.ConfigError(
      f'config.strategy.threads={threads}: this process has {devices} CPU '
      f'devices, and XLA gives each a thread; expected {devices} or more, the '
      'same for every run to compare'
    )
  if pool != threads:
    cause = xla_flags.named_threads() or 'not set'
    raise config_lib.ConfigError(
      f'config.strategy.threads={threads}: the CPU pool of this process has '
      f'{pool} threads (NPROC is {cause}), and the bits of sums depend on '
      f'their number; expected NPROC={threads} or no such variable'
    )
