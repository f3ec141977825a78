"""What every process of the strategy makes alike from the config."""

import dataclasses

import jax

from anp_jax.checkpoint.weights import initial
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import balance
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.parallel import strategies
from anp_jax.runtimes.server import gradient as gradient_lib
from anp_jax.runtimes.server import layout
from anp_jax.runtimes.server import shard as shard_lib
from anp_jax.training import build
from anp_jax.training import objective as objective_lib
from anp_jax.training import optimizer as optimizer_lib


@dataclasses.dataclass(frozen=True)
class Setup:
  """A process's share in a run.

  Attributes:
    config: the run's config.
    mesh: of this process's own devices.
    source: of the training examples.
    objective: `objective.Objective`.
    parts: `assembly.Assembly` over the mesh.
    flats: (params, stats) as `layout.Flat`.
    slices: of the weights, by server.
    shards: `shard.Shard` of each server.
    schedule: update to learning rate.
  """

  config: object
  mesh: jax.sharding.Mesh
  source: sources.Source
  objective: objective_lib.Objective
  parts: build.Assembly
  flats: tuple[layout.Flat, layout.Flat]
  slices: list[layout.Slice]
  shards: list[shard_lib.Shard]
  schedule: object

  def start(self, folder: str = ''):
    """A new state, and lines about the weights that it begins with.

    Args:
      folder: see `weights.initial.load`.

    Raises:
      ConfigError: if what config.init names does not fit.
    """
    parts = self.parts
    given, lines = initial.load(
      self.config, parts, self.objective, self.source.vocabulary, folder
    )
    return state_lib.create(parts.init, parts.like, given), lines

  def program(self, shards: int) -> gradient_lib.Program:
    """The compiled gradient of one of `shards` parts of a batch.

    Raises:
      ConfigError: if that does not divide over this process's devices.
    """
    size = self.config.batch_size // shards
    strategies.check_batch(self.config, size, self.mesh)
    return gradient_lib.Program(
      self.config, self.parts, self.flats, self.mesh, size
    )

  def stream(self) -> stream_lib.Stream:
    """Device batches for this process."""
    return stream_lib.Stream(self.config, mesh_lib.batch_sharding(self.mesh))

  def feed(self, where, shards: int):
    """Batches by ticket; see `stream.Stream.tickets`."""
    size = self.config.batch_size
    return self.stream().tickets(self.source, size, size // shards, where)


def create(config, ahead: float) -> Setup:
  """Puts it together; nothing is compiled and no array made yet.

  Args:
    config: the run's config, with its batch size.
    ahead: see `desk.ahead`.

  Raises:
    ConfigError: for what a config alone does not show.
  """
  source = sources.open_source(config, training=True)
  mesh = mesh_lib.create(config, jax.local_devices())
  objective = objective_lib.create(
    source.vocabulary, config, balance.class_weights(config, source)
  )
  size, examples = config.batch_size, len(source)
  parts = build.create(config, mesh, objective, size, examples)
  dtype = config.model.param_dtype
  flats = (
    layout.Flat(parts.like.params, dtype),
    layout.Flat(parts.like.stats, dtype),
  )
  slices = flats[0].slices(config.strategy.servers)
  optimizer = optimizer_lib.create(
    config, size, examples, parts.total, whole=False
  )
  return Setup(
    config=config,
    mesh=mesh,
    source=source,
    objective=objective,
    parts=parts,
    flats=flats,
    slices=slices,
    shards=[
      shard_lib.Shard(config, optimizer, flats, part, not i, ahead)
      for i, part in enumerate(slices)
    ],
    schedule=optimizer_lib.schedule(config, size, examples, parts.total),
  )
