"""The parts of a trial: a step, a new state and the input."""

from anp_jax import experiment
from anp_jax.config import strategy as strategy_lib
from anp_jax.data.sources import agreement
from anp_jax.parallel import state as state_lib
from anp_jax.parallel.sync import sync_strategy
from anp_jax.system import interrupts


class Trial:
  """The training of a run, as far as it is the same in each step.

  Attributes:
    config: config of the run, with its batch size.
    mesh: mesh of the run.
    source: source of the training examples.
    program: `build.ModelAndSteps`.
    open_feed: function that opens the run's batches from its first step on, to be closed.
    messages: lines for people about what had to be measured first.
  """

  def __init__(self, invocation: strategy_lib.Invocation):
    """Opens devices and data, and builds the step; nothing is compiled yet.

    Raises:
      ConfigError: if the config does not fit the devices.
    """
    interrupts.set_line('interrupted; nothing was written')
    opened = experiment.open(
      invocation.config,
      invocation.devices,
      invocation.processes.hosts,
      workdir=invocation.workdir,
      offload_devices=invocation.offload_devices,
    )
    agreement.check(invocation.processes, training=opened.source)
    strategy = strategy_lib.find(invocation.config)
    chosen, self.messages = strategy.calibrate(opened.spec, invocation, True)
    self._processes = invocation.processes
    self._experiment = opened.with_config(chosen)
    if chosen.strategy.get('rows') == sync_strategy.MEASURED:
      from anp_jax.runtimes.calibration import row_speeds  # imports SciPy, which takes a second

      self._experiment, lines = row_speeds.with_measured_rows(
        self._experiment, invocation.workdir, invocation.processes
      )
      self.messages = [*self.messages, *lines]
    self.config, self.mesh, self.source = opened.config, opened.mesh, opened.source
    self.program, self.open_feed = self._experiment.program, self._experiment.batches

  def new_state(self) -> state_lib.TrainState:
    """Returns the first state of the run.

    Raises:
      ConfigError: if the weights of config.init do not fit.
    """
    state, messages = self._experiment.new_state(gather=self._processes.gather)
    self.messages = [*self.messages, *messages]
    return state
