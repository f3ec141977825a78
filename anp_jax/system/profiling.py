"""A trace of chosen steps of a run, for TensorBoard or XProf."""

import os

import jax

from anp_jax import config as config_lib
from anp_jax.system import error_lines


class Profile:
  """Records the steps of config.profile.steps into workdir/profile.

  The host waits for the device before the first of them and after the last, so
  the trace has these steps and no other.
  """

  def __init__(self, config, workdir: str, done: int, total: int, note, primary=True):
    """Chooses the steps; notes it if the run makes fewer than the config names.

    Args:
      config: the run's config.
      workdir: of the run.
      done: steps made before this run; those are not recorded.
      total: the step at which the run ends.
      note: called with a line of text for people.
      primary: whether this process records. All run the same program, and
        several on one machine would write one file: so it is one of them.
    """
    window = config_lib.window(config.profile.steps)
    steps = range(max(window.start, done + 1), min(window.stop, total + 1))
    if len(steps) < len(window):
      note(
        f'profile  of {_span(steps)}: config.profile.steps asks for '
        f'{_span(window)}, this run makes {_span(range(done + 1, total + 1))}'
      )
    self._steps = steps if primary else range(0)
    self._folder = os.path.join(workdir, 'profile')
    self._note = note
    self._recorded = None  # the steps in the trace, while it is open

  def step(self, number: int, before) -> jax.profiler.StepTraceAnnotation:
    """The context that step `number` is made in; starts the trace if due.

    Args:
      number: of the step, from 1.
      before: arrays that the step before has computed.
    """
    if self._steps and number == self._steps[0]:
      jax.block_until_ready(before)
      self._start()
    if self._recorded is not None:
      self._recorded = range(self._steps[0], number + 1)
    return jax.profiler.StepTraceAnnotation('train', step_num=number)

  def end(self, number: int, values) -> None:
    """Closes the trace if `number` is its last step; `values` are its own."""
    if self._recorded is not None and number == self._steps[-1]:
      jax.block_until_ready(values)
      self.close()

  def close(self) -> None:
    """Closes the trace if it is open, wherever the run has stopped."""
    if self._recorded is None:
      return
    recorded, self._recorded = self._recorded, None
    try:
      jax.profiler.stop_trace()
    except (RuntimeError, OSError) as e:
      self._failed(e)
      return
    self._note(
      f'profile  of {_span(recorded)} in {self._folder}: pip install xprof, '
      f'then xprof --logdir={self._folder} or TensorBoard'
    )

  def _start(self):
    options = jax.profiler.ProfileOptions()
    # Off: following every Python call slows the very loop that is looked at.
    options.python_tracer_level = 0
    # A run is worth more than its profile.
    try:
      jax.profiler.start_trace(self._folder, profiler_options=options)
      self._recorded = range(0)
    except (RuntimeError, OSError) as e:
      self._failed(e)

  def _failed(self, error):
    self._note(f'profile  failed, the run goes on: {error_lines.first_line(error)}')


def _span(steps):
  """'steps 10 to 14', 'step 3' or 'no step'."""
  if not steps:
    return 'no step'
  first, last = steps[0], steps[-1]
  return f'step {first}' if first == last else f'steps {first} to {last}'
