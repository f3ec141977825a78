"""One training of an ensemble: an ordinary run of its workdir, whose steps a lane makes."""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import time
from typing import Any

from absl import logging
from ml_collections import ConfigDict
import numpy as np

from anp_jax import cluster, experiment, recorder as recorder_lib
from anp_jax.data import sources
from anp_jax.ensemble import device_examples
from anp_jax.reporting import delayed_metrics
from anp_jax.training import train_step

LOG = 'log.txt'  # in a member's workdir: what its run alone would print


class Member:
  """A run that is opened.

  Attributes:
    config: config of its run alone.
    recorder: checkpoints, telemetry and scores.
    error: reason why it ended before the last step; ''.
    wait_seconds: seconds that the host has drawn its batches; an accelerator computes meanwhile.
  """

  def __init__(
    self,
    shared: experiment.Experiment,
    config: ConfigDict,
    workdir: str,
    evaluation: sources.Source,
    processes: cluster.Processes,
  ):
    """Makes the workdir this run's, and restores its newest checkpoint.

    Args:
      shared: training of any member on the same device.
      config: config of the run.
      workdir: folder of the run.
      evaluation: validation examples.
      processes: this process.

    Raises:
      ConfigError: if the workdir belongs to another run.
    """
    objective = dataclasses.replace(shared.spec.objective, smoothing=config.label_smoothing)
    spec = dataclasses.replace(shared.spec, config=config, objective=objective)
    opened = dataclasses.replace(shared, spec=spec)
    self.config, self.error, self.wait_seconds = config, '', 0.0
    self._processes = processes
    recorder_lib.claim(opened, workdir, processes, evaluation)
    self._output = open(os.path.join(workdir, LOG), 'a')
    with self._quiet():
      self.recorder = recorder_lib.Recorder(opened, shared.program, evaluation, workdir, processes)
      state, lines = self.recorder.restore(), list[str]()
      if state is None:
        state, lines = opened.new_state(workdir)
      self.recorder.open_telemetry(lines)
      if self.recorder.owes_evaluation():
        self.recorder.evaluate(self.step, state)
    self._state: Any = state
    self._drawing = device_examples.Drawing(config, shared.source, self.recorder.order)
    self._log = delayed_metrics.TrainingLog(
      train_step.metric_names(objective),
      self.recorder.telemetry,
      delayed_metrics.DamageCounter(config, shared.source.name, spec.batch_size),
      spec.steps(config.log.every),
      spec.total_steps,
      self,
    )

  @property
  def step(self) -> int:
    """The step that its run begins from."""
    return self.recorder.start_step

  def take_state(self) -> Any:
    """Returns the TrainState at the start, once, to be donated."""
    state, self._state = self._state, None
    return state

  def draw(self, start: int, count: int) -> device_examples.Draws:
    """Returns the choices of steps from `start` on; see `device_examples.Drawing.steps`."""
    begin = time.monotonic()
    draws = self._drawing.steps(start, count)
    self.wait_seconds += time.monotonic() - begin
    return draws

  @contextlib.contextmanager
  def _quiet(self) -> Iterator[None]:
    """A context whose prints go to the member's own log."""
    with contextlib.redirect_stdout(self._output):
      yield
    self._output.flush()

  def record(self, first: int, values: np.ndarray) -> None:
    """Records the values (steps, values) of its steps from `first` on."""
    if self.error:
      return
    try:
      with self._quiet():
        for step, row in enumerate(values, first):
          self._log.push(step, row)
        self._log.flush()
    except cluster.RunFailedError as e:
      self.error = str(e)
      logging.warning('%s ends: %s', self.recorder.workdir, e)
      self._close()

  def save(self, step: int, state: Any) -> None:
    """Saves a TrainState, and scores it if that is due."""
    recorder = self.recorder
    self._processes.heartbeat('saving', step)
    with self._quiet():
      with recorder.telemetry.paused('saving'):
        recorder.save(step, state)
      if recorder.evaluates_at(step):
        with recorder.telemetry.paused('evaluating'):
          recorder.evaluate(step, state)

  def finish(self, step: int, vote: int) -> dict[str, float]:
    """Closes the run and writes its result, or why it stopped; returns its scores.

    Its page, which takes a second, is written when an ordinary command ends it again.
    """
    scores = {}
    if not self.error:
      self._close()
      with self._quiet():
        scores = self.recorder.finish(step, vote, has_page=False)
    self._output.close()
    return scores

  def _close(self):
    with self._quiet():
      self.recorder.close()
