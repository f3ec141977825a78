"""Server 0's process: the order of updates, and the sessions of a run."""

from concurrent import futures
import contextlib
import secrets
import time

from absl import logging
import jax
import ml_collections

from anp_jax import cluster, config as config_lib, recorder as recorder_lib
from anp_jax.checkpoint import run_dir
from anp_jax.cluster import preemption
from anp_jax.data.sources import agreement
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  gradient_worker,
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

_POLL = 0.02  # seconds
_FAREWELL = 10.0  # seconds that the other processes have to hear of the end


class Chief:
  """Server 0, from one session to the next.

  A session begins with the newest checkpoint and ends with the run, or when a
  server has lost its slice: then all roll back to the newest checkpoint.

  Attributes:
    recorder: checkpoints, telemetry and scores.
  """

  def __init__(
    self, participant: rendezvous.Participant, processes: cluster.Processes, workers: int
  ):
    """Opens data, checkpoints and the port.

    Args:
      participant: this process.
      processes: this process among all.
      workers: number of processes that train.
    """
    self._participant, self._processes = participant, processes
    self._workers = workers
    config = _with_batch_size(participant, workers)
    self._setup = setup = setup_lib.create(config, look_ahead.settings(config, workers))
    workdir = participant.workdir
    evaluation = recorder_lib.open_validation(setup, workdir, processes)
    self.recorder = recorder_lib.Recorder(setup, setup.program, evaluation, workdir, processes)
    self._vote = preemption.CONTINUE
    self._session: session_lib.ChiefSession | None = None
    self._service = participant.open_service()

  def begin_session(self) -> None:
    """Restores the newest checkpoint, or a new state, and serves it."""
    self.recorder.checkpoints.wait()  # for the last save of the session before
    self._end_session()
    recorder, lines = self.recorder, self._describe()
    state = recorder.restore()
    if state is None:
      state, more = self._setup.new_state(recorder.workdir)
      lines += more
    self._metrics = update_metrics.UpdateMetrics(self._setup, self._workers)
    recorder.open_telemetry(lines, self._metrics.clock)
    session = self._session = self._create_session(jax.device_get(state))
    if self._setup.config.strategy.simulate.workers:
      recorder.telemetry.simulate(session.seconds.__getitem__)
    if recorder.owes_evaluation():
      self._evaluate(recorder.start_step, state, contextlib.nullcontext())
      recorder.checkpoints.wait()
    self._service.session = session

  def supervise(
    self,
    job: futures.Future | None,
    worker: gradient_worker.Worker | simulation_lib.Simulation | None,
  ) -> bool:
    """Scores, saves and reports until the session ends.

    Args:
      job: run of this process's worker; None: it has none.
      worker: the same worker, or None.

    Returns:
      Whether the run has ended too.

    Raises:
      cluster.RunFailedError: if a gradient or an update is not finite, say.
    """
    session, recorder = self._session, self.recorder
    assert session is not None  # `begin_session` was called
    store, scheduler = session.store, session.scheduler
    saved = applied = store.version
    recorder.telemetry.start_timing(saved)
    self._vote = preemption.CONTINUE
    while True:
      version = store.next_snapshot()
      if version is None and store.version == scheduler.limit:
        version = store.version
      # After the version was made, so that its metrics are there.
      self._metrics.log(session.applied, recorder.telemetry)
      if store.version != applied:
        applied = store.version
        self._processes.heartbeat('step', applied)
      if store.error:
        session.fail(store.error)
      if session.failed:
        raise cluster.RunFailedError(session.failed)
      if session.status == session_lib.LOST:
        logging.warning('a parameter server restarted: rolling back to the newest checkpoint')
        return False
      if not self._vote and self._processes.vote():
        self._vote = self._processes.vote()
        session.stop()
      if job and job.done():
        job.result()
      if version is None:
        time.sleep(_POLL)
        continue
      is_last = version == scheduler.limit
      if version > saved:
        state = self._collect(session, version)
        if state is None:
          continue
        saved = version
        if is_last or recorder.saves_at(version):
          # The checkpoint's tickets are those in the log.
          session.log.sync()
          recorder.save(version, state)
        # An evaluation that a stop puts off comes first when the run resumes.
        if recorder.evaluates_at(version) and (not self._vote or version == recorder.total_steps):
          self._evaluate(version, state, worker.paused() if worker else contextlib.nullcontext())
      if is_last:
        return True

  def simulation(self) -> simulation_lib.Simulation | None:
    """Returns what stands in for workers; None if they are real."""
    if not self._setup.config.strategy.simulate.workers:
      return None
    assert self._session is not None  # `begin_session` was called
    records = log_lib.read(self._participant.workdir)
    return simulation_lib.Simulation(self._setup, self._session, records)

  def finish(self) -> dict[str, float]:
    """Ends the run well; returns the last scores."""
    assert self._session is not None  # `supervise` has returned
    self.recorder.checkpoints.wait()
    self._session.finish()
    self._participant.announce_end('')
    self.recorder.telemetry.close()
    return self.recorder.finish(self._session.store.version, self._vote)

  def fail(self, text: str) -> None:
    """Tells the other processes why the run cannot continue."""
    if self._session:
      self._session.fail(text)
    self._participant.announce_end(text)

  def close(self) -> None:
    """Lets the other processes hear of the end, and closes the port."""
    s = self._setup.config.strategy
    if self._session and not s.simulate.workers:
      self._session.wait_until_alone(self._workers + s.servers - 1, _FAREWELL)
    self._end_session()
    self.recorder.close()
    self._service.shutdown()

  def _describe(self):
    """Lines about the servers and, where they are simulated, the workers."""
    config, setup = self._setup.config, self._setup
    s = config.strategy
    lines = [
      f'server   {s.mode}: {self._workers} workers, {s.servers} '
      f'{"dedicated servers" if s.dedicated else "of them servers"}'
      f'{look_ahead.describe(setup.ahead)}'
    ]
    if s.simulate.workers:
      lines.append(f'workers  {simulation_lib.describe(config, setup.layout)}')
    return lines

  def _create_session(self, state):
    """A session that begins with a TrainState of NumPy arrays."""
    setup, workdir = self._setup, self._participant.workdir
    config, version = setup.config, int(state.step)
    records = log_lib.read(workdir)
    log = log_lib.UpdateLog(
      workdir,
      version,
      {
        'duration': config.duration,
        'servers': config.strategy.servers,
        'shards': scheduler_lib.data_shards(config, self._workers),
        'batch_size': config.batch_size,
        'look_ahead': vars(setup.ahead),
        'workers': self._workers,
        'changeable': log_lib.changeable(config),
      },
    )
    roster = self._roster()
    starts = [optimizer.start(state) for optimizer in setup.optimizers]
    store = parameter_store.ParameterStore(
      setup.optimizers[0],
      starts[0],
      session_lib.snapshot_test(roster.settings),
      roster.settings['max_pending'],
    )
    scheduler = scheduler_lib.TicketScheduler(
      config, setup.spec.total_steps, version, log_lib.used_steps(records, version), self._workers
    )
    session = session_lib.ChiefSession(secrets.token_hex(8), store, scheduler, log, starts, roster)
    session.seconds[version] = log_lib.simulated_seconds(records, version)
    return session

  def _roster(self):
    """Server 0, and what it tells those that join."""
    config, spec = self._setup.config, self._setup.spec
    return session_lib.Roster(
      addresses={0: self._service.address},
      process=self._participant.process,
      launches=self._participant.launches,
      settings={
        'batch_size': config.batch_size,
        'data_shards': scheduler_lib.data_shards(config, self._workers),
        'snapshot_every': [spec.steps(config.eval.every), spec.steps(config.checkpoint.every)],
        'data': agreement.describe(self._setup.source),
        # What workers can have in flight, and some more that are gone.
        'max_pending': 8 * config.strategy.in_flight * (self._workers + 1),
      },
    )

  def _end_session(self):
    self._service.session = None
    if self._session:
      self._session.close()
      self.recorder.telemetry.close()
    self._session = None

  def _collect(self, session, version) -> state_lib.TrainState | None:
    """A version's whole state; None if the session is lost or has failed."""
    setup = self._setup
    states = [session.store.snapshot(version, 0)]
    for index, optimizer in enumerate(setup.optimizers[1:], 1):
      data = self._fetch_snapshot(session, version, index)
      if data is None:
        return None
      states.append(service_lib.unpack_state(optimizer, data))
    state = slice_optimizer.join(setup.layout, setup.optimizers, states)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.program.abstract_state)
    return jax.device_put(state, shardings)

  def _fetch_snapshot(self, session, version, index):
    """Another server's slice, or None; waits while the server reconnects."""
    timeout = self._setup.config.cluster.rendezvous_timeout
    deadline = time.monotonic() + timeout
    while session.status != session_lib.LOST and not session.failed:
      try:
        client = self._participant.connect(session.roster.addresses[index])
        with contextlib.closing(client):
          _, data = client.get('snapshot', session=session.name, version=version)
          return data
      except transport.CONNECTION_ERRORS as e:
        text = transport.describe_error(e)
        if 'refused:' in str(e):
          raise cluster.RunFailedError(f'server {index}: {text}') from e
        if time.monotonic() > deadline:
          raise cluster.PeerLostError(
            f'server {index} has not sent its slice of version {version} '
            f'within {timeout:g} s: {text}'
          ) from e
        time.sleep(_POLL)
    return None

  def _evaluate(self, version, state, pause):
    """Scores a state while this process computes no gradient; others go on."""
    start = time.monotonic()
    with pause:
      self.recorder.evaluate(version, state)
    self.recorder.telemetry.log_duration('evaluating', time.monotonic() - start)


def _with_batch_size(participant, workers) -> ml_collections.ConfigDict:
  """The config of a run, with a batch size that divides over the workers."""
  data_shards = scheduler_lib.data_shards(participant.config, workers)
  config = run_dir.with_batch_size(
    participant.config, participant.workdir, jax.local_device_count() * data_shards
  )
  if config.batch_size % data_shards:
    raise config_lib.ConfigError(
      f'config.batch_size={config.batch_size} does not divide by the '
      f'{data_shards} workers that an update is made of'
    )
  return config
