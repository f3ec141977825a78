"""Server 0's process: the order, scores, checkpoints and reports of a run."""

import contextlib
import secrets
import time

from absl import logging
import jax

from anp_jax import cluster, config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib, run_dir as workdir_lib
from anp_jax.cluster import preemption
from anp_jax.data import sources
from anp_jax.reporting import run_page, summary, telemetry as telemetry_lib
from anp_jax.reporting.analysis import analysis_run as evaluation
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  log as log_lib,
  look_ahead,
  parameter_store,
  rendezvous,
  scheduler as scheduler_lib,
  service as service_lib,
  session as session_lib,
  setup as setup_lib,
  simulation as simulation_lib,
  slice_optimizer,
  update_metrics,
)
from anp_jax.training import eval_loop

_POLL = 0.02  # seconds
_FAREWELL = 10.0  # seconds that the other processes have to hear of the end


class Chief:
  """Server 0, from one session to the next.

  A session begins with the newest checkpoint and ends with the run, or when a
  server has lost its slice: then all roll back to the newest checkpoint.
  """

  def __init__(self, participant: rendezvous.Participant, processes, workers: int):
    """Opens data, checkpoints and the port.

    Args:
      participant: this process.
      processes: this process among all.
      workers: processes that train.
    """
    self._participant = participant
    self._workdir = workdir = participant.workdir
    self._processes = processes
    self._workers = workers
    self._data_shards = scheduler_lib.data_shards(participant.config, workers)
    self._config = config = self._with_batch_size()
    self._ahead = look_ahead.settings(config, workers)
    self._simulates = config.strategy.simulate.workers > 0
    self._setup = setup = setup_lib.create(config, self._ahead)
    self._program = setup.program
    self._total = setup.program.spec.total_steps
    self._eval_source = sources.open_source(config, training=False)
    if config.checkpoint.keep_best:
      checkpoint_lib.check_best_metric(config, setup.objective.metric_names)
    workdir_lib.open_or_refuse(workdir, config, setup.source.vocabulary)
    workdir_lib.record_class_sizes(workdir, setup.source)
    self._checkpoints = checkpoint_lib.Checkpoints(
      workdir, config, sources.fingerprint(setup.source), setup.program.abstract_state
    )
    self._stream = setup.stream()
    examples = len(setup.source)
    self._every = {
      name: config_lib.steps(config[name].every, config.batch_size, examples)
      for name in ('log', 'eval', 'checkpoint')
    }
    self._scores, self._vote = {}, preemption.CONTINUE
    self._update_time = None  # of the update that is being logged
    self._session = self._log = self._telemetry = None
    self._service = participant.open_service()

  def begin_session(self) -> None:
    """Restores the newest checkpoint, or a new state, and serves it."""
    if self._session:  # its last save may be under way
      self._checkpoints.wait()
    self._end_session()
    restored = self._checkpoints.restore()
    if restored:
      state, lines = restored[0], []
    else:
      state, lines = self._setup.initial_state(self._workdir)
    version = int(state.step)
    self._telemetry = summary.telemetry(
      self._config,
      self._workdir,
      self._setup.mesh,
      telemetry_lib.RunLength(
        self._total, self._config.batch_size, len(self._setup.source), version
      ),
      lambda: self._update_time or time.monotonic(),
    )
    self._log_run_info(version, lines)
    if version < self._total:
      summary.log_changes(self._telemetry, self._checkpoints, self._program)
    # Stopped before, or in, the evaluation of its last step.
    is_due = version == self._total or version % self._every['eval'] == 0
    if version and is_due:
      if not summary.is_scored(self._workdir, version):
        self._score(version, state, contextlib.nullcontext())
        self._checkpoints.wait()
    self._open_session(jax.device_get(state), version)
    self._trains = version < self._total

  def supervise(self, job, worker) -> bool:
    """Scores, saves and reports until the session ends.

    Args:
      job: the running worker of this process; or None.
      worker: the same worker, or None.

    Returns:
      Whether the run has ended too.

    Raises:
      cluster.RunFailedError: if a gradient or an update is not finite, say.
    """
    session, store = self._session, self._session.store
    metrics = update_metrics.UpdateMetrics(
      self._setup, self._every['log'], self._workers, self._telemetry
    )
    pause = worker.paused if worker else contextlib.nullcontext
    saved = applied = store.version
    self._telemetry.start_timing(saved)
    self._vote = preemption.CONTINUE
    while True:
      self._log_updates(metrics)
      if store.version != applied:
        applied = store.version
        self._processes.heartbeat('step', applied)
      if store.error:
        session.fail(store.error)
      if session.failed:
        raise cluster.RunFailedError(session.failed)
      if session.lost:
        logging.warning('a parameter server restarted: rolling back to the newest checkpoint')
        return False
      if not self._vote and self._processes.vote():
        self._vote = self._processes.vote()
        session.stop()
      if job:
        job.done()
      version = store.next_snapshot()
      if version is None and store.version == session.scheduler.limit:
        version = store.version
      if version is None:
        time.sleep(_POLL)
        continue
      is_last = version == session.scheduler.limit
      if version > saved:
        state = self._collect(version)
        if state is None:
          continue
        saved = version
        self._save_and_score(version, state, is_last, pause())
      if is_last:
        return True

  def simulation(self) -> simulation_lib.Simulation | bool:
    """Returns what stands in for workers; False if they are real.

    Raises:
      ConfigError: if config.strategy.simulate.log cannot be followed.
    """
    return self._simulates and simulation_lib.Simulation(
      self._config, self._setup, self._session, self._records
    )

  def expected_save_seconds(self) -> float:
    """Returns the seconds that a save takes while training continues."""
    return self._checkpoints.expected_save_seconds()

  def finish(self) -> dict:
    """Ends the run well; returns the last scores."""
    version, total = self._session.store.version, self._total
    self._checkpoints.wait()
    self._session.finish()
    self._participant.announce_end('')
    if version < total:
      reason = preemption.REASONS.get(self._vote, 'a signal')
      workdir_lib.mark_stopped(self._workdir, version, total, reason)
      self._telemetry.note(f'stopped at step {version} of {total}; run the same command to resume')
    elif self._trains or not run_page.exists(self._workdir):
      summary.report(self._config, self._workdir, self._setup.mesh, self._program.abstract_state)
    self._telemetry.close()
    return self._scores or summary.last_scores(self._workdir)

  def fail(self, text: str) -> None:
    """Tells the other processes why the run cannot continue."""
    if self._session:
      self._session.fail(text)
    self._participant.announce_end(text)

  def close(self) -> None:
    """Lets the other processes hear of the end, and closes the port."""
    if self._session and not self._simulates:
      count = self._workers + self._config.strategy.servers - 1
      self._session.wait_until_alone(count, _FAREWELL)
    self._end_session()
    self._checkpoints.close()
    self._service.shutdown()

  def _with_batch_size(self):
    data_shards = self._data_shards
    config = workdir_lib.with_batch_size(
      self._participant.config, self._workdir, jax.local_device_count() * data_shards
    )
    if config.batch_size % data_shards:
      raise config_lib.ConfigError(
        f'config.batch_size={config.batch_size} does not divide by the '
        f'{data_shards} workers that an update is made of'
      )
    return config

  def _open_session(self, state, version):
    config, setup = self._config, self._setup
    self._records = log_lib.read(self._workdir)
    used = log_lib.used_steps(self._records, version)
    self._log = log_lib.UpdateLog(
      self._workdir,
      version,
      {
        'duration': config.duration,
        'servers': config.strategy.servers,
        'shards': self._data_shards,
        'batch_size': config.batch_size,
        'look_ahead': vars(self._ahead),
        'workers': self._workers,
        'changeable': log_lib.changeable(config),
      },
    )
    run = self._run_info()
    starts = [optimizer.start(state) for optimizer in setup.optimizers]
    store = parameter_store.ParameterStore(
      setup.optimizers[0],
      starts[0],
      session_lib.snapshot_test(run.settings),
      run.settings['max_pending'],
    )
    scheduler = scheduler_lib.TicketScheduler(config, self._total, version, used, self._workers)
    self._session = session_lib.ChiefSession(
      secrets.token_hex(8), store, scheduler, self._log, starts, run
    )
    self._service.session = self._session

  def _run_info(self):
    s = self._config.strategy
    return session_lib.RunInfo(
      address=self._service.address,
      process=self._participant.process,
      launches=self._participant.launches,
      settings={
        'batch_size': self._config.batch_size,
        'data_shards': self._data_shards,
        'snapshot_every': [self._every['eval'], self._every['checkpoint']],
        'data': self._setup.data_description(),
        # What workers can have in flight, and some more that are gone.
        'max_pending': 8 * s.in_flight * (self._workers + 1),
      },
      metric_names=update_metrics.names(self._setup.objective),
    )

  def _end_session(self):
    self._service.session = None
    if self._session:
      self._session.close()
      self._telemetry.close()
    self._session = None

  def _log_run_info(self, version, lines):
    note, setup, s = self._telemetry.note, self._setup, self._config.strategy
    total = self._total
    note(f'workdir  {self._workdir}')
    summary.log_run_info(
      self._telemetry,
      self._config,
      setup.mesh,
      self._program.abstract_state,
      (setup.source, self._eval_source),
      workdir_lib.class_sizes(self._workdir, len(setup.source.vocabulary)),
    )
    note(
      f'server   {s.mode}: {self._workers} workers, {s.servers} '
      f'{"dedicated servers" if s.dedicated else "of them servers"}'
      f'{look_ahead.describe(self._ahead)}'
    )
    if self._simulates:
      note(f'workers  {simulation_lib.describe(self._config, setup.layout)}')
    for line in lines:
      note(line)
    if version == total:
      note(
        f'{self._workdir} is finished: step {version} of {total}; for more, '
        'set a longer config.duration or another --workdir'
      )
    elif version:
      note(f'continuing from step {version} of {total}')

  def _log_updates(self, metrics):
    # Rates are those of the updates, also of what was queued while this thread
    # was scoring.
    while self._session.applied:
      self._update_time, *update = self._session.applied.popleft()
      metrics.add(*update)
      self._update_time = None

  def _collect(self, version):
    """A version's whole state; None if the session is lost or has failed."""
    setup, session = self._setup, self._session
    states = [session.store.snapshot(version, 0)]
    for index, optimizer in enumerate(setup.optimizers[1:], 1):
      data = self._fetch_snapshot(version, index)
      if data is None:
        return None
      states.append(service_lib.unpack_state(optimizer, data))
    state = slice_optimizer.join(setup.layout, setup.optimizers, states)
    return jax.tree.map(
      lambda leaf, abstract: jax.device_put(leaf, abstract.sharding),
      state,
      self._program.abstract_state,
    )

  def _fetch_snapshot(self, version, index):
    """Another server's slice, or None; waits while the server reconnects."""
    session = self._session
    timeout = self._config.cluster.rendezvous_timeout
    deadline = time.monotonic() + timeout
    while not session.lost and not session.failed:
      try:
        client = self._participant.connect(session.addresses[index])
        with contextlib.closing(client):
          _, data = client.get('snapshot', session=session.name, version=version)
          return data
      except transport.CONNECTION_ERRORS as e:
        text = transport.describe_error(e)
        if 'refused:' in str(e):
          raise cluster.RunFailedError(f'server {index}: {text}') from e
        if time.monotonic() > deadline:
          raise cluster.PeerLostError(
            f'server {index} has not given its slice of version {version} '
            f'within {timeout:g} s: {text}'
          ) from e
        time.sleep(_POLL)
    return None

  def _save_and_score(self, version, state, is_last, pause):
    """Saves, evaluates and keeps the best, where the version is due."""
    is_evaluated = version % self._every['eval'] == 0
    if is_last or is_evaluated or version % self._every['checkpoint'] == 0:
      # The checkpoint's tickets are those in the log.
      self._log.sync()
      self._checkpoints.save(version, state)
    if version == self._total or (is_evaluated and not self._vote):
      self._score(version, state, pause)

  def _score(self, version, state, pause):
    start = time.monotonic()
    source, program = self._eval_source, self._program
    with pause:
      batches = self._stream.evaluation(source)
      batches = self._processes.heartbeat_each(batches, 'evaluating', version)
      if version == self._total and self._config.eval.examples:
        subject = evaluation.Subject(self._config, self._workdir, program, source, version)
        scores = evaluation.of_training(subject, state, batches)
      else:
        scores = eval_loop.run(program.eval_step, state, batches)
    self._telemetry.log_duration('evaluating', time.monotonic() - start)
    seconds = self._session and self._session.seconds.get(version)
    time_metric = update_metrics.simulated_seconds(seconds)
    self._telemetry.evaluation(version, scores | time_metric)
    self._checkpoints.save_best(version, state, scores)
    self._scores = scores
