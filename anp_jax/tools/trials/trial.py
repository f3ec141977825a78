"""What a trial makes of a config: a step, a new state and the input."""

import dataclasses

from anp_jax.checkpoint import run_dir
from anp_jax.checkpoint.weights import initial
from anp_jax.config import strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.data.input import feed, stream
from anp_jax.data.sources import agreement, balance
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.system import interrupts
from anp_jax.training import build, objective as objective_lib, run_spec


class Trial:
  """The training of a run, as far as it is the same in each step.

  Attributes:
    config: of the run, with its batch size.
    mesh: of the run.
    source: of the training examples.
    program: `build.Program`.
    messages: lines for people, of what had to be measured first.
  """

  def __init__(self, job: strategy_lib.Job):
    """Opens devices and data, and builds the step; nothing is compiled yet.

    Raises:
      ConfigError: if the config does not fit the devices.
    """
    interrupts.set_line('interrupted; nothing was written')
    self._processes = job.processes
    self.mesh = mesh_lib.create(job.config, job.devices, job.processes.hosts)
    self.config = config = run_dir.with_batch_size(
      job.config, job.workdir, mesh_lib.batch_devices(self.mesh)
    )
    division.check(config, config.batch_size, self.mesh)
    self.source = sources.open_source(config, training=True)
    agreement.check(job.processes, training=self.source)
    objective = objective_lib.create(
      self.source.vocabulary, config, balance.class_weights(config, self.source)
    )
    spec = run_spec.RunSpec(
      config, self.mesh, objective, config.batch_size, len(self.source), job.offload_devices
    )
    chosen, self.messages = strategy_lib.find(config).calibrate(spec, job, True)
    self.program = build.create(dataclasses.replace(spec, config=chosen))

  def new_state(self) -> state_lib.TrainState:
    """Returns the state that the run would begin with.

    Raises:
      ConfigError: if what config.init names does not fit.
    """
    weights, messages = initial.load(
      self.config, self.program, self.source.vocabulary, gather=self._processes.gather
    )
    self.messages = [*self.messages, *messages]
    return state_lib.create(self.program.init_fn, self.program.abstract_state, weights)

  def open_feed(self) -> feed.Feed:
    """Returns the run's batches from its first step on, to be closed."""
    sharding = mesh_lib.batch_sharding(self.mesh)
    return stream.Stream(self.config, sharding).train(self.source, self.config.batch_size, 0)
