"""The strategy `invariant`; see its step."""

import dataclasses
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.config import keys, rules, strategy
from anp_jax.costs import collectives, device_step, steps
from anp_jax.parallel.sync import sync_strategy as sync

if TYPE_CHECKING:
  import jax

  from anp_jax.parallel.invariant import invariant_step


class Invariant(sync.Sync):
  """Synchronous training with the same bits on any number of devices."""

  state = 'invariant'
  # Sums over devices would depend on their number.
  sums_statistics = False

  def default_config(self) -> dict[str, keys.Key]:
    """The shards and threads, which determine the bits, and how devices divide the shards."""
    return {
      'rows': sync.ROWS_KEY,
      'logical_shards': keys.integer(8, 'parts of the batch, each reduced by itself', at_least=2),
      'threads': keys.integer(
        2,
        "size of a process's CPU thread pool, which decides the bits of its sums",
        at_least=1,
        at_most=4096,
      ),
    }

  def check(self, config: dict[str, Any]) -> None:
    """Refuses a batch that depends on the number of devices."""
    rules.check(
      config['batch_size'],
      'batch_size',
      0,
      'a number of images where '
      'strategy.name is invariant: batch_size_per_device makes the batch '
      'depend on the number of devices',
    )
    sync.check_rows(config)

  def xla_settings(self, config: ConfigDict) -> dict[str, Any]:
    """Deterministic operations, and a CPU pool of the config's size."""
    return {'deterministic': True, 'threads': config.strategy.threads}

  def check_mesh(self, config: ConfigDict, mesh: 'jax.sharding.Mesh') -> None:
    """Refuses devices, threads or flags that would change the bits, and wrong shares."""
    self.check_evaluation(config, mesh)
    super().check_mesh(config, mesh)

  def row_multiple(self, config: ConfigDict, batch_size: int) -> int:
    """The rows of a logical shard."""
    return max(1, batch_size // config.strategy.logical_shards)

  def single_device(self, config: ConfigDict, batch_size: int, rows: int) -> dict[str, Any]:
    """The changes with which one device trains on so many rows as in this run."""
    shards = rows // self.row_multiple(config, batch_size)
    return {'strategy.rows': sync.EQUAL, 'strategy.logical_shards': shards}

  def check_evaluation(self, config: ConfigDict, mesh: 'jax.sharding.Mesh') -> None:
    """Refuses devices, threads or flags that would change the bits of scores."""
    from anp_jax.parallel import mesh as mesh_lib
    from anp_jax.parallel.invariant import invariant_step

    invariant_step.check(config, mesh_lib.batch_devices(mesh), mesh_lib.platform(mesh))

  def batch_division(self, config: ConfigDict, devices: int) -> strategy.BatchDivision:
    """Logical shards, computed one after another on each device."""
    shards = config.strategy.logical_shards
    return strategy.BatchDivision(shards, 1, f'config.strategy.logical_shards={shards}')

  def planned_parts(self, config: ConfigDict, cluster: collectives.Cluster) -> tuple[int, int]:
    """Divides the logical shards over all devices."""
    super().planned_parts(config, cluster)
    shards = config.strategy.logical_shards
    if shards % cluster.size:
      raise config_lib.ConfigError(
        f'{cluster.size} devices do not divide config.strategy.logical_shards={shards}'
      )
    return cluster.size, shards // cluster.size

  def predicted_step(self, setting: steps.Setting, images: int) -> steps.Step:
    """Predicts a step of logical shards, one after another; sums follow the backward pass."""
    shards, size = setting.config.strategy.logical_shards, setting.cluster.size
    result = steps.synchronous(setting, images, overlap=0.0)
    per_device = max(1, shards // size)
    starts = setting.workload.kernels * setting.efficiency.kernel_seconds
    # A device sends so many partial sums; the first is in `result`.
    partial = per_device // (per_device & -per_device) if size > 1 else 1
    effective = device_step.scaled(setting.cluster, setting.efficiency)
    sent = setting.workload.param_bytes + 4 * setting.workload.statistics
    scattered = collectives.gather(effective, sent)
    return dataclasses.replace(
      result,
      fixed=result.fixed + (per_device - 1) * starts,
      communication=result.communication + (partial - 1) * scattered,
    )

  def passes(self, config: ConfigDict, devices: int) -> int:
    """A pass for each logical shard of a device."""
    return max(1, config.strategy.logical_shards // devices)

  def eval_parts(self, config: ConfigDict, devices: int) -> int:
    """The logical shards, on any number of devices."""
    return config.strategy.logical_shards

  def step_class(self) -> 'type[invariant_step.InvariantStep]':
    """The class that sums in one fixed tree."""
    from anp_jax.parallel.invariant import invariant_step

    return invariant_step.InvariantStep
