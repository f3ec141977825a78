"""What a run keeps: checkpoints, metrics, scores and the report."""

from collections.abc import Callable, Sequence
import contextlib
import functools
import time
from typing import Any

import jax

from anp_jax import cluster, experiment
from anp_jax.checkpoint import host_mirror, manager, run_dir
from anp_jax.cluster import preemption
from anp_jax.config import strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.data.input import stream
from anp_jax.data.sources import agreement
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import (
  metric_lines,
  run_page,
  step_rates,
  summary,
  telemetry as telemetry_lib,
)
from anp_jax.reporting.analysis import analysis_run
from anp_jax.system import mirror
from anp_jax.training import build, eval_loop


def claim(
  opened: experiment.Experiment,
  workdir: str,
  processes: cluster.Processes,
  evaluation: sources.Source | None = None,
) -> sources.Source:
  """Makes the workdir this run's; returns the validation examples.

  Args:
    opened: what is trained.
    workdir: folder of the run.
    processes: processes of the run.
    evaluation: validation examples, if they are open.

  Raises:
    ConfigError: if the data do not fit each other, or the workdir belongs to
      another run.
  """
  config, train = opened.config, opened.source
  if evaluation is None:
    evaluation = sources.open_source(config, training=False)
  agreement.check_classes(evaluation, train)
  agreement.check(processes, training=train, evaluation=evaluation)
  if config.checkpoint.keep_best:
    manager.check_best_metric(config, opened.spec.objective.metric_names)
  run_dir.claim_workdir(workdir, config, train.vocabulary)
  run_dir.record_class_sizes(workdir, train)
  return evaluation


class Recorder:
  """The records of a run, new or resumed.

  Attributes:
    experiment: what is trained.
    program: steps of the run; those of another plan may replace them.
    workdir: folder of the run.
    checkpoints: saved states.
    mirror: copies of the state in memory; None for a run that ends with each process.
    start_step: step of the restored state; 0 for a new run.
    telemetry: metrics and lines for people, once opened.
  """

  telemetry: telemetry_lib.Telemetry

  def __init__(
    self,
    opened: experiment.Experiment,
    program: build.ModelAndSteps,
    evaluation: sources.Source,
    workdir: str,
    processes: cluster.Processes,
  ):
    """Opens the checkpoints.

    Args:
      opened: what is trained.
      program: steps of the run.
      evaluation: validation examples, from `claim`.
      workdir: folder of the run.
      processes: this process among all.
    """
    self.experiment, self.program, self.workdir = opened, program, workdir
    self.start_step = 0
    self._evaluation, self._processes = evaluation, processes
    self._stream = stream.Stream(opened.config, mesh_lib.batch_sharding(opened.mesh))
    self._scores: dict[str, float] = {}
    self._closing = contextlib.ExitStack()
    self.checkpoints = manager.Checkpoints(
      workdir,
      opened.config,
      sources.fingerprint(opened.source),
      program.checkpoint_layout.abstract,
      processes.gather,
      on_phase=lambda phase: processes.heartbeat(phase, processes.step()),
    )
    self._closing.callback(self.checkpoints.close)
    self.mirror: host_mirror.HostMirror | None = None
    if processes.is_elastic:
      every = opened.config.cluster.mirror_every
      abstract = program.checkpoint_layout.abstract
      self.mirror = host_mirror.HostMirror(abstract, processes, every)

  @property
  def total_steps(self) -> int:
    """Updates of the whole run."""
    return self.experiment.spec.total_steps

  @functools.cached_property
  def simulation(self) -> Any:
    """The simulated workers from `start_step` on, once restored; None if none are."""
    spec = self.experiment.spec
    simulation = strategy_lib.find(spec.config).simulation(spec, self.workdir, self.start_step)
    if simulation and simulation.orders_batches:
      self._closing.callback(simulation.close)
    return simulation

  @property
  def order(self) -> Any:
    """The simulation, if it decides the order of batches; else None."""
    return self.simulation if self.simulation and self.simulation.orders_batches else None

  @property
  def is_finished(self) -> bool:
    """Whether the restored state has had all updates."""
    return self.start_step >= self.total_steps

  def restore(self) -> Any:
    """Returns the newest TrainState; None for a new run."""
    restored = self.mirror.restore(self._can_go_on) if self.mirror else None
    restored = restored or self.checkpoints.restore()
    state, self.start_step = restored or (None, 0)
    return self.program.checkpoint_layout.unpack(state) if restored else None

  def _can_go_on(self, step):
    """Whether a copy in memory is as good as a checkpoint: newer, and all before it is kept."""
    spec, config = self.experiment.spec, self.experiment.config
    lines = [line for line in telemetry_lib.read(self.workdir) if line['step'] <= step]

    def is_recorded(kind, every, until):
      due = until // spec.steps(every) * spec.steps(every)
      return not due or any((line['kind'], line['step']) == (kind, due) for line in lines)

    return (
      step >= max(self.checkpoints.steps(), default=0)
      and is_recorded('train', config.log.every, step)
      and is_recorded('validation', config.eval.every, step - 1)
      and self.checkpoints.has_best_of([r for r in lines if r['kind'] == 'validation'])
    )

  def open_telemetry(
    self, lines: Sequence[str], clock: Callable[[], float] = time.monotonic
  ) -> None:
    """Begins to record from `start_step` on, and says what the run is.

    Args:
      lines: what else to say.
      clock: returns seconds that never run backwards.
    """
    spec = self.experiment.spec
    self.telemetry = telemetry = summary.telemetry(
      spec.config,
      self.workdir,
      spec.mesh,
      step_rates.RunLength(self.total_steps, spec.batch_size, spec.examples, self.start_step),
      clock,
    )
    self._closing.callback(telemetry.close)
    if self.simulation:
      telemetry.simulate(self.simulation.values)
      lines = [*lines, f'workers  {self.simulation.describe()}']
    starts = telemetry_lib.of_kind(self.workdir, metric_lines.START)
    if self._processes.generation.number and starts:
      return  # a run that goes on in place has said all that before
    self._log_header(lines)
    if self.is_finished:
      telemetry.log(
        f'{self.workdir} is finished: step {self.start_step} of {self.total_steps}; '
        'for more, set a longer config.duration or another --workdir'
      )
      return
    summary.log_changes(telemetry, self.checkpoints, self.program)
    if self.start_step:
      telemetry.log(f'continuing from step {self.start_step} of {self.total_steps}')
      count = len(self._evaluation)
      before = starts[-1].get('validation_images', count) if starts else count
      if before != count:
        telemetry.log(f'caution  scores are of {count:,} images from here on, {before:,} before')

  def report_restart(self) -> None:
    """Says how a run goes on in place, once it has computed a step, if one is left."""
    generation = self._processes.generation
    before = generation.interruption
    if generation.number:
      self.telemetry.restart(
        list(generation.lost.values()),
        (self._processes.count, len(before.names)),
        self.start_step,
        time.time() - before.at,
        max(before.step - self.start_step, 0),
      )

  def owes_evaluation(self) -> bool:
    """Whether the run was stopped before, or in, the evaluation of `start_step`."""
    step = self.start_step
    if not step or not self.evaluates_at(step):
      return False
    return not self._processes.gather(summary.is_scored(self.workdir, step))[0]

  def evaluates_at(self, step: int) -> bool:
    """Whether an evaluation is due after a step."""
    spec = self.experiment.spec
    return step % spec.steps(spec.config.eval.every) == 0 or step == self.total_steps

  def saves_at(self, step: int) -> bool:
    """Whether a checkpoint is due after a step; before each evaluation too."""
    spec = self.experiment.spec
    return self.evaluates_at(step) or step % spec.steps(spec.config.checkpoint.every) == 0

  def save(self, step: int, state: Any) -> None:
    """Begins to write the newest checkpoint of a TrainState."""
    self.checkpoints.save(step, self.program.checkpoint_layout.pack(state))
    mirror.begin_upload(self.workdir)

  def evaluate(self, step: int, state: Any) -> dict[str, float]:
    """Scores a step's TrainState, and keeps it if it is among the best.

    The evaluation that ends the run also writes its folder.
    """
    config, program = self.experiment.config, self.program
    batches = self._processes.heartbeat_each(
      self._stream.evaluation(self._evaluation), 'evaluating', step
    )
    scored = program.eval_state_fn(state)
    if step == self.total_steps and config.eval.examples:
      subject = analysis_run.Subject(config, self.workdir, program, self._evaluation, step)
      scores = analysis_run.of_training(subject, scored, batches)
    else:
      scores = eval_loop.run(program.eval_step, scored, batches)
      eval_loop.check_damage(config, self._evaluation, scores)
    self.telemetry.evaluation(step, scores)
    self.checkpoints.save_best(step, program.checkpoint_layout.pack(state), scores)
    self._scores = scores
    return scores

  def finish(
    self, step: int, vote: int = preemption.CONTINUE, has_page: bool = True
  ) -> dict[str, float]:
    """Writes the report after the last step, or why the run stopped before.

    Args:
      step: step of the last state.
      vote: vote that has stopped the run.
      has_page: whether the report has a page; a run that ends again writes it.

    Returns:
      The scores of the last evaluation.
    """
    if jax.process_index() == 0:
      if step < self.total_steps:
        reason = preemption.REASONS.get(vote, 'a signal')
        run_dir.mark_stopped(self.workdir, step, self.total_steps, reason)
      # Else stopped between the last save and the report.
      elif not self.is_finished or has_page and not run_page.exists(self.workdir):
        spec = self.experiment.spec
        replica = self.program.abstract_replica
        summary.report(spec.config, self.workdir, spec.mesh, replica, has_page)
    last = summary.last_scores(self.workdir)
    names = *self.experiment.spec.objective.metric_names, 'examples'
    return self._scores or {name: last[name] for name in names if name in last}

  def _log_header(self, lines):
    spec, source, telemetry = self.experiment.spec, self.experiment.source, self.telemetry
    telemetry.log(f'workdir  {self.workdir}')
    summary.log_run_info(
      telemetry,
      spec.config,
      spec.mesh,
      self.program.abstract_replica,
      (source, self._evaluation),
      run_dir.class_sizes(self.workdir, len(source.vocabulary)),
    )
    for line in lines:
      telemetry.log(line)

  def close(self) -> None:
    """Closes the telemetry, waits for the checkpoints and closes them."""
    self._closing.close()
