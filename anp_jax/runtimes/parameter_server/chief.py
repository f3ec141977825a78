"""Server 0's process: the order of updates, and the sessions of a run."""

import contextlib
import secrets
import time

from absl import logging
import jax

from anp_jax import cluster, config as config_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.cluster import preemption
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  log as log_lib,
  look_ahead,
  parameter_store,
  recorder as recorder_lib,
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
  """

  def __init__(self, participant: rendezvous.Participant, processes, workers: int):
    """Opens data, checkpoints and the port.

    Args:
      participant: this process.
      processes: this process among all.
      workers: processes that train.
    """
    self._participant = participant
    self._processes = processes
    self._workers = workers
    self._data_shards = scheduler_lib.data_shards(participant.config, workers)
    self._config = config = self._with_batch_size()
    self._setup = setup_lib.create(config, look_ahead.settings(config, workers))
    self._recorder = recorder_lib.Recorder(config, self._setup, participant.workdir, processes)
    self._vote = preemption.CONTINUE
    self._session = None
    self._service = participant.open_service()

  def begin_session(self) -> None:
    """Restores the newest checkpoint, or a new state, and serves it."""
    self._recorder.wait()  # for the last save of the session before
    self._end_session()
    state = self._recorder.begin(self._describe())
    self._open_session(jax.device_get(state), int(state.step))

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
    pause = worker.paused if worker else contextlib.nullcontext
    saved = applied = store.version
    self._recorder.start_updates(self._workers)
    self._vote = preemption.CONTINUE
    while True:
      self._recorder.log_updates(session.applied)
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

  def simulation(self) -> simulation_lib.Simulation | None:
    """Returns what stands in for workers; None if they are real."""
    if not self._config.strategy.simulate.workers:
      return None
    records = log_lib.read(self._participant.workdir)
    return simulation_lib.Simulation(self._config, self._setup, self._session, records)

  def expected_save_seconds(self) -> float:
    """Returns the seconds that a save takes while training continues."""
    return self._recorder.expected_save_seconds()

  def finish(self) -> dict:
    """Ends the run well; returns the last scores."""
    self._recorder.wait()
    self._session.finish()
    self._participant.announce_end('')
    reason = preemption.REASONS.get(self._vote, 'a signal')
    return self._recorder.report(self._session.store.version, reason)

  def fail(self, text: str) -> None:
    """Tells the other processes why the run cannot continue."""
    if self._session:
      self._session.fail(text)
    self._participant.announce_end(text)

  def close(self) -> None:
    """Lets the other processes hear of the end, and closes the port."""
    s = self._config.strategy
    if self._session and not s.simulate.workers:
      self._session.wait_until_alone(self._workers + s.servers - 1, _FAREWELL)
    self._end_session()
    self._recorder.close()
    self._service.shutdown()

  def _with_batch_size(self):
    participant, data_shards = self._participant, self._data_shards
    config = workdir_lib.with_batch_size(
      participant.config, participant.workdir, jax.local_device_count() * data_shards
    )
    if config.batch_size % data_shards:
      raise config_lib.ConfigError(
        f'config.batch_size={config.batch_size} does not divide by the '
        f'{data_shards} workers that an update is made of'
      )
    return config

  def _describe(self):
    """Lines about the servers and, where they are simulated, the workers."""
    s = self._config.strategy
    lines = [
      f'server   {s.mode}: {self._workers} workers, {s.servers} '
      f'{"dedicated servers" if s.dedicated else "of them servers"}'
      f'{look_ahead.describe(self._setup.ahead)}'
    ]
    if s.simulate.workers:
      lines.append(f'workers  {simulation_lib.describe(self._config, self._setup.layout)}')
    return lines

  def _open_session(self, state, version):
    config, setup, workdir = self._config, self._setup, self._participant.workdir
    used = log_lib.used_steps(log_lib.read(workdir), version)
    log = log_lib.UpdateLog(
      workdir,
      version,
      {
        'duration': config.duration,
        'servers': config.strategy.servers,
        'shards': self._data_shards,
        'batch_size': config.batch_size,
        'look_ahead': vars(setup.ahead),
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
    scheduler = scheduler_lib.TicketScheduler(config, setup.total, version, used, self._workers)
    self._session = session_lib.ChiefSession(
      secrets.token_hex(8), store, scheduler, log, starts, run
    )
    self._service.session = self._session

  def _run_info(self):
    s, setup = self._config.strategy, self._setup
    return session_lib.RunInfo(
      address=self._service.address,
      process=self._participant.process,
      launches=self._participant.launches,
      settings={
        'batch_size': self._config.batch_size,
        'data_shards': self._data_shards,
        'snapshot_every': [setup.every('eval'), setup.every('checkpoint')],
        'data': setup.data_description(),
        # What workers can have in flight, and some more that are gone.
        'max_pending': 8 * s.in_flight * (self._workers + 1),
      },
      metric_names=update_metrics.names(setup.objective),
    )

  def _end_session(self):
    self._service.session = None
    if self._session:
      self._session.close()
      self._recorder.end()
    self._session = None

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
      setup.program.abstract_state,
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
    is_evaluated = version % self._setup.every('eval') == 0
    if is_last or is_evaluated or version % self._setup.every('checkpoint') == 0:
      # The checkpoint's tickets are those in the log.
      self._session.log.sync()
      self._recorder.save(version, state)
    if version == self._setup.total or (is_evaluated and not self._vote):
      self._recorder.score(version, state, pause, self._session.seconds.get(version))
