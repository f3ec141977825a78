"""How the batch is divided, and how gradients and weights travel."""

from anp_jax import config as config_lib
from anp_jax import models
from anp_jax.parallel import mesh as mesh_lib


def create(config, specs, order=(), helpers=()):
  """The strategy that config.strategy.name names.

  Args:
    config: the run's config.
    specs: PartitionSpec of each parameter.
    order: paths of the parameters in the order in which the network uses them.
    helpers: offload devices, see `runtimes.offload.pool`.

  Returns:
    An object with the face of `sync.Sync`, whose methods are called inside a
    shard_map over the mesh.
  """
  from anp_jax.parallel import channel_split
  from anp_jax.parallel import invariant
  from anp_jax.parallel import local
  from anp_jax.parallel import sync

  if helpers:
    from anp_jax.runtimes.offload import strategy

    return strategy.Offload(config, specs, order, helpers)
  kinds = {
    'sync': sync.Sync,
    'invariant': invariant.Invariant,
    'kernel_split': channel_split.ChannelSplit,
    'local': local.Local,
    # Between servers and workers nothing travels here: a worker's own devices
    # are synchronous.
    'server': sync.Sync,
    # Between stations, models travel as they are.
    'relay': sync.Sync,
  }
  return kinds[config.strategy.name](config, specs, order)


def statistics_axis(config) -> str | None:
  """The mesh axis over which a network may take statistics of the batch.

  None where sums over devices would depend on how many there are.
  """
  return None if config.strategy.name == 'invariant' else mesh_lib.DATA


def check_bits(config, mesh) -> None:
  """Refuses devices on which a promise of the same bits cannot be kept.

  Raises:
    ConfigError: naming the key and what it has to be.
  """
  if config.strategy.name == 'invariant':
    from anp_jax.parallel import invariant

    devices = mesh_lib.batch_devices(mesh)
    invariant.check(config, devices, mesh_lib.platform(mesh))


def check_batch(config, batch_size: int, mesh) -> int:
  """Refuses a batch that does not divide into whole groups on each device.

  Returns:
    How often a device computes what the step's text has once.

  Raises:
    ConfigError: naming the keys and what would fit.
  """
  devices = parts = mesh_lib.batch_devices(mesh)
  check_bits(config, mesh)
  if config.strategy.name == 'invariant':
    shards = config.strategy.logical_shards
    divisor = f'config.strategy.logical_shards={shards}'
  else:
    if config.strategy.name == 'kernel_split':
      from anp_jax.parallel import channel_split

      channel_split.check(config, mesh)
    divisor = f'{devices} devices'
    if config.strategy.name == 'local' and config.strategy.groups > devices:
      parts = config.strategy.groups
      divisor = f'config.strategy.groups={parts}'
    shards = parts * config.accumulate
    divisor += f' x config.accumulate={config.accumulate}'
  if batch_size % shards:
    raise config_lib.ConfigError(
      f'config.batch_size={batch_size} does not divide by {divisor}'
    )
  micro = batch_size // shards
  has_batch_norm = models.has_batch_norm(config)
  group = config.model.norm_group
  if has_batch_norm and group and micro % group:
    raise config_lib.ConfigError(
      f'config.model.norm_group={group}: a device computes {micro} images at '
      f'a time ({batch_size} / ({divisor})), expected a multiple of {group}'
    )
  at_once = 1 if config.strategy.name == 'invariant' else parts
  if has_batch_norm and not group and shards > at_once:
    raise config_lib.ConfigError(
      'config.model.norm_group=0: statistics of the whole batch need it at '
      f'once, not in {shards // at_once} parts ({divisor})'
    )
  if (config.data.mixup or config.data.cutmix) and micro % 2:
    raise config_lib.ConfigError(
      f'config.data.mixup and cutmix pair images: {micro} images a device and '
      'micro-batch is not an even number'
    )
  return shards // parts


def planned(
  config, mesh, objective, batch_size: int, examples: int, workdir: str,
  processes, training: bool, helpers=(),
):  # fmt: skip
  """What a strategy decides by measuring, before anything is compiled.

  Args:
    config: the run's config.
    mesh: of the run.
    objective: `objective.Objective`.
    batch_size: images a step over all devices.
    examples: images an epoch.
    workdir: of the run, where what was measured is kept.
    processes: `cluster.Processes`; all call it.
    training: whether steps are left to make; else checkpoints are scored.
    helpers: offload devices, see `runtimes.offload.pool`.

  Returns:
    The config to make the run's parts of, and lines for people.
  """
  t = config.strategy
  is_given = t.plan or t.shares
  is_split = t.helpers or mesh.shape[mesh_lib.MODEL] > 1
  if t.name != 'kernel_split' or not is_split:
    return config, []
  if is_given and (training or not t.helpers):
    return config, []
  from anp_jax.parallel.channel_split import plan
  from anp_jax.runtimes.calibration import calibrate

  config = config.copy_and_resolve_references()
  if not training:  # without a gradient, each device may score by itself
    config.strategy.plan, config.strategy.shares = plan.NOTHING, ()
    return config, []
  config.strategy.plan, lines = calibrate.planned(
    config, mesh, objective, batch_size, examples, workdir, processes, helpers
  )
  return config, lines
