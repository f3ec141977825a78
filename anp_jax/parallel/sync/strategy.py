"""The strategy `sync`; see its step."""

from anp_jax.config import strategy


class Sync(strategy.Strategy):
  """Synchronous training: every shard's gradient in every update."""

  name = 'sync'
