"""The strategy `sync`; see its step."""

from anp_jax.config import strategy


class Sync(strategy.Strategy):
  """Synchronous training: every shard's gradient in every update."""

  name = 'sync'

  def build(self, config, specs, order=(), offload_devices=()):
    """Sums gradients over all devices."""
    from anp_jax.parallel.sync import step

    return step.SyncStep(config, specs, order)
