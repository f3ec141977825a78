"""Server 0's process: the order of updates, and what the run keeps."""

import collections
from concurrent import futures
import contextlib
import time
from typing import Any

import jax
import ml_collections

from anp_jax import cluster, recorder as recorder_lib
from anp_jax.checkpoint import run_dir
from anp_jax.cluster import preemption
from anp_jax.data.sources import agreement
from anp_jax.parallel import state as state_lib
from anp_jax.runtimes import single_process, transport
from anp_jax.runtimes.parameter_server import (
  gradient_worker,
  log as log_lib,
  look_ahead,
  parameter_store,
  participant as participant_lib,
  scheduler as scheduler_lib,
  service as service_lib,
  session as session_lib,
  setup as setup_lib,
  slice_optimizer,
  update_metrics,
)
from anp_jax.system import error_lines

_POLL = 0.02  # seconds
STOP = 'stop'  # what a process says that was told to


class Chief:
  """Server 0: it begins with the newest checkpoint, and ends the run.

  Attributes:
    recorder: checkpoints, telemetry and scores.
  """

  def __init__(
    self, participant: participant_lib.Participant, processes: cluster.Processes, workers: int
  ):
    """Opens data and checkpoints.

    Args:
      participant: this process.
      processes: this process among all.
      workers: number of processes that train.
    """
    self._participant, self._processes = participant, processes
    self._workers = workers
    config = _with_batch_size(participant, workers)
    self._setup = setup = setup_lib.create(config, look_ahead.settings(config, workers))
    alone: Any = single_process.SingleProcess(processes)
    workdir = participant.workdir
    evaluation = recorder_lib.claim(setup, workdir, alone)
    self.recorder = recorder_lib.Recorder(setup, setup.program, evaluation, workdir, alone)
    self._vote = preemption.CONTINUE
    self._session: session_lib.ChiefSession | None = None
    self._here: dict[int, tuple] = {}  # port and worker of each that has come, see `_welcome`
    # Ranks of the run's processes; those that it begins with may say who they are later.
    self._present = {rank for rank, host in enumerate(processes.hosts) if host or not rank}
    # Why a process was lost, [] where one has come; processes that go on; version.
    self._changes: collections.deque[tuple[list[str], tuple[int, int], int]] = collections.deque()

  def open(self, worker: list | None) -> None:
    """Restores the newest checkpoint, or a new state, and serves it.

    Args:
      worker: this process as a worker, see `Participant.worker`; None: it does not train.
    """
    recorder, lines = self.recorder, self._describe()
    state = recorder.restore()
    if state is None:
      state, more = self._setup.new_state(recorder.workdir)
      lines += more
    metrics = self._metrics = update_metrics.UpdateMetrics(self._setup, self._workers)
    recorder.open_telemetry(lines, metrics.clock)
    session = self._session = self._create_session(jax.device_get(state))
    if recorder.owes_evaluation():
      self._evaluate(recorder.start_step, state, contextlib.nullcontext())
      recorder.checkpoints.wait()
    participant = self._participant
    self._service = service_lib.Service(participant.config, participant.env)
    self._service.opened.set_result(session)
    self._on_mail(0, {'endpoint': self._service.endpoint, 'worker': worker})
    self._processes.receive_mail(self._on_mail)

  def supervise(self, job: futures.Future | None, worker: gradient_worker.Worker | None) -> None:
    """Scores, saves and reports until the run ends.

    Args:
      job: run of this process's worker; None: it has none.
      worker: the same worker, or None.

    Raises:
      cluster.RunFailedError: if a gradient or an update is not finite, say.
    """
    session, recorder = self._session, self.recorder
    assert session is not None  # `open` was called
    store, scheduler = session.store, session.scheduler
    saved = applied = store.version
    with recorder.telemetry.paused('compiling'):  # until the first update
      while store.version == saved < scheduler.limit and not (
        store.error or session.failed or self._processes.vote() or (job and job.done())
      ):
        self._report_changes()
        time.sleep(_POLL)
    while True:
      version = store.next_snapshot()
      if version is None and store.version == scheduler.limit:
        version = store.version
      # After the version was made, so that its metrics are there.
      self._metrics.log(session.applied, recorder.telemetry)
      self._report_changes()
      if store.version != applied:
        applied = store.version
        self._processes.heartbeat('step', applied)
      if store.error:
        session.fail(store.error)
      if session.failed:
        raise cluster.RunFailedError(session.failed)
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
        return

  def finish(self) -> dict[str, float]:
    """Ends the run well; returns the last scores."""
    assert self._session is not None  # `supervise` has returned
    self.recorder.checkpoints.wait()
    self.recorder.telemetry.close()
    return self.recorder.finish(self._session.store.version, self._vote)

  def close(self) -> None:
    """Tells all processes that the run is over, and closes the port."""
    self._participant.leave()
    for rank in range(1, self._processes.count):
      self._processes.send(rank, participant_lib.OVER)
    if self._session:
      self._session.close()
      self.recorder.telemetry.close()
    self.recorder.close()
    if self._here:
      self._service.shutdown()

  def _on_mail(self, rank, value, why_lost=''):
    """Handles what another process says, or that it is lost; called by another thread."""
    if why_lost:
      _, worker = self._here.pop(rank, (None, None))
      if worker:
        self._session.release(worker[0])
      if rank in self._present:
        self._present.discard(rank)
        self._note_change([why_lost])
    elif value == STOP:
      self._processes.order('stop')
    elif self._participant.over.is_set():
      self._tell(rank, participant_lib.OVER)
    else:
      self._welcome(rank, **value)

  def _welcome(self, rank, endpoint, worker):
    """Invites a process that has come, once all servers are there."""
    if worker:
      first = next((other for _, other in self._here.values() if other), worker)
      if worker[1:] != first[1:]:
        problem = f'rank {rank} has {worker[1:]}, the first worker {first[1:]}'
        self._tell(rank, {'problem': f'{problem}: a replay needs devices alike'})
        return
      self._session.devices = worker[1]
    self._here[rank] = endpoint, worker
    if rank not in self._present:
      self._present.add(rank)
      self._note_change([])
    ranks = range(self._setup.config.strategy.servers)
    if self._here.keys() >= {*ranks}:
      servers = [self._here[i][0] for i in ranks]
      # All others have waited for the last server.
      for waiting in self._here if endpoint else [rank]:
        self._tell(waiting, {'servers': servers, **self._settings()})

  def _note_change(self, lost):
    count = len(self._present)
    processes = count, count + 1 if lost else count - 1
    self._changes.append((lost, processes, self._session.store.version))

  def _report_changes(self):
    """Says which processes were lost, and where others have come; nobody has waited."""
    while self._changes:
      self.recorder.telemetry.restart(*self._changes.popleft(), seconds=0.0, repeated=0)

  def _tell(self, rank, value):
    if rank:
      self._processes.send(rank, value)
    else:
      self._participant.on_mail(rank, value)

  def _describe(self):
    """The line about the servers."""
    s = self._setup.config.strategy
    return [
      f'server   {s.mode}: {self._workers} workers, {s.servers} '
      f'{"dedicated servers" if s.dedicated else "of them servers"}'
      f'{look_ahead.describe(self._setup.ahead)}'
    ]

  def _create_session(self, state):
    """A session that begins with a TrainState of NumPy arrays."""
    setup, workdir = self._setup, self._participant.workdir
    config, version = setup.config, int(state.step)
    settings = self._settings()
    data_shards = settings['data_shards']
    used = log_lib.used_tickets(log_lib.read(workdir), version, data_shards)
    recorded = log_lib.session_settings(config, data_shards, setup.ahead, self._workers)
    log = log_lib.UpdateLog(workdir, version, recorded)
    starts = [optimizer.start(state) for optimizer in setup.optimizers]
    store = parameter_store.ParameterStore(
      setup.optimizers[0], starts[0], session_lib.snapshot_test(settings), settings['max_pending']
    )
    scheduler = scheduler_lib.TicketScheduler(
      config, setup.spec.total_steps, version, used, self._workers
    )
    return session_lib.ChiefSession(store, scheduler, log, starts)

  def _settings(self):
    """What server 0 tells those that take part."""
    config, spec = self._setup.config, self._setup.spec
    data_shards = scheduler_lib.data_shards(config, self._workers)
    return {
      'batch_size': config.batch_size,
      'data_shards': data_shards,
      'snapshot_every': [spec.steps(config.eval.every), spec.steps(config.checkpoint.every)],
      'data': agreement.describe(self._setup.source),
      # What workers can have in flight, some more that are gone, and an update's.
      'max_pending': 8 * config.strategy.in_flight * (self._workers + 1) + data_shards,
    }

  def _collect(self, session, version) -> state_lib.TrainState | None:
    """A version's whole state; None if the run has failed."""
    setup = self._setup
    states = [session.store.snapshot(version, 0)]
    for index, optimizer in enumerate(setup.optimizers[1:], 1):
      data = self._fetch_snapshot(session, version, index)
      if data is None:
        return None
      states.append(transport.split(data, optimizer.abstract_state))
    state = slice_optimizer.join(setup.layout, setup.optimizers, states)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.program.abstract_state)
    return jax.device_put(state, shardings)

  def _fetch_snapshot(self, session, version, index):
    """Another server's slice, or None; if that is lost, so is this process soon."""
    while not session.failed:
      try:
        client = self._participant.connect(self._here[index][0])
        with contextlib.closing(client):
          answer, data = client.get('snapshot', version=version)
          if 'wait' not in answer:
            return data
      except transport.CONNECTION_ERRORS as e:
        if 'refused:' in str(e):
          raise cluster.RunFailedError(f'server {index}: {error_lines.typed_line(e)}') from e
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
  config = run_dir.with_sizes(
    participant.config, participant.workdir, jax.local_device_count() * data_shards
  )
  scheduler_lib.check_batch(config, data_shards)
  return config
