"""A run, from config to report: one loop that reads from top to bottom."""

import contextlib
import os

import jax

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.checkpoint.weights import initial
from anp_jax.cluster import preemption
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import balance
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.parallel import strategies
from anp_jax.reporting import run_page
from anp_jax.reporting import summary
from anp_jax.reporting import telemetry as telemetry_lib
from anp_jax.reporting import weights_and_biases
from anp_jax.reporting.analysis import run as evaluation
from anp_jax.system import compile_cache
from anp_jax.system import flops
from anp_jax.system import profiling
from anp_jax.system import startup
from anp_jax.training import build
from anp_jax.training import eval_loop
from anp_jax.training import objective as objective_lib
from anp_jax.training import step as step_lib


class NotFinite(cluster.Failed, ArithmeticError):
  """Loss, gradient, update or statistics of a step are NaN or infinite."""


def run(
  config, workdir: str, mode: str = 'train', which: str = 'newest',
  processes: cluster.Processes | None = None, output: str = '',
):  # fmt: skip
  """Trains, or goes on with, the run of a workdir; or scores its checkpoint.

  Args:
    config: resolved and valid.
    workdir: folder of the run; made if it is missing.
    mode: 'train' or 'evaluate'.
    which: checkpoint that mode 'evaluate' scores: 'newest', 'best' or a step.
    processes: of the run, from `cluster.start`; None: this one.
    output: folder for what mode 'evaluate' writes; '': one in the workdir.

  Returns:
    The validation metrics of the last evaluation, {} if there was none.

  Raises:
    ConfigError: if the config fits neither the devices nor the workdir.
    NotFinite: if a step gave a number that is not finite.
    evaluate.Damaged: if too many examples cannot be read.
  """
  if mode == 'train':
    weights_and_biases.check(config)
  if mode == 'train' and config.strategy.name == 'server':
    from anp_jax.runtimes.server import run as server  # Flight is imported

    return server.run(config, workdir, processes or cluster.Processes(config))
  if config.strategy.name == 'relay':
    from anp_jax.runtimes.relay import run as relay

    processes = processes or cluster.Processes(config)
    return relay.run(config, workdir, processes, mode, which)
  processes = processes or cluster.Processes(config)
  if mode == 'evaluate':
    return evaluation.run(config, workdir, which, processes, output)
  if config.strategy.helpers:
    from anp_jax.runtimes.offload import pool as pool_lib

    if processes.index:
      pool_lib.serve(config, processes)
      return {}
    with pool_lib.DevicePool(config, processes) as pool:
      return _run(config, workdir, pool.processes, pool)
  return _run(config, workdir, processes)


def _run(config, workdir, processes, pool=None):
  """`run`, of a strategy that trains one model in step."""
  # Devices, data, model and strategy.
  marks = startup.Marks()
  marks.mark('imports')
  processes.check_shared(workdir)
  compile_cache.enable(config)
  devices, helpers = None, ()
  if pool:
    devices, helpers = pool.mesh_devices, pool.offload_devices
  mesh = mesh_lib.create(config, devices, processes.hosts)
  batch_size = workdir_lib.batch_size(
    config, workdir, mesh_lib.batch_devices(mesh)
  )
  strategies.check_batch(config, batch_size, mesh)
  marks.mark('devices')
  train_source = sources.open_source(config, training=True)
  eval_source = sources.open_source(config, training=False)
  _check_names(train_source, eval_source)
  marks.mark('data set')
  objective = objective_lib.create(
    train_source.vocabulary, config, balance.class_weights(config, train_source)
  )
  if config.checkpoint.keep_best:
    checkpoint_lib.check_best_metric(config, objective.metric_names)
  workdir_lib.open_or_refuse(workdir, config, train_source.vocabulary)
  workdir_lib.record_class_sizes(workdir, train_source)
  total = config_lib.steps(config.duration, batch_size, len(train_source))
  folder = os.path.join(workdir, checkpoint_lib.NEWEST)
  saved = processes.gather(checkpoint_lib.saved_steps(folder))[0]
  planned, lines = strategies.planned(
    config, mesh, objective, batch_size, len(train_source), workdir, processes,
    total > max(saved, default=0), helpers,
  )  # fmt: skip
  marks.mark('plan')
  parts = build.create(
    planned, mesh, objective, batch_size, len(train_source), helpers
  )
  one = parts.one
  train_step, eval_step = parts.train_step, parts.eval_step

  # The state: restored, or new.
  checkpoints = checkpoint_lib.Checkpoints(
    workdir,
    config,
    sources.fingerprint(train_source),
    parts.like,
    processes.gather,
  )
  restored = checkpoints.restore()
  step = restored[1] if restored else 0
  weights, taken = ({}, []) if restored else initial.load(
    config, parts, objective, train_source.vocabulary, workdir,
    processes.gather,
  )  # fmt: skip
  marks.mark('model, checkpoint')

  # The data stream, which begins where the state stands.
  sharding = mesh_lib.batch_sharding(mesh)
  stream = stream_lib.Stream(config, sharding, processes.vote)
  training = step < total
  feed = stream.train(train_source, batch_size, step) if training else None
  state = restored[0] if restored else state_lib.create(
    parts.init, parts.like, weights
  )  # fmt: skip
  del weights
  marks.mark('state')

  def evaluated():
    batches = stream.evaluation(eval_source)
    batches = processes.heartbeat_each(batches, 'evaluating', step)
    if step < total or not config.eval.examples:
      scores = eval_loop.run(eval_step, parts.scored(state), batches)
      eval_loop.check_damage(config, eval_source, scores)
      return scores
    return evaluation.of_training(
      config, workdir, parts, parts.scored(state), batches, eval_source, step
    )

  telemetry = summary.telemetry(
    config, workdir, mesh, total, batch_size, len(train_source), step
  )
  telemetry.note(f'workdir  {workdir}')
  summary.introduce(
    telemetry, config, mesh, one, train_source, eval_source,
    workdir_lib.class_sizes(workdir, len(train_source.vocabulary)),
  )  # fmt: skip
  for line in [*(f'offload  {h.name}' for h in helpers), *lines, *taken]:
    telemetry.note(line)
  every = {
    name: config_lib.steps(config[name].every, batch_size, len(train_source))
    for name in ('log', 'eval', 'checkpoint')
  }

  @contextlib.contextmanager
  def pause(what):
    processes.heartbeat(what, step)
    with telemetry.paused(what):
      yield

  def is_due():
    return step % every['eval'] == 0 or step == total

  def score():
    """Evaluates this step's state, and keeps it if it is among the best."""
    with pause('evaluating'):
      scores = evaluated()
    telemetry.evaluation(step, scores)
    checkpoints.save_best(step, state, scores)
    return scores

  # Of a run that was stopped before, or in, the evaluation of its last step.
  owes = step > 0 and is_due() and not processes.gather(
    summary.is_scored(workdir, step)
  )[0]  # fmt: skip
  if not training:
    if owes:
      score()
      checkpoints.wait()
    telemetry.note(
      f'{workdir} is finished: step {step} of {total}; '
      'for more, set a longer config.duration or another --workdir'
    )
    telemetry.close()
    checkpoints.close()
    # Stopped between the last save and the report.
    if not run_page.exists(workdir) and jax.process_index() == 0:
      summary.report(config, workdir, mesh, one)
    return summary.last_scores(workdir)
  if step:
    telemetry.note(f'continuing from step {step} of {total}')
  profile = profiling.Profile(
    config, workdir, step, total, telemetry.note, jax.process_index() == 0
  )

  # The loop. Order of effects after a step: its numbers, newest checkpoint,
  # evaluation, best checkpoint, stop.
  scores, vote = {}, preemption.CONTINUE
  with processes.handling_signals(checkpoints.expected_save_seconds):
    try:
      if owes:
        scores = score()
      with pause('compiling'):
        batch = next(feed)
        marks.mark('first batch')
        telemetry.set_flops(_flops(train_step, state, batch, config, mesh))
        lowered = train_step.lower(state, batch)
        train_step = lowered.compile()
        compile_cache.release_memory()
        with profile.step(step + 1, state):
          state, values = train_step(state, batch)
        jax.block_until_ready(values)
        marks.mark('compile and first step')
      telemetry.note(marks.text())
      telemetry.spent('start', marks.before('first batch'))
      telemetry.begin(step + 1)
      readings = _Readings(
        step_lib.metric_names(objective), telemetry, every['log'], total, feed,
        lambda damaged, steps: eval_loop.check_excess(
          config, damaged, steps * batch_size, train_source.name
        ),
      )  # fmt: skip
      while True:
        step += 1
        # Read one step late: while this step computes, the last is looked at.
        vote = readings.read_last()
        profile.end(step, values)
        readings.add(step, values)
        done = vote or step == total
        if done or is_due() or step % every['checkpoint'] == 0:
          vote = max(readings.read_last(), vote)
          with pause('saving'):
            checkpoints.save(step, state)
          # One that is put off by a stop comes first when the run goes on.
          if is_due() and (not vote or step == total):
            scores = score()
        if done or vote:
          break
        with profile.step(step + 1, values):
          processes.heartbeat('input', step + 1)
          batch = next(feed)
          processes.heartbeat('step', step + 1)
          state, values = train_step(state, batch)
      with pause('saving'):
        checkpoints.wait()
    finally:
      profile.close()
      feed.close()
      telemetry.close()
      checkpoints.close()
  if jax.process_index() == 0:
    if step < total:
      workdir_lib.mark_stopped(workdir, step, total, preemption.REASONS[vote])
      print(
        f'stopped at step {step} of {total}; run the same command to resume'
      )
    else:
      summary.report(config, workdir, mesh, one)
  return scores


class _Readings:
  """The numbers of steps, read when the next step is already under way."""

  def __init__(self, names, telemetry, every, total, feed, check_damage):
    self._names = names
    self._telemetry = telemetry
    self._every = every
    self._total = total
    self._feed = feed
    self._waited = feed.waited  # for the first batch: no rate counts it
    self._check_damage = check_damage
    self._damaged = self._steps = 0  # since this process started
    self._pending = None

  def add(self, step, values):
    self._pending = (step, values)

  def read_last(self) -> int:
    """The vote of the last step; logs its numbers where that is due.

    Every process reads the same reduced numbers, so all raise or none.
    """
    if self._pending is None:
      return preemption.CONTINUE
    step, values = self._pending
    self._pending = None
    values = jax.device_get(values).tolist()
    metrics = dict(zip(self._names, values, strict=True))
    vote = int(metrics.pop('vote'))
    if not metrics.pop('finite'):
      raise NotFinite(
        f'step {step} is not finite: loss {metrics["loss"]}, gradient norm '
        f'{metrics["grad_norm"]}; nothing of it was saved'
      )
    self._damaged += int(metrics['damaged'])
    self._steps += 1
    self._check_damage(self._damaged, self._steps)
    if step % self._every == 0 or step == self._total:
      metrics['damaged'] = self._damaged
      waited = self._feed.waited - self._waited
      self._waited = self._feed.waited
      self._telemetry.train(step, metrics, waited)
    return vote


def _check_names(train_source, eval_source):
  if train_source.vocabulary.names != eval_source.vocabulary.names:
    raise config_lib.ConfigError(
      f'{train_source.name} and {eval_source.name} have different classes: '
      f'{len(train_source.vocabulary)} and {len(eval_source.vocabulary)}'
    )


def _flops(train_step, state, batch, config, mesh) -> float:
  """Of one step on all devices; 0 where no peak is known to compare with."""
  kind = mesh.devices.flat[0].device_kind
  if not telemetry_lib.peak_flops(kind, config.model.dtype):
    return 0.0
  # Shapes of the mapped step, and so its count, are those of one device. Of a
  # split layer each device that has the same images takes another branch: all
  # branches together are what a batch costs.
  count = flops.count_call(train_step, state, batch, branches=sum)
  return float(count * mesh_lib.batch_devices(mesh))
