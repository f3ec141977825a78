"""One model's run: what is open around the loop, and what follows a step."""

from collections.abc import Iterator
import contextlib
import itertools
import os

import jax

from anp_jax import config as config_lib, experiment
from anp_jax.checkpoint import manager, run_dir
from anp_jax.checkpoint.weights import initial
from anp_jax.cluster import preemption
from anp_jax.config import strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import agreement
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.reporting import delayed_metrics, run_page, summary, telemetry as telemetry_lib
from anp_jax.reporting.analysis import analysis_run as analysis
from anp_jax.system import compile_cache, device_peaks, flops, mirror, profiling, startup
from anp_jax.training import build, eval_loop, train_step as step_lib


class Run:
  """A run of a workdir, new or resumed.

  Attributes:
    start_step: updates that the state has had.
    total_steps: of the whole run.
    owes_evaluation: whether the run was stopped before, or in, the evaluation
      of its `start_step`.
    profile: `profiling.Profile`, while the run is opened.
    log: `delayed_metrics.TrainingLog`, once the step is compiled.
  """

  def __init__(self, invocation: strategy_lib.Invocation):
    """Opens devices, data, model and checkpoints; nothing is compiled yet.

    Raises:
      ConfigError: if the config fits neither the devices nor the workdir.
    """
    self._timer = startup.StartupTimer()
    self._timer.end_phase('imports')
    self._starting = contextlib.ExitStack()
    self._processes, self._workdir = invocation.processes, invocation.workdir
    self._processes.check_shared(invocation.workdir)
    compile_cache.enable(invocation.config)
    self._experiment = opened = experiment.open(
      invocation.config,
      invocation.devices,
      invocation.processes.hosts,
      workdir=invocation.workdir,
      offload_devices=invocation.offload_devices,
    )
    self._spec = spec = opened.spec
    config = self._config = opened.config
    self._mesh = opened.mesh
    self.total_steps = spec.total_steps
    self._open_data()
    self._eval_steps = spec.steps(config.eval.every)
    self._checkpoint_steps = spec.steps(config.checkpoint.every)
    messages = self._build(invocation)
    self.start_step, self._state, more = self._open_state()
    self._open_telemetry([*messages, *more])
    self.owes_evaluation = (
      self.start_step > 0
      and self.evaluates_at(self.start_step)
      and not self._processes.gather(summary.is_scored(self._workdir, self.start_step))[0]
    )

  @property
  def is_finished(self) -> bool:
    """Whether the run has no step left to make."""
    return self.start_step >= self.total_steps

  def finish_again(self) -> dict:
    """Does what is left of a run whose last step was made before.

    Returns:
      The validation metrics of its last evaluation.
    """
    if self.owes_evaluation:
      self.evaluate(self.start_step, self.take_state())
      self._checkpoints.wait()
    self._telemetry.log(
      f'{self._workdir} is finished: step {self.start_step} of '
      f'{self.total_steps}; for more, set a longer config.duration or another '
      '--workdir'
    )
    self._telemetry.close()
    self._checkpoints.close()
    # Stopped between the last save and the report.
    if not run_page.exists(self._workdir) and jax.process_index() == 0:
      self._report()
    return summary.last_scores(self._workdir)

  @contextlib.contextmanager
  def opened(self) -> Iterator[None]:
    """The context of the loop, which hears signals and closes the run."""
    if self.start_step:
      self._telemetry.log(f'continuing from step {self.start_step} of {self.total_steps}')
    self.profile = profiling.Profile(
      self._config,
      self._workdir,
      self.start_step,
      self.total_steps,
      self._telemetry.log,
      jax.process_index() == 0,
    )
    with self._processes.handling_signals(self._checkpoints.expected_save_seconds):
      try:
        yield
      finally:
        self._starting.close()
        self.profile.close()
        self._feed.close()
        self._telemetry.close()
        self._checkpoints.close()

  def take_state(self):
    """The state at `start_step`; it is handed out once, to be donated."""
    state, self._state = self._state, None
    return state

  def compile(self, state):
    """Compiles the training step, ahead of its first call.

    Returns:
      The compiled step, and the iterator of its device batches.
    """
    # Until the first step has been computed; see `report_startup`.
    self._starting.enter_context(self._pause('compiling', self.start_step))
    first = next(self._feed)
    self._timer.end_phase('first batch')
    self._telemetry.set_flops(self._flops(state, first))
    self._batch_shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first
    )
    compiled = self._compile(state, first)
    spec, source = self._spec, self._train_source
    self.log = delayed_metrics.TrainingLog(
      step_lib.metric_names(spec.objective),
      self._telemetry,
      delayed_metrics.DamageCounter(self._config, source.name, spec.batch_size),
      spec.steps(self._config.log.every),
      self.total_steps,
      self._feed,
    )
    return compiled, self._batches(first)

  def replan(self, step: int, train_step, state):
    """Has the strategy change its plan, where its devices have changed.

    Args:
      step: that `train_step` has made of the state.
      train_step: compiled.
      state: after the step.

    Returns:
      The training step that goes on, compiled, and the state that it takes.
    """
    if self._replanner is None or not self._replanner.is_due(step):
      return train_step, state
    with self._pause('planning', step):
      jax.block_until_ready(state)
      spec, messages = self._replanner.revise(step)
      for line in messages:
        self._telemetry.log(line)
      if spec is not None:
        before, self._program = self._program, build.create(spec)
        state = self._program.saved_form.to_run(before.saved_form.of_run(state))
        train_step = self._compile(state, self._batch_shapes)
    return train_step, state

  def report_startup(self) -> None:
    """Says what the start took, once the first step has been computed."""
    self._starting.close()
    self._timer.end_phase('compile and first step')
    self._telemetry.log(self._timer.text())
    self._telemetry.log_duration('start', self._timer.before('first batch'))
    self._telemetry.start_timing(self.start_step + 1)

  def evaluates_at(self, step: int) -> bool:
    """Whether an evaluation is due after a step."""
    return step % self._eval_steps == 0 or step == self.total_steps

  def saves_at(self, step: int) -> bool:
    """Whether a checkpoint is due after a step; before each evaluation too."""
    return self.evaluates_at(step) or step % self._checkpoint_steps == 0

  def save(self, step: int, state) -> None:
    """Saves the newest checkpoint, while training goes on."""
    with self._pause('saving', step):
      self._checkpoints.save(step, self._program.saved_form.of_run(state))
      mirror.begin_upload(self._workdir)

  def wait_for_saves(self, step: int) -> None:
    """Waits until the checkpoints of steps up to this one are on disk."""
    with self._pause('saving', step):
      self._checkpoints.wait()

  def evaluate(self, step: int, state) -> dict:
    """Evaluates a step's state, and keeps it if it is among the best."""
    with self._pause('evaluating', step):
      scores = self._scores(step, state)
    self._telemetry.evaluation(step, scores)
    saved = self._program.saved_form.of_run(state)
    self._checkpoints.save_best(step, saved, scores)
    return scores

  def finish(self, step: int, vote: int) -> None:
    """Writes the report after the last step, or why the run stopped before."""
    if jax.process_index():
      return
    if step == self.total_steps:
      self._report()
      return
    run_dir.mark_stopped(self._workdir, step, self.total_steps, preemption.REASONS[vote])
    print(f'stopped at step {step} of {self.total_steps}; run the same command to resume')

  def _compile(self, state, batch):
    compiled = self._program.train_step.lower(state, batch).compile()
    compile_cache.release_memory()
    self._processes.gather('compiled')  # Gloo waits half a minute at most
    return compiled

  def _open_data(self):
    """Opens the validation split, and makes the workdir this run's."""
    config, objective = self._config, self._spec.objective
    train = self._train_source = self._experiment.source
    evaluation = self._eval_source = sources.open_source(config, training=False)
    if train.vocabulary.names != evaluation.vocabulary.names:
      raise config_lib.ConfigError(
        f'{train.name} and {evaluation.name} have different classes: '
        f'{len(train.vocabulary)} and {len(evaluation.vocabulary)}'
      )
    agreement.check(self._processes, training=train, evaluation=evaluation)
    self._timer.end_phase('devices, data set')
    if config.checkpoint.keep_best:
      manager.check_best_metric(config, objective.metric_names)
    run_dir.open_or_refuse(self._workdir, config, train.vocabulary)
    run_dir.record_class_sizes(self._workdir, train)

  def _build(self, invocation):
    """Builds the steps, after a calibration where the strategy has one."""
    folder = os.path.join(self._workdir, manager.NEWEST)
    saved = self._processes.gather(manager.saved_steps(folder))[0]
    strategy = strategy_lib.find(self._config)
    config, messages = strategy.calibrate(
      self._spec, invocation, self.total_steps > max(saved, default=0)
    )
    self._timer.end_phase('plan')
    calibrated = self._experiment.with_config(config)
    self._program = calibrated.program
    self._replanner = strategy.replanner(calibrated.spec, invocation)
    helpers = [f'offload  {d.name}' for d in invocation.offload_devices]
    return [*helpers, *messages]

  def _open_state(self):
    """The state, restored or new, and the data stream that begins there.

    Returns:
      Its step, the state, and lines about the weights that it begins with.
    """
    program = self._program
    self._checkpoints = manager.Checkpoints(
      self._workdir,
      self._config,
      sources.fingerprint(self._train_source),
      program.saved_form.abstract,
      self._processes.gather,
    )
    restored = self._checkpoints.restore()
    state, step = restored or (None, 0)
    if restored:
      state = program.saved_form.to_run(state)
    weights, messages = (
      ({}, [])
      if restored
      else initial.load(
        self._config, program, self._train_source.vocabulary, self._workdir, self._processes.gather
      )
    )
    self._timer.end_phase('model, checkpoint')
    sharding = mesh_lib.batch_sharding(self._mesh)
    self._stream = stream_lib.Stream(self._config, sharding, self._processes.vote)
    if step < self.total_steps:  # begun now: it reads ahead
      self._feed = self._stream.train(self._train_source, self._spec.batch_size, step)
    if not restored:
      state = state_lib.create(program.init_fn, program.abstract_state, weights)
    self._timer.end_phase('state')
    return step, state, messages

  def _open_telemetry(self, messages):
    """Opens the run's records, and says what the run is."""
    self._telemetry = summary.telemetry(
      self._config,
      self._workdir,
      self._mesh,
      telemetry_lib.RunLength(
        self.total_steps, self._spec.batch_size, self._spec.examples, self.start_step
      ),
    )
    self._telemetry.log(f'workdir  {self._workdir}')
    summary.log_run_info(
      self._telemetry,
      self._config,
      self._mesh,
      self._program.abstract_single,
      (self._train_source, self._eval_source),
      run_dir.class_sizes(self._workdir, len(self._train_source.vocabulary)),
    )
    clock = strategy_lib.find(self._config).simulated_clock(self._spec)
    if clock:
      self._telemetry.simulate(clock.seconds)
      messages = [*messages, f'workers  {clock.describe()}']
    for line in messages:
      self._telemetry.log(line)
    if not self.is_finished:  # else the line of the result would not be last
      summary.log_changes(self._telemetry, self._checkpoints, self._program)

  def _batches(self, batch):
    """The first batch, then those after it, each with signs of life."""
    yield batch
    for step in itertools.count(self.start_step + 2):
      self._processes.heartbeat('input', step)
      del batch  # its memory is free while the next one is awaited
      batch = next(self._feed)
      self._processes.heartbeat('step', step)
      yield batch

  def _scores(self, step, state):
    """The metrics of an evaluation; the run's last one writes its folder."""
    batches = self._processes.heartbeat_each(
      self._stream.evaluation(self._eval_source), 'evaluating', step
    )
    state = self._program.eval_state_fn(state)
    if step < self.total_steps or not self._config.eval.examples:
      scores = eval_loop.run(self._program.eval_step, state, batches)
      eval_loop.check_damage(self._config, self._eval_source, scores)
      return scores
    subject = analysis.Subject(self._config, self._workdir, self._program, self._eval_source, step)
    return analysis.of_training(subject, state, batches)

  @contextlib.contextmanager
  def _pause(self, activity, step):
    """A time in which no step is made: it counts for no rate."""
    self._processes.heartbeat(activity, step)
    with self._telemetry.paused(activity):
      yield

  def _flops(self, state, batch):
    """Operations of a step on all devices; 0 where no peak is known."""
    kind = self._mesh.devices.flat[0].device_kind
    if not device_peaks.peak_flops(kind, self._config.model.dtype):
      return 0.0
    # Shapes, and so the count, are those of one device. Of a split layer, each
    # device takes another branch: a batch costs all branches together.
    count = flops.count_call(self._program.train_step, state, batch, branches=sum)
    return float(count * mesh_lib.batch_devices(self._mesh))

  def _report(self):
    summary.report(self._config, self._workdir, self._mesh, self._program.abstract_single)
