"""The strategy `sync`; see its step."""

from anp_jax import config as config_lib
from anp_jax.config import simulation_keys, strategy
from anp_jax.costs import mesh_shape, steps


class Sync(strategy.Strategy):
  """Synchronous training: every shard's gradient in every update."""

  name = 'sync'

  def default_config(self):
    """The simulated time of a cluster."""
    return {
      **simulation_keys.KEYS,
      'simulate.reduce_seconds': simulation_keys.seconds(
        'seconds of the gradient all-reduce over workers that train in step'
      ),
    }

  def check(self, config):
    """Refuses simulated workers that do not divide the batch."""
    simulation_keys.check(config)

  def planned_parts(self, config, cluster):
    """Divides the batch over all devices."""
    if mesh_shape.shape(config, cluster.size)[1] > 1:
      raise config_lib.ConfigError(
        f'config.mesh.model={config.mesh.model}: only planned for channel_split, expected 1'
      )
    self.groups(config, cluster.size)
    return cluster.size, config.accumulate

  def predicted_step(self, setting, images):
    """Predicts a step in which all devices sum their gradients."""
    return steps.synchronous(setting, images)

  def build(self, config, specs, order=(), offload_devices=()):
    """Sums gradients over all devices."""
    from anp_jax.parallel.sync import sync_step

    return sync_step.SyncStep(config, specs, order)

  def simulated_clock(self, spec):
    """The clock of workers that all wait for each other in each step."""
    # A strategy that inherits from this one may have other keys.
    settings = spec.config.strategy.get('simulate')
    if not settings or not settings.workers:
      return None
    from anp_jax.parallel import simulated_clock

    return simulated_clock.SimulatedClock(spec.config)
