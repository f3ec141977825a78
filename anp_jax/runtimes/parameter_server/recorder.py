"""What server 0 keeps of a run: checkpoints, scores, telemetry and the report."""

from collections.abc import Sequence
import contextlib
import time

from anp_jax.checkpoint import manager as checkpoint_lib, run_dir as workdir_lib
from anp_jax.data import sources
from anp_jax.reporting import run_page, summary, telemetry as telemetry_lib
from anp_jax.reporting.analysis import analysis_run as evaluation
from anp_jax.runtimes.parameter_server import update_metrics
from anp_jax.training import eval_loop


class Recorder:
  """The records of a run, from one session to the next."""

  def __init__(self, config, setup, workdir: str, processes):
    """Opens the validation set, the workdir and its checkpoints.

    Args:
      config: the run's config, with its batch size.
      setup: `setup.Setup`.
      workdir: folder of the run.
      processes: this process among all.

    Raises:
      ConfigError: if the workdir belongs to another run.
    """
    self._config, self._setup = config, setup
    self._workdir, self._processes = workdir, processes
    self._eval_source = sources.open_source(config, training=False)
    if config.checkpoint.keep_best:
      checkpoint_lib.check_best_metric(config, setup.objective.metric_names)
    workdir_lib.open_or_refuse(workdir, config, setup.source.vocabulary)
    workdir_lib.record_class_sizes(workdir, setup.source)
    self._checkpoints = checkpoint_lib.Checkpoints(
      workdir, config, sources.fingerprint(setup.source), setup.program.abstract_state
    )
    self._stream = setup.stream()
    self._scores = {}
    self._start_version = 0
    self._update_time = None  # of the update that is being logged
    self._telemetry = self._metrics = None

  def begin(self, lines: Sequence[str]):
    """Opens the records of a session.

    Args:
      lines: about the servers, for the log header.

    Returns:
      The newest checkpoint's TrainState, or a new one.
    """
    setup, total = self._setup, self._setup.total
    restored = self._checkpoints.restore()
    state, more = (restored[0], []) if restored else setup.initial_state(self._workdir)
    self._start_version = version = int(state.step)
    self._telemetry = summary.telemetry(
      self._config,
      self._workdir,
      setup.mesh,
      telemetry_lib.RunLength(total, self._config.batch_size, len(setup.source), version),
      lambda: self._update_time or time.monotonic(),
    )
    self._log_header([*lines, *more])
    if version < total:
      summary.log_changes(self._telemetry, self._checkpoints, setup.program)
    # Stopped before, or in, the evaluation of its last step.
    is_due = version == total or version % setup.every('eval') == 0
    if version and is_due and not summary.is_scored(self._workdir, version):
      self.score(version, state, contextlib.nullcontext())
      self._checkpoints.wait()
    return state

  def start_updates(self, workers: int) -> None:
    """Starts the metrics and the rates of a session's updates."""
    self._metrics = update_metrics.UpdateMetrics(self._setup, workers, self._telemetry)
    self._telemetry.start_timing(self._start_version)

  def log_updates(self, applied) -> None:
    """Logs, and removes, updates that were applied.

    Args:
      applied: deque of (seconds, version, contributions).
    """
    # Rates are those of the updates, also of what was queued while this thread
    # was scoring.
    while applied:
      self._update_time, *update = applied.popleft()
      self._metrics.add(*update)
      self._update_time = None

  def save(self, version: int, state) -> None:
    """Begins to write the newest checkpoint."""
    self._checkpoints.save(version, state)

  def score(self, version: int, state, pause, seconds: float | None = None) -> None:
    """Evaluates a state, and keeps it if it is among the best.

    Args:
      version: of the state.
      state: TrainState.
      pause: context within which this process computes no gradient.
      seconds: simulated, until the version was made; None without simulation.
    """
    start = time.monotonic()
    source, program = self._eval_source, self._setup.program
    with pause:
      batches = self._stream.evaluation(source)
      batches = self._processes.heartbeat_each(batches, 'evaluating', version)
      if version == self._setup.total and self._config.eval.examples:
        subject = evaluation.Subject(self._config, self._workdir, program, source, version)
        scores = evaluation.of_training(subject, state, batches)
      else:
        scores = eval_loop.run(program.eval_step, state, batches)
    self._telemetry.log_duration('evaluating', time.monotonic() - start)
    self._telemetry.evaluation(version, scores | update_metrics.simulated_seconds(seconds))
    self._checkpoints.save_best(version, state, scores)
    self._scores = scores

  def report(self, version: int, reason: str) -> dict:
    """Ends the records of a run that ends well; returns the last scores.

    Args:
      version: the last one.
      reason: why the run has stopped, if it has before its end.
    """
    total, setup = self._setup.total, self._setup
    if version < total:
      workdir_lib.mark_stopped(self._workdir, version, total, reason)
      self._telemetry.log(f'stopped at step {version} of {total}; run the same command to resume')
    elif self._start_version < total or not run_page.exists(self._workdir):
      summary.report(self._config, self._workdir, setup.mesh, setup.program.abstract_state)
    self._telemetry.close()
    return self._scores or summary.last_scores(self._workdir)

  def expected_save_seconds(self) -> float:
    """Returns the seconds that a save takes while training continues."""
    return self._checkpoints.expected_save_seconds()

  def wait(self) -> None:
    """Returns when all checkpoints are on disk."""
    self._checkpoints.wait()

  def end(self) -> None:
    """Closes the telemetry of a session."""
    if self._telemetry:
      self._telemetry.close()

  def close(self) -> None:
    """Waits for the checkpoints, and closes all records."""
    self.end()
    self._checkpoints.close()

  def _log_header(self, lines):
    log, setup = self._telemetry.log, self._setup
    version, total = self._start_version, setup.total
    log(f'workdir  {self._workdir}')
    summary.log_run_info(
      self._telemetry,
      self._config,
      setup.mesh,
      setup.program.abstract_state,
      (setup.source, self._eval_source),
      workdir_lib.class_sizes(self._workdir, len(setup.source.vocabulary)),
    )
    for line in lines:
      log(line)
    if version == total:
      log(
        f'{self._workdir} is finished: step {version} of {total}; for more, '
        'set a longer config.duration or another --workdir'
      )
    elif version:
      log(f'continuing from step {version} of {total}')
