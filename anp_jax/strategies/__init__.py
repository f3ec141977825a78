"""How gradients and weights travel between devices."""


def create(config, specs, order=()):
  """The strategy that config.strategy.name names.

  Args:
    config: the run's config.
    specs: PartitionSpec of each parameter.
    order: paths of the parameters in the order in which the network uses them.

  Returns:
    An object with `gather(params)` and `reduce(gradients, others)`, both called
    inside a shard_map over the mesh.
  """
  from anp_jax.strategies import sync

  return {'sync': sync.Sync}[config.strategy.name](config, specs, order)
