"""Server 0's process: the order, scores, checkpoints and what is said."""

import contextlib
import secrets
import time

from absl import logging
import jax

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.cluster import preemption
from anp_jax.data import sources
from anp_jax.reporting import run_page
from anp_jax.reporting import summary
from anp_jax.reporting.analysis import run as evaluation
from anp_jax.runtimes import transport
from anp_jax.runtimes.server import log as log_lib
from anp_jax.runtimes.server import parameter_store as keeper_lib
from anp_jax.runtimes.server import readings as readings_lib
from anp_jax.runtimes.server import rendezvous
from anp_jax.runtimes.server import scheduler as desk_lib
from anp_jax.runtimes.server import service as service_lib
from anp_jax.runtimes.server import setup as setup_lib
from anp_jax.runtimes.server import shard as shard_lib
from anp_jax.runtimes.server import worker as worker_lib
from anp_jax.training import eval_loop

_POLL = 0.02  # seconds
_PARTING = 10.0  # seconds that the others have to hear of the end


class Lead:
  """Server 0, from one term to the next.

  A term begins with the newest checkpoint and ends with the run, or when a
  server has lost its slice: then all go back to the newest checkpoint.
  """

  def __init__(self, config, workdir: str, processes, card, workers: int):
    """Opens data, checkpoints and the port.

    Args:
      config: the run's config; its batch size is filled in.
      workdir: of the run.
      processes: this one, of how many.
      card: of this process, see `cluster.process_info`.
      workers: processes that train.
    """
    self._config = config
    self._workdir = workdir
    self._processes = processes
    self._card = card
    self._workers = workers
    shards = desk_lib.shards(config, workers)
    workdir_lib.batch_size(config, workdir, jax.local_device_count() * shards)
    if config.batch_size % shards:
      raise config_lib.ConfigError(
        f'config.batch_size={config.batch_size} does not divide by the '
        f'{shards} workers that an update is made of'
      )
    self._ahead = desk_lib.ahead(config, workers)
    self._setup = setup = setup_lib.create(config, self._ahead)
    self._parts = setup.parts
    self._eval_source = sources.open_source(config, training=False)
    if config.checkpoint.keep_best:
      checkpoint_lib.check_best_metric(config, setup.objective.metric_names)
    workdir_lib.open_or_refuse(workdir, config, setup.source.vocabulary)
    workdir_lib.record_class_sizes(workdir, setup.source)
    self._checkpoints = checkpoint_lib.Checkpoints(
      workdir, config, sources.fingerprint(setup.source), setup.parts.like
    )
    self._stream = setup.stream()
    examples = len(setup.source)
    self._every = {
      name: config_lib.steps(config[name].every, config.batch_size, examples)
      for name in ('log', 'eval', 'checkpoint')
    }
    # What the others are told when they come.
    self._settings = {
      'batch_size': config.batch_size,
      'shards': shards,
      'due': [self._every['eval'], self._every['checkpoint']],
      # As many gradients as workers can have on their way, and those of some
      # that are gone.
      'most': 8 * config.strategy.lanes * (workers + 1),
    }
    self._scores, self._vote = {}, preemption.CONTINUE
    self._updated = None  # when the update was made that is being told of
    self._term = self._log = self._telemetry = None
    self._service = rendezvous.open_service(config, processes.env, workdir)

  def begin(self) -> bool:
    """A term; False if the run is finished already."""
    if self._term:  # its last save may be under way
      self._checkpoints.wait()
    self._end_term()
    restored = self._checkpoints.restore()
    total = self._parts.total
    taken = []
    if restored:
      state = restored[0]
    else:
      state, taken = self._setup.start(self._workdir)
    version = int(state.step)
    self._telemetry = summary.telemetry(
      self._config, self._workdir, self._setup.mesh, total,
      self._config.batch_size, len(self._setup.source), version,
      lambda: self._updated or time.monotonic(),
    )  # fmt: skip
    self._introduce(version, total, taken)
    # Stopped before, or in, the evaluation of its last step.
    scored = version == total or version % self._every['eval'] == 0
    if version and scored and not summary.is_scored(self._workdir, version):
      self._score(version, state, contextlib.nullcontext())
      self._checkpoints.wait()
    used = log_lib.applied(log_lib.read(self._workdir), version)
    self._open_term(jax.device_get(state), version, used)
    self._trained = version < total
    return self._trained

  def attend(self, job, worker) -> bool:
    """Scores, saves and tells until the term ends; whether the run does.

    Args:
      job: the worker of this process, at work; or None.
      worker: the same, or None.

    Raises:
      cluster.Failed: if a gradient or an update is not finite, say.
    """
    term, keeper = self._term, self._term.keeper
    readings = readings_lib.Readings(
      self._setup, self._every['log'], self._workers, self._telemetry
    )
    idle = worker.idle if worker else contextlib.nullcontext
    version = seen = keeper.version
    self._telemetry.begin(version)
    self._vote = preemption.CONTINUE
    while True:
      while term.updates:
        # Rates are those of the updates, also of what piled up while this
        # thread was scoring.
        self._updated, *update = term.updates.popleft()
        readings.add(*update)
        self._updated = None
      if keeper.version != seen:
        seen = keeper.version
        self._processes.heartbeat('step', seen)
      if keeper.error:
        term.fail(keeper.error)
      if term.failed:
        raise cluster.Failed(term.failed)
      if term.lost:
        logging.warning('a server came anew: back to the newest checkpoint')
        return False
      if not self._vote and self._processes.vote():
        self._vote = self._processes.vote()
        term.stop()
      if job:
        job.done()
      due = keeper.due()
      if due is None and keeper.version == term.desk.limit:
        due = keeper.version
      if due is None:
        time.sleep(_POLL)
        continue
      last = due == term.desk.limit
      if due > version:
        state = self._collected(due)
        if state is None:
          continue
        version = due
        self._keep(version, state, last, idle())
      if last:
        return True

  def expected_save_seconds(self) -> float:
    """Seconds that a save takes beside all else."""
    return self._checkpoints.expected_save_seconds()

  def finish(self) -> dict:
    """Ends the run well; returns the last scores."""
    version, total = self._term.keeper.version, self._parts.total
    self._checkpoints.wait()
    self._term.finish()
    rendezvous.close(self._workdir, '')
    if version < total:
      reason = preemption.REASONS.get(self._vote, 'a signal')
      workdir_lib.mark_stopped(self._workdir, version, total, reason)
      self._telemetry.note(
        f'stopped at step {version} of {total}; run the same command to resume'
      )
    elif self._trained or not run_page.exists(self._workdir):
      summary.report(
        self._config, self._workdir, self._setup.mesh, self._parts.like
      )
    self._telemetry.close()
    return self._scores or summary.last_scores(self._workdir)

  def fail(self, text: str) -> None:
    """Tells the others why the run cannot go on."""
    if self._term:
      self._term.fail(text)
    rendezvous.close(self._workdir, text)

  def close(self) -> None:
    """Lets the others hear of the end, and shuts the port."""
    if self._term:
      others = self._workers + self._config.strategy.servers - 1
      self._term.wait_until_alone(others, _PARTING)
    self._end_term()
    self._checkpoints.close()
    self._service.shutdown()

  def _open_term(self, state, version, used):
    config, setup = self._config, self._setup
    self._log = log_lib.Log(
      self._workdir,
      version,
      {
        'duration': config.duration,
        'servers': config.strategy.servers,
        'shards': self._settings['shards'],
        'batch_size': config.batch_size,
        'wire_dtype': config.strategy.wire_dtype,
        'compensation': config.strategy.compensation,
        'ahead': self._ahead,
        'workers': self._workers,
      },
    )
    starts = [shard.start(state) for shard in setup.shards]
    keeper = keeper_lib.Keeper(
      setup.shards[0], starts[0], self._is_due, self._settings['most']
    )
    desk = desk_lib.Desk(
      config, self._parts.total, version, used, self._workers
    )
    self._term = service_lib.Lead(
      secrets.token_hex(8), setup.shards[0], keeper, desk, self._log, starts,
      self._service.address, self._card, self._settings,
      readings_lib.measured(setup.objective),
    )  # fmt: skip
    self._service.term = self._term

  def _end_term(self):
    self._service.term = None
    if self._term:
      self._term.close()
      self._telemetry.close()
    self._term = None

  def _introduce(self, version, total, taken):
    note, setup, s = self._telemetry.note, self._setup, self._config.strategy
    note(f'workdir  {self._workdir}')
    summary.introduce(
      self._telemetry, self._config, setup.mesh, self._parts.like,
      setup.source, self._eval_source,
      workdir_lib.class_sizes(self._workdir, len(setup.source.vocabulary)),
    )  # fmt: skip
    note(
      f'server   {s.mode}: {self._workers} workers, {s.servers} servers'
      f'{" of their own" if s.dedicated else " beside them"}, {s.wire_dtype}'
      f'{f", weights {self._ahead:g} updates ahead" if self._ahead else ""}'
    )
    for line in taken:
      note(line)
    if version == total:
      note(
        f'{self._workdir} is finished: step {version} of {total}; '
        'for more, set a longer config.duration or another --workdir'
      )
    elif version:
      note(f'continuing from step {version} of {total}')

  def _is_due(self, version):
    return service_lib.is_due(self._settings)(version)

  def _collected(self, version):
    """The whole state of a version; None if the term is lost or has failed."""
    setup, term = self._setup, self._term
    states = [term.keeper.snapshot(version, 0)]
    for index, shard in enumerate(setup.shards[1:], 1):
      data = self._fetched(version, index)
      if data is None:
        return None
      leaves = transport.split(data, jax.tree.leaves(shard.like))
      states.append(jax.tree.unflatten(jax.tree.structure(shard.like), leaves))
    whole = shard_lib.whole(setup.flats, setup.shards, states, self._parts.like)
    return jax.tree.map(
      lambda leaf, like: jax.device_put(leaf, like.sharding),
      whole,
      self._parts.like,
    )

  def _fetched(self, version, index):
    """Another server's slice; waits for it to come back, or to come anew."""
    patience = self._config.cluster.rendezvous_timeout
    deadline = time.monotonic() + patience
    while not self._term.lost and not self._term.failed:
      try:
        client = rendezvous.connect(
          self._config, self._workdir, self._term.address_of(index)
        )
        with contextlib.closing(client):
          return client.get('snapshot', term=self._term.name, version=version)[
            1
          ]
      except worker_lib.BROKEN as e:
        if 'refused:' in str(e):
          raise cluster.Failed(f'server {index}: {worker_lib.line(e)}') from e
        if time.monotonic() > deadline:
          raise cluster.Lost(
            f'server {index} has not given its slice of version {version} '
            f'within {patience:g} s: {worker_lib.line(e)}'
          ) from e
        time.sleep(_POLL)
    return None

  def _keep(self, version, state, last, idle):
    """Checkpoint, evaluation and best checkpoint, as far as they are due."""
    if last or version % self._every['checkpoint'] == 0 or (
      version % self._every['eval'] == 0
    ):  # fmt: skip
      # The checkpoint's tickets are those in the log.
      self._log.sync()
      self._checkpoints.save(version, state)
    is_end = version == self._parts.total
    if is_end or (version % self._every['eval'] == 0 and not self._vote):
      self._score(version, state, idle)

  def _score(self, version, state, idle):
    start = time.monotonic()
    source, parts = self._eval_source, self._parts
    with idle:
      batches = self._stream.evaluation(source)
      batches = self._processes.heartbeat_each(batches, 'evaluating', version)
      if version == parts.total and self._config.eval.examples:
        scores = evaluation.of_training(
          self._config, self._workdir, parts, state, batches, source, version
        )
      else:
        scores = eval_loop.run(parts.eval_step, state, batches)
    self._telemetry.spent('evaluating', time.monotonic() - start)
    self._telemetry.evaluation(version, scores)
    self._checkpoints.save_best(version, state, scores)
    self._scores = scores
