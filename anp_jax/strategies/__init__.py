"""How gradients and weights travel between devices."""


def create(config, specs):
  """The strategy that config.strategy.name names.

  Args:
    config: the run's config.
    specs: PartitionSpec of each parameter.

  Returns:
    An object with `gather(params)` and `reduce(gradients)`, both called inside
    a shard_map over the mesh.
  """
  from anp_jax.strategies import sync

  return {'sync': sync.Sync}[config.strategy.name](config, specs)
