"""What every process of the strategy makes alike from the config."""

from collections.abc import Callable
import dataclasses

import jax
import numpy as np

from anp_jax import config as config_lib, experiment
from anp_jax.checkpoint.weights import initial
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import agreement
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.runtimes.parameter_server import (
  gradient as gradient_lib,
  layout as layout_lib,
  look_ahead as look_ahead_lib,
  slice_optimizer,
)
from anp_jax.training import build, objective as objective_lib, optimizer as optimizer_lib


@dataclasses.dataclass(frozen=True)
class Setup:
  """What a process trains and serves with.

  Attributes:
    config: the run's config.
    mesh: of this process's own devices.
    source: of the training examples.
    objective: `objective.Objective`.
    program: `build.ModelAndSteps` over the mesh.
    layout: `layout.Layout` of the weights.
    ahead: how far workers look ahead.
    optimizers: `slice_optimizer.SliceOptimizer` of each server.
    schedule: update to learning rate.
  """

  config: object
  mesh: jax.sharding.Mesh
  source: sources.Source
  objective: objective_lib.Objective
  program: build.ModelAndSteps
  layout: layout_lib.Layout
  ahead: look_ahead_lib.Settings
  optimizers: list[slice_optimizer.SliceOptimizer]
  schedule: object

  @property
  def total(self) -> int:
    """Updates of the whole run."""
    return self.program.spec.total_steps

  def every(self, name: str) -> int:
    """Returns the updates between two of 'log', 'eval' or 'checkpoint'."""
    config = self.config
    return config_lib.steps(config[name].every, config.batch_size, len(self.source))

  def initial_state(self, folder: str = ''):
    """Returns a new state, and lines about the weights that it begins with.

    Args:
      folder: see `weights.initial.load`.

    Raises:
      ConfigError: if what config.init names does not fit.
    """
    program = self.program
    weights, lines = initial.load(self.config, program, self.source.vocabulary, folder)
    return state_lib.create(program.init_fn, program.abstract_state, weights), lines

  def data_description(self) -> dict:
    """Returns what all processes' training data must agree in."""
    return agreement.describe(self.source)

  def gradient_program(self, data_shards: int) -> gradient_lib.GradientProgram:
    """Returns the compiled gradient of one of `data_shards` parts of a batch.

    Raises:
      ConfigError: if that does not divide over this process's devices.
    """
    size = self.config.batch_size // data_shards
    division.check(self.config, size, self.mesh)
    return gradient_lib.GradientProgram(self.config, self.program, self.layout, self.mesh, size)

  def stream(self) -> stream_lib.Stream:
    """Returns the device batches for this process."""
    return stream_lib.Stream(self.config, mesh_lib.batch_sharding(self.mesh))

  def feed(self, ticket: Callable, data_shards: int):
    """Returns the batches of tickets; see `stream.Stream.tickets`.

    Args:
      ticket: count of a batch -> its ticket; None after the last one, where any
        batch will do, since nobody uses it.
      data_shards: parts of a batch; a ticket names one of them.
    """
    size = self.config.batch_size
    rows = np.arange(size).reshape(data_shards, -1)

    def step_and_rows(count):
      step, shard = ticket(count) or (0, 0)
      return step, rows[shard]

    return self.stream().tickets(self.source, size, size // data_shards, step_and_rows)


def create(config, ahead: look_ahead_lib.Settings) -> Setup:
  """Returns the setup; nothing is compiled and no array made yet.

  Args:
    config: the run's config, with its batch size.
    ahead: how far workers look ahead, see `look_ahead.settings`.

  Raises:
    ConfigError: for what a config alone does not show.
  """
  if config.strategy.simulate.workers:
    # No bit depends on the number of servers, so those simulated are one.
    config = config_lib.replaced(config, {'strategy.servers': 1})
  opened = experiment.open(config, jax.local_devices(), divides_batch=False)
  spec, program = opened.spec, opened.program
  size, examples = spec.batch_size, spec.examples
  layout = layout_lib.Layout(config, program.abstract_state)
  schedule = optimizer_lib.schedule(config, size, examples, spec.total_steps)
  chained = config
  if ahead.method != 'none':  # which makes Nesterov's step itself
    chained = config_lib.replaced(config, {'optimizer.name': 'momentum'})
  chain = optimizer_lib.create(chained, size, examples, spec.total_steps, whole_leaves=False)
  look_ahead = look_ahead_lib.LookAhead(ahead, config, chain, schedule)
  return Setup(
    config=config,
    mesh=opened.mesh,
    source=opened.source,
    objective=spec.objective,
    program=program,
    layout=layout,
    ahead=ahead,
    optimizers=[
      slice_optimizer.SliceOptimizer(config, look_ahead, layout, index)
      for index in range(config.strategy.servers)
    ],
    schedule=schedule,
  )
