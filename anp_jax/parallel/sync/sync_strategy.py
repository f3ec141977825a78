"""The strategy `sync`; see its step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.config import keys, simulation_keys, strategy
from anp_jax.costs import collectives, mesh_shape, steps

if TYPE_CHECKING:
  from anp_jax.parallel import simulated_clock
  from anp_jax.parallel.sync import sync_step


class Sync(strategy.Strategy):
  """Synchronous training: every shard's gradient in every update."""

  name = 'sync'

  def default_config(self) -> dict[str, keys.Key]:
    """The simulated time of a cluster."""
    return {
      **simulation_keys.KEYS,
      'simulate.reduce_seconds': simulation_keys.seconds(
        'seconds of the gradient all-reduce over workers that train in step'
      ),
    }

  def check(self, config: dict[str, Any]) -> None:
    """Refuses simulated workers that do not divide the batch."""
    simulation_keys.check(config)

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

  def simulated_clock(self, spec: Any) -> 'simulated_clock.SimulatedClock | None':
    """The clock of workers that all wait for each other in each step."""
    # A strategy that inherits from `sync` may lack the keys.
    settings = spec.config.strategy.get('simulate')
    if not settings or not settings.workers:
      return None
    from anp_jax.parallel import simulated_clock

    return simulated_clock.SimulatedClock(spec.config)
