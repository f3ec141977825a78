"""What every process of the strategy derives alike from the config."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import ml_collections
import numpy as np
import optax

from anp_jax import config as config_lib, experiment
from anp_jax.data.input import feed as feed_lib, stream
from anp_jax.parallel import division, mesh as mesh_lib
from anp_jax.runtimes.parameter_server import (
  gradient,
  layout as layout_lib,
  look_ahead,
  slice_optimizer,
)
from anp_jax.training import optimizer


@dataclasses.dataclass(frozen=True)
class Setup(experiment.Experiment):
  """The experiment of a process, and how its weights are cut and updated.

  Attributes:
    ahead: how far workers look ahead.
  """

  ahead: look_ahead.Settings

  @property
  def schedule(self) -> optax.Schedule:
    """Update to learning rate."""
    return self.program.training.schedule

  @functools.cached_property
  def layout(self) -> layout_lib.Layout:
    """The layout of the weights.

    Raises:
      ConfigError: if there are too few for the servers.
    """
    return layout_lib.Layout(self.config, self.program.abstract_state)

  @functools.cached_property
  def optimizers(self) -> list[slice_optimizer.SliceOptimizer]:
    """The optimizer of each server."""
    config, spec = self.config, self.spec
    if self.ahead.method != 'none':  # which makes Nesterov's step itself
      config = config_lib.replaced(config, {'optimizer.name': 'momentum'})
    chain = optimizer.create(
      config, spec.batch_size, spec.examples, spec.total_steps, whole_leaves=False
    )
    ahead = look_ahead.LookAhead(self.ahead, self.config, chain, self.schedule)
    return [
      slice_optimizer.SliceOptimizer(self.config, ahead, self.layout, index)
      for index in range(self.config.strategy.servers)
    ]

  def gradient_program(self, data_shards: int) -> gradient.GradientProgram:
    """Returns the compiled gradient of one of `data_shards` parts of a batch.

    Raises:
      ConfigError: if that does not divide over this process's devices.
    """
    size = self.spec.batch_size // data_shards
    division.check(self.config, size, self.mesh)
    return gradient.GradientProgram(self.config, self.program, self.layout, self.mesh, size)

  def feed(
    self, ticket: Callable[[int], tuple[int, int] | None], data_shards: int
  ) -> feed_lib.Feed:
    """Returns the batches of tickets; see `stream.Stream.tickets`.

    Args:
      ticket: count of a batch -> its ticket; None after the last one, where any
        batch will do, since nobody uses it.
      data_shards: parts of a batch; a ticket names one of them.
    """
    size = self.spec.batch_size
    rows = np.arange(size).reshape(data_shards, -1)

    def step_and_rows(count):
      step, shard = ticket(count) or (0, 0)
      return step, rows[shard]

    batches = stream.Stream(self.config, mesh_lib.batch_sharding(self.mesh))
    return batches.tickets(self.source, size, size // data_shards, step_and_rows)


def create(config: ml_collections.ConfigDict, ahead: look_ahead.Settings) -> Setup:
  """Returns the setup; nothing is compiled and no array made yet.

  Args:
    config: the run's config, with its batch size.
    ahead: how far workers look ahead, see `look_ahead.settings`.

  Raises:
    ConfigError: for what a config alone does not show.
  """
  opened = experiment.open(config, jax.local_devices(), divides_batch=False)
  return Setup(opened.spec, opened.source, ahead)
