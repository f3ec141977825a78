"""A trace of some steps of a run, for TensorBoard or XProf."""

from collections.abc import Callable
import os
from typing import Any

import jax
import ml_collections

from anp_jax import config as config_lib
from anp_jax.system import error_lines


class Profile:
  """Records the steps of config.profile.steps into workdir/profile.

  The host waits for the device before the first of them and after the last, so
  the trace has these steps and no other.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    workdir: str,
    done: int,
    total: int,
    log: Callable[[str], None],
    primary: bool = True,
  ):
    """Chooses the steps, and logs if the run has fewer than the config names.

    Args:
      config: resolved config.
      workdir: run folder.
      done: steps before this run, which are not recorded.
      total: last step of the run.
      log: function that logs a line.
      primary: whether this process records. All processes run the same program,
        and several on one machine would write the same file.
    """
    window = config_lib.window(config.profile.steps)
    steps = range(max(window.start, done + 1), min(window.stop, total + 1))
    if len(steps) < len(window):
      log(
        f'profile  of {_span(steps)}: config.profile.steps asks for '
        f'{_span(window)}, this run has {_span(range(done + 1, total + 1))}'
      )
    self._steps = steps if primary else range(0)
    self._folder = os.path.join(workdir, 'profile')
    self._log = log
    self._recorded: range | None = None  # the steps in the open trace

  def step(self, number: int, before: Any) -> jax.profiler.StepTraceAnnotation:
    """Returns the context of a step, and starts the trace if due.

    Args:
      number: number of the step, from 1.
      before: pytree of arrays that the previous step computed.
    """
    if self._steps and number == self._steps[0]:
      jax.block_until_ready(before)
      self._start()
    if self._recorded is not None:
      self._recorded = range(self._steps[0], number + 1)
    return jax.profiler.StepTraceAnnotation('train', step_num=number)

  def end(self, number: int, values: Any) -> None:
    """Closes the trace if `number` is its last step, which computed `values`."""
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
    self._log(
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
    self._log(f'profile  failed, the run continues: {error_lines.first_line(error)}')


def _span(steps):
  """'steps 10 to 14', 'step 3' or 'no step'."""
  if not steps:
    return 'no step'
  first, last = steps[0], steps[-1]
  return f'step {first}' if first == last else f'steps {first} to {last}'
