"""One model's run: what is open around the loop, and what follows a step."""

from collections.abc import Callable, Iterator
import contextlib
import itertools
import os
from typing import Any

import jax

from anp_jax import experiment, recorder as recorder_lib
from anp_jax.checkpoint import manager
from anp_jax.config import saved_run, strategy as strategy_lib, urls
from anp_jax.data.input import feed, stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import delayed_metrics
from anp_jax.runtimes.calibration import training as calibration
from anp_jax.system import compile_cache, device_peaks, mirror, profiling, startup
from anp_jax.training import build, train_step as step_lib


class Run:
  """A run of a workdir, new or resumed.

  Attributes:
    recorder: checkpoints, telemetry and scores.
    profile: `profiling.Profile`, while the run is opened.
    log: `delayed_metrics.TrainingLog`, once the step is compiled.
  """

  _feed: feed.Feed

  def __init__(self, invocation: strategy_lib.Invocation):
    """Opens devices, data, model and checkpoints; nothing is compiled yet.

    Raises:
      ConfigError: if the config fits neither the devices nor the workdir.
    """
    self._timer = startup.StartupTimer(invocation.processes.generation.interruption.at)
    self._timer.end_phase('imports')
    self._starting = contextlib.ExitStack()
    self._processes = invocation.processes
    self._processes.check_shared(invocation.workdir)
    compile_cache.enable(invocation.config)
    self._set_sizes(invocation)
    opened = experiment.open(
      invocation.config,
      invocation.devices,
      invocation.processes.hosts,
      workdir=invocation.workdir,
      offload_devices=invocation.offload_devices,
    )
    evaluation = recorder_lib.claim(opened, invocation.workdir, invocation.processes)
    self._timer.end_phase('devices, data set')
    calibrated, lines = self._calibrate(invocation, opened)
    self.recorder = recorder_lib.Recorder(
      opened, calibrated.program, evaluation, invocation.workdir, invocation.processes
    )
    self._state, more = self._open_state(calibrated)
    self.recorder.open_telemetry([*lines, *more])

  def finish_again(self) -> dict[str, float]:
    """Does what is left of a run whose last step was made before.

    Returns:
      The validation metrics of its last evaluation.
    """
    recorder = self.recorder
    if recorder.owes_evaluation():
      self.evaluate(recorder.start_step, self.take_state())
    recorder.report_restart()
    recorder.close()
    return recorder.finish(recorder.start_step)

  @contextlib.contextmanager
  def opened(self) -> Iterator[None]:
    """The context of the loop, which hears signals and closes the run."""
    recorder = self.recorder
    self.profile = profiling.Profile(
      recorder.experiment.config,
      recorder.workdir,
      recorder.start_step,
      recorder.total_steps,
      recorder.telemetry.log,
      jax.process_index() == 0,
    )
    with self._processes.handling_signals(recorder.checkpoints.expected_save_seconds):
      try:
        yield
      finally:
        self._starting.close()
        self.profile.close()
        self._feed.close()
        recorder.close()

  def take_state(self) -> Any:
    """Returns the TrainState at the start, once, to be donated."""
    state, self._state = self._state, None
    return state

  def compile(self, state: Any) -> tuple[Callable, Iterator[dict]]:
    """Compiles the training step, ahead of its first call.

    Args:
      state: TrainState at the start.

    Returns:
      The compiled step, and the iterator of its device batches.
    """
    recorder, spec = self.recorder, self.recorder.experiment.spec
    # Until the first step has been computed; see `report_startup`.
    self._starting.enter_context(self._pause('compiling', recorder.start_step))
    first = next(self._feed)
    self._timer.end_phase('first batch')
    recorder.telemetry.set_flops(self._flops(state, first))
    self._batch_shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
    )
    compiled = self._compile(state, first)
    source = recorder.experiment.source
    self.log = delayed_metrics.TrainingLog(
      step_lib.metric_names(spec.objective),
      recorder.telemetry,
      delayed_metrics.DamageCounter(spec.config, source.name, spec.batch_size),
      spec.steps(spec.config.log.every),
      recorder.total_steps,
      self._feed,
    )
    return compiled, self._batches(first)

  def replan(self, step: int, train_step: Callable, state: Any) -> Callable:
    """Has the strategy change its plan, where its devices have changed.

    Args:
      step: step that `train_step` has made.
      train_step: compiled training step.
      state: TrainState after the step.

    Returns:
      The compiled training step to continue with, of the same state.
    """
    if self._replanner is None:
      return train_step
    spec, messages = self._replanner.revise(step)
    for line in messages:
      self.recorder.telemetry.log(line)
    if spec is None:
      return train_step
    with self._pause('planning', step):
      jax.block_until_ready(state)
      self.recorder.program = build.create(spec)
      return self._compile(state, self._batch_shapes)

  def report_startup(self) -> None:
    """Says what the start took, once the first step has been computed."""
    telemetry = self.recorder.telemetry
    self._starting.close()
    self._timer.end_phase('compile and first step')
    telemetry.log(self._timer.text())
    telemetry.log_duration('start', self._timer.before('first batch'))
    self.recorder.report_restart()
    if self._processes.is_elastic:
      self._processes.follow(lambda: self.log.step)
    telemetry.start_timing(self.recorder.start_step + 1)

  def save(self, step: int, state: Any) -> None:
    """Saves a TrainState as the newest checkpoint, while training continues."""
    with self._pause('saving', step):
      self.recorder.save(step, state)

  def mirror(self, step: int, state: Any, restarts: bool) -> None:
    """Copies a TrainState to memory, if that is due.

    Args:
      step: steps made.
      state: TrainState.
      restarts: whether all processes restart after this step; then it does not return.
    """
    recorder = self.recorder
    if recorder.mirror is None or step == recorder.total_steps:
      return
    pack = recorder.program.checkpoint_layout.pack
    if not restarts:
      recorder.mirror.keep_if_due(step, lambda: pack(state))
      return
    with self._pause('saving', step):
      recorder.mirror.keep(step, pack(state))
      # A store has no metrics since the last save, without which a copy is not used.
      is_lost = recorder.mirror.wait() != step or urls.is_mirror(recorder.workdir)
      if any(self._processes.gather(is_lost)):
        recorder.save(step, state)
      recorder.checkpoints.wait()
      with contextlib.suppress(mirror.UploadError):  # only metrics are missing there
        mirror.upload(recorder.workdir)
    self._processes.restart()

  def wait_for_saves(self, step: int) -> None:
    """Waits until the checkpoints of steps up to this one are on disk."""
    with self._pause('saving', step):
      self.recorder.checkpoints.wait()

  def evaluate(self, step: int, state: Any) -> dict[str, float]:
    """Scores a step's TrainState, and keeps it if it is among the best."""
    with self._pause('evaluating', step):
      return self.recorder.evaluate(step, state)

  def _set_sizes(self, invocation):
    """Tells over how many processes the batch divides, if the run goes on without some."""
    processes = invocation.processes
    if not processes.is_elastic:
      return
    if processes.generation.sizes:
      processes.set_sizes(processes.generation.sizes)
      return
    sizes = experiment.sizes(invocation.config, invocation.workdir, processes.hosts)
    if sizes:
      processes.set_sizes(sizes)
      if processes.count not in sizes and processes.generation.number:
        processes.restart()  # one was lost before anybody knew the sizes

  def _compile(self, state, batch):
    compiled = self.recorder.program.train_step.lower(state, batch).compile()
    compile_cache.release_memory()
    self._processes.gather('compiled')  # Gloo waits half a minute at most
    return compiled

  def _calibrate(self, invocation, opened):
    """The training and log lines after a calibration, where the strategy has one."""
    folder = os.path.join(invocation.workdir, manager.NEWEST)
    saved = self._processes.gather(saved_run.saved_steps(folder))[0]
    is_training = opened.spec.total_steps > max(saved, default=0)
    calibrated, lines = calibration.calibrated(opened, invocation, is_training)
    self._timer.end_phase('plan')
    self._replanner = strategy_lib.find(opened.config).replanner(calibrated.spec, invocation)
    helpers = [f'offload  {d.name}' for d in invocation.offload_devices]
    return calibrated, [*helpers, *lines]

  def _open_state(self, opened):
    """The state, restored or new, and lines about its weights; begins the stream.

    Args:
      opened: training after the calibration, whose plan says how kernels are kept.
    """
    recorder = self.recorder
    state, lines = recorder.restore(), []
    self._timer.end_phase('model, checkpoint')
    if not recorder.is_finished:  # begun now: it reads ahead
      sharding = mesh_lib.batch_sharding(opened.mesh)
      stream = stream_lib.Stream(opened.config, sharding, self._processes.vote)
      self._feed = stream.train(
        opened.source, opened.spec.batch_size, recorder.start_step, recorder.order
      )
    if state is None:
      try:
        state, lines = opened.new_state(recorder.workdir, self._processes.gather)
      except BaseException:
        self._feed.close()
        raise
    self._timer.end_phase('state')
    return state, lines

  def _batches(self, batch):
    """The first batch, then those after it, each with signs of life."""
    yield batch
    for step in itertools.count(self.recorder.start_step + 2):
      self._processes.heartbeat('input', step)
      del batch  # its memory is free while the next one is awaited
      batch = next(self._feed)
      self._processes.heartbeat('step', step)
      yield batch

  @contextlib.contextmanager
  def _pause(self, activity, step):
    """A time in which no step is made: it counts for no rate."""
    self._processes.heartbeat(activity, step)
    with self.recorder.telemetry.paused(activity):
      yield

  def _flops(self, state, batch):
    """Operations of a step on all devices; 0 where no peak is known."""
    opened = self.recorder.experiment
    kind = opened.mesh.devices.flat[0].device_kind
    if not device_peaks.peak_flops(kind, opened.config.model.dtype):
      return 0.0
    return self.recorder.program.flops(state, batch)
