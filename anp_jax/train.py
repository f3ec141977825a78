"""A run, from config to report: one loop that reads from top to bottom."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import time

from absl import logging
import jax
from ml_collections import ConfigDict

from anp_jax import cluster, config as config_lib, run as run_lib
from anp_jax.cluster import generation as generation_lib, preemption
from anp_jax.config import emulation_keys, errors, strategy as strategy_lib, trust
from anp_jax.ensemble import ensemble_run
from anp_jax.reporting import weights_and_biases
from anp_jax.reporting.analysis import analysis_run as analysis
from anp_jax.system import compute_dtype, emulation, mirror


def run(
  config: ConfigDict,
  workdir: str,
  mode: str = 'train',
  checkpoint: str = 'newest',
  processes: cluster.Processes | None = None,
  output: str = '',
) -> dict:
  """Trains, or resumes, the run of a workdir, or scores it.

  Args:
    config: config from `config.base()` with changes, or resolved before.
    workdir: folder of the run, or its address in a store, see
      `system.mirror`; made if it is missing.
    mode: 'train' or 'evaluate'.
    checkpoint: checkpoint that mode 'evaluate' scores: 'newest', 'best' or a step.
    processes: processes of the run, from `cluster.start`; None: this process.
    output: folder for the files of mode 'evaluate'; '': one in the workdir.

  Returns:
    The validation metrics of the last evaluation, {} if there was none.

  Raises:
    ConfigError: if the config is not valid, or fits neither the devices nor the workdir.
    NotFiniteError: if a step gave a number that is not finite.
    eval_loop.CorruptExampleError: if too many examples cannot be read.
  """
  config = config_lib.resolved(config)
  invocation = strategy_lib.Invocation(config, workdir, processes, mode, checkpoint, output)
  return start(invocation)


def start(
  invocation: strategy_lib.Invocation, loop: Callable[[strategy_lib.Invocation], dict] | None = None
) -> dict:
  """Prepares this process for an invocation, and has its strategy run it.

  Args:
    invocation: command; without processes, a run of this process alone.
    loop: what a strategy calls that has none of its own; None: trains or scores.

  Returns:
    The result of the strategy's `run`.
  """
  # What a run's files name was checked where they were read.
  trust.allow(config_lib.flat(invocation.config))
  workdir = mirror.fetch(invocation.workdir)
  if invocation.mode == 'train':
    weights_and_biases.check(invocation.config)
  config = compute_dtype.decide(invocation.config, workdir)
  processes = invocation.processes
  if processes is None:
    processes = cluster.Processes(config)
    # A notebook is older than its run.
    begin = generation_lib.Interruption(time.time())
    processes.generation = processes.generation._replace(interruption=begin)
  _emulate(config, invocation.mode, processes)
  invocation = dataclasses.replace(invocation, config=config, workdir=workdir, processes=processes)
  with uploading(workdir):
    return strategy_lib.find(config).run(invocation, loop or _train_or_score)


@contextlib.contextmanager
def uploading(workdir: str) -> Iterator[None]:
  """Uploads the remaining files of a workdir at the end, also after an error."""
  try:
    yield
  except BaseException:
    try:
      mirror.upload(workdir)
    except mirror.UploadError as e:  # the first error is the cause
      logging.error('%s', e.strerror)
    raise
  try:
    mirror.upload(workdir)
  except mirror.UploadError as e:
    raise cluster.RunFailedError(e.strerror) from e


def _emulate(config, mode: str, processes: cluster.Processes) -> None:
  """Makes this process a node of the cluster that config.emulate describes."""
  if not config.emulate.enabled:
    return
  joined = strategy_lib.find(config).joins_jax(config, mode)
  bandwidth = config.emulate.bandwidth
  paces_sockets = bool(bandwidth) and joined and processes.count > 1
  good = not paces_sockets or emulation.can_pace_sockets()
  words = "'' here: only Linux paces the connections of collectives"
  errors.check(good, 'emulate.bandwidth', bandwidth, words)
  emulation.begin(processes.index, emulation_keys.bytes_per_second(bandwidth), paces_sockets)


def _train_or_score(invocation: strategy_lib.Invocation) -> dict:
  """Trains one model in step over the mesh of all processes, or scores its checkpoint."""
  if invocation.mode == 'evaluate':
    return analysis.run(invocation)
  if invocation.config.ensemble.seeds:
    return ensemble_run.run(invocation)
  run = run_lib.Run(invocation)
  return run.finish_again() if run.recorder.is_finished else _train(run)


def _train(run: run_lib.Run) -> dict:
  """Trains until the run's last step, or until a process asks to stop.

  Order of effects after a step: metrics, newest checkpoint, evaluation, best
  checkpoint, stop, new plan.
  """
  scores, vote, recorder = {}, preemption.CONTINUE, run.recorder
  with run.opened():
    state = run.take_state()
    if recorder.owes_evaluation():
      scores = run.evaluate(recorder.start_step, state)
    train_step, batches = run.compile(state)
    for step in range(recorder.start_step + 1, recorder.total_steps + 1):
      with run.profile.step(step, state):
        batch = next(batches)
        state, values = train_step(state, batch)
      if step == recorder.start_step + 1:
        jax.block_until_ready(values)
        emulation.pace_sockets()
        run.report_startup()
      # While this step computes, the metrics of the step before are read.
      vote = run.log.push(step, values)
      if vote == preemption.RESTART:  # a stop that was asked for meanwhile comes first
        vote = max(vote, run.log.flush())
      run.profile.end(step, values)
      if vote > preemption.RESTART or recorder.saves_at(step):
        vote = max(run.log.flush(), vote)
        run.save(step, state)
        # An evaluation that a stop puts off comes first when the run resumes.
        stops = vote > preemption.RESTART
        if recorder.evaluates_at(step) and (not stops or step == recorder.total_steps):
          scores = run.evaluate(step, state)
      if vote > preemption.RESTART:
        break
      run.mirror(step, state, restarts=vote == preemption.RESTART)
      train_step = run.replan(step, train_step, state)
    run.wait_for_saves(step)
  recorder.finish(step, vote)
  return scores
