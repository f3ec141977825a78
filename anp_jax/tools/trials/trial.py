"""The parts of a trial: a step, a new state and the input."""

from anp_jax import experiment
from anp_jax.config import strategy as strategy_lib
from anp_jax.data.sources import agreement
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes.calibration import training as calibration
from anp_jax.system import interrupts


class Trial:
  """The training of a run, as far as it is the same in each step.

  Attributes:
    config: config of the run, with its batch size.
    mesh: mesh of the run.
    source: source of the training examples.
    program: `build.ModelAndSteps`.
    open_feed: function that opens the run's batches from its first step on, to be closed.
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
    self._processes = invocation.processes
    self._experiment, lines = calibration.calibrated(opened, invocation)
    self._show(lines)
    self.config, self.mesh, self.source = opened.config, opened.mesh, opened.source
    self.program, self.open_feed = self._experiment.program, self._experiment.batches

  def new_state(self) -> state_lib.TrainState:
    """Returns the first state of the run.

    Raises:
      ConfigError: if the weights of config.init do not fit.
    """
    state, lines = self._experiment.new_state(gather=self._processes.gather)
    self._show(lines)
    return state

  def _show(self, lines):
    if self._processes.index == 0:
      print(''.join(f'{line}\n' for line in lines), end='')
