"""The strategy `sync`; see its step."""

from collections.abc import Sequence
import math
import re
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.config import keys, rules, simulation_keys, strategy
from anp_jax.costs import collectives, mesh_shape, steps
from anp_jax.parallel import apportionment

if TYPE_CHECKING:
  import jax

  from anp_jax.parallel import simulated_clock
  from anp_jax.parallel.sync import sync_step


EQUAL, MEASURED = 'equal', 'measured'
ROWS_KEY = keys.value(
  EQUAL,
  "division of a batch's rows: 'equal', 'measured' (by the devices' speeds), or a share "
  "for each device, such as '2,1'",
  lambda text: text in (EQUAL, MEASURED) or bool(re.fullmatch(r'[1-9]\d*(,[1-9]\d*)*', text)),
  f"{EQUAL}, {MEASURED}, or whole numbers such as '2,1'",
  resumable=True,
)


class Sync(strategy.Strategy):
  """Synchronous training: every shard's gradient in every update."""

  is_elastic = True

  def default_config(self) -> dict[str, keys.Key]:
    """The division of the batch, and the simulated time of a cluster."""
    return {
      'rows': ROWS_KEY,
      **simulation_keys.KEYS,
      'simulate.reduce_seconds': simulation_keys.seconds(
        'seconds of the gradient all-reduce over workers that train in step'
      ),
    }

  def check(self, config: dict[str, Any]) -> None:
    """Refuses simulated workers that do not divide the batch, and rows that do not divide."""
    simulation_keys.check(config)
    check_rows(config)

  def check_mesh(self, config: ConfigDict, mesh: 'jax.sharding.Mesh') -> None:
    """Refuses shares of another number of devices, and too small ones."""
    from anp_jax.parallel import mesh as mesh_lib

    devices, rows = mesh_lib.batch_devices(mesh), config.strategy.get('rows', EQUAL)
    if rows in (EQUAL, MEASURED):
      return
    if len(rows.split(',')) != devices:
      raise config_lib.ConfigError(
        f'config.strategy.rows={rows!r}: expected {devices} numbers, one for each device that '
        'divides the batch'
      )
    counts = self.row_counts(config, config.batch_size, devices)
    if counts and not min(counts):
      raise config_lib.ConfigError(
        f'config.strategy.rows={rows!r}: of {config.batch_size} images, in multiples of '
        f'{self.row_multiple(config, config.batch_size)}, a device gets none; expected more equal '
        'shares, or a larger config.batch_size'
      )

  def row_multiple(self, config: ConfigDict, batch_size: int) -> int:
    """The divisor of each device's rows.

    Groups of batch norm and pairs of blended images stay whole in each micro-batch.
    """
    pair = 2 if config.data.mixup or config.data.cutmix else 1
    return config.accumulate * math.lcm(config.model.get('norm_group', 1), pair)

  def row_counts(self, config: ConfigDict, batch_size: int, devices: int) -> tuple[int, ...]:
    """The rows of each device, in proportion to its share."""
    rows = config.strategy.get('rows', EQUAL)
    if rows in (EQUAL, MEASURED):
      return ()
    shares = [int(share) for share in rows.split(',')]
    counts = apportionment.apportion(batch_size, shares, self.row_multiple(config, batch_size))
    return counts if len(set(counts)) > 1 else ()

  def single_device(self, config: ConfigDict, batch_size: int, rows: int) -> dict[str, Any]:
    """The changes with which one device trains on so many rows as in this run."""
    return {'strategy.rows': EQUAL}

  def planned_parts(self, config: ConfigDict, cluster: collectives.Cluster) -> tuple[int, int]:
    """Divides the batch over all devices."""
    if mesh_shape.shape(config, cluster.size)[1] > 1:
      raise config_lib.ConfigError(
        f'config.mesh.model={config.mesh.model}: only planned for channel_split, expected 1'
      )
    self.groups(config, cluster.size)
    return cluster.size, config.accumulate

  def predicted_step(self, setting: steps.Setting, images: int) -> steps.Step:
    """Predicts a step in which all devices sum their gradients."""
    return steps.synchronous(setting, images)

  def build(
    self,
    config: ConfigDict,
    specs: Any,
    forward_order: Sequence[str] = (),
    offload_devices: Sequence[Any] = (),
  ) -> 'sync_step.SyncStep':
    """Makes an object of the strategy's `step_class`."""
    return self.step_class()(config, specs, forward_order)

  def step_class(self) -> 'type[sync_step.SyncStep]':
    """The class that sums gradients over all devices."""
    from anp_jax.parallel.sync import sync_step

    return sync_step.SyncStep

  def simulation(
    self, spec: Any, workdir: str, step: int
  ) -> 'simulated_clock.SimulatedClock | None':
    """The clock of workers that all wait for each other in each step."""
    # A strategy that inherits from `sync` may lack the keys.
    settings = spec.config.strategy.get('simulate')
    if not settings or not settings.workers:
      return None
    from anp_jax.parallel import simulated_clock

    return simulated_clock.SimulatedClock(spec.config)


def check_rows(config: dict[str, Any]) -> None:
  """Refuses unequal rows where batch norm is over the whole batch."""
  if config.get('strategy.rows', EQUAL) != EQUAL:
    group = config.get('model.norm_group', 1)
    rules.check(group, 'model.norm_group', group, f"1 or more where strategy.rows is not '{EQUAL}'")
