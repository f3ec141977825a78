"""One process of a ring: its stations, and what they share."""

import contextlib
import os
import time

import jax

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.cluster import preemption
from anp_jax.data import sources
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.relay import candidates as candidates_lib
from anp_jax.runtimes.relay import controller as lead_lib
from anp_jax.runtimes.relay import ensemble
from anp_jax.runtimes.relay import leaderboard as board_lib
from anp_jax.runtimes.relay import schedule as itinerary_lib
from anp_jax.runtimes.relay import spans as spans_lib
from anp_jax.runtimes.relay import store as store_lib
from anp_jax.runtimes.relay import worker as station_lib
from anp_jax.system import compile_cache
from anp_jax.training import objective as objective_lib

_POLL = 0.05  # seconds


def run(
  config, workdir: str, processes: cluster.Processes, mode: str = 'train',
  which: str = 'newest',
) -> dict:  # fmt: skip
  """Trains, or goes on with, the models of a ring; or scores them again.

  Args:
    config: resolved and valid.
    workdir: folder of the run, which all processes see.
    processes: of the run.
    mode: 'train' or 'evaluate'.
    which: checkpoint that mode 'evaluate' scores: 'newest' or a step.

  Returns:
    On process 0, the last scores of the best model, {} if there are none.

  Raises:
    ConfigError: if the config fits neither the devices nor the workdir.
    cluster.Failed: if too many examples cannot be read.
  """
  processes.check_shared(workdir)
  compile_cache.enable(config)
  if mode == 'evaluate' and processes.count > 1:
    raise config_lib.ConfigError(
      f'--mode=evaluate of a ring takes one process, not {processes.count}'
    )
  with contextlib.ExitStack() as stack:
    ring = Ring(config, workdir, processes, stack, mode == 'train')
    if mode == 'evaluate':
      return ring.lead.evaluate(which)
    return ring.train()


class Ring:
  """What the stations of a process share.

  Attributes:
    candidates: all models.
    laps: `board.Laps`.
    sizes: examples of each station's part.
    stations: of all processes.
    source: of the training examples.
    eval_source: of the validation examples.
    lead: `lead.Lead`, on process 0; None on others.
    spans: `spans.Spans`.
    store: `store.Store`.
    stopped: whether no further step is to be made.
  """

  def __init__(self, config, workdir, processes, stack, training):
    """Opens data and ports; nothing is trained yet."""
    self._config, self._workdir = config, workdir
    self._processes = processes
    meshes = _meshes(config)
    counts = processes.gather(len(meshes))
    first = sum(counts[: processes.index])
    # The process of each station.
    self._owners = [p for p, count in enumerate(counts) for _ in range(count)]
    self.stations = len(self._owners)
    self.candidates = candidates_lib.create(config, meshes[0].size)
    self.source = source = sources.open_source(config, training=True)
    self.eval_source = sources.open_source(config, training=False)
    objective = objective_lib.create(source.vocabulary, config)
    checkpoint_lib.check_best_metric(config, objective.metric_names)
    self._seats = config.strategy.at_once or len(self.candidates)
    self.sizes = itinerary_lib.sizes(config, len(source), self.stations)
    self.laps = board_lib.Laps(
      config,
      candidates_lib.epochs('duration', config.duration),
      candidates_lib.epochs('eval.every', config.eval.every),
    )
    self.stopped = self._over = False
    self.store = store_lib.Store(
      config, workdir, self.candidates, source,
      lambda model: self.runner(model).like,
      config_lib.steps(
        config.log.every, self.candidates[0].config.batch_size, len(source)
      ),
      training,
    )  # fmt: skip
    self._claim(training)
    parts = itinerary_lib.parts(config, source, self.stations)
    self.spans = spans_lib.Spans(workdir, processes.index)
    stack.callback(self.spans.close)
    self.lead = self._mail = None
    if not processes.index:
      self.lead = lead_lib.Lead(config, workdir, self, objective, self._seats)
    self._local = {}
    for i, mesh in enumerate(meshes):
      number = first + i
      choose = station_lib.in_order if number else self.lead.choose
      self._local[number] = station_lib.Station(
        number, mesh, parts[number], self, choose
      )
    # Bad input is told now, rather than when a model's turn comes.
    for candidate in self.candidates:
      self.runner(candidate.index)
    stack.callback(self._close)
    if processes.count > 1:
      from anp_jax.runtimes.relay import messages  # Flight is imported

      self._mail = messages.Mail(
        config, processes, self.spans, self._put, self._heard, self.store.let_go
      )
      stack.callback(self._mail.close)

  def train(self) -> dict:
    """Until all models have left the ring, or a signal."""
    processes = self._processes
    vote = preemption.CONTINUE
    if self._config.log.tensorboard:
      # Seconds where torch is installed; not in the middle of a turn.
      import tensorboardX  # noqa: F401
    with processes.handling_signals(self.store.expected_save_seconds):
      models = processes.gather(self.lead.begin() if self.lead else None)[0]
      for station in self._local.values():
        station.start(*models, self._seats)
      while not self._over and not self.stopped:
        vote = processes.vote()
        if vote:
          self._tell_all('stop')
        self._look()
        if self.lead and self.lead.is_over():
          self._tell_all('over')
        time.sleep(_POLL)
      self._halt()
      done = self._finish()
    return self.lead.conclude(done, vote) if self.lead else {}

  @property
  def first(self) -> station_lib.Station:
    """The first of this process's stations."""
    return next(iter(self._local.values()))

  def runner(self, model: int):
    """A model's `runner.Runner`, at that station."""
    return self.first.runner(model)

  # What stations call, from their threads.

  def send(self, station: int, item) -> None:
    """Passes a parcel, a score or word of one that has gone on."""
    owner = self._owners[station]
    if owner != self._processes.index:
      self._mail.send(owner, station, item)
      return
    if isinstance(item, station_lib.Parcel):
      self._local[station].expect(item)
    self._put(station, item)

  def scorer(self, model: int, laps: int) -> int:
    """The station that scores a model after so many laps."""
    # In turn; in the end the first, which is the first to have nothing to do.
    return 0 if laps == self.laps.count else (model + laps) % self.stations

  def scored(self, model: int, laps: int, step: int, scores: dict) -> None:
    """Hands a model's scores in."""
    self._to_lead(
      'scored', {'model': model, 'laps': laps, 'step': step, 'scores': scores}
    )

  def failed(self, model: int, step: int, text: str) -> None:
    """Says that a model cannot go on."""
    self._to_lead('failed', {'model': model, 'step': step, 'text': text})

  def keep_probabilities(self, model, scores, labels, weights) -> None:
    """Keeps what a model that is done makes of the validation set."""
    ensemble.keep(self.store.folder(model), scores, labels, weights)

  # Beginning.

  def _claim(self, training):
    """Refuses the workdir of another run; to train, process 0 takes it."""
    text = ''
    if not self._processes.index:
      text = store_lib.claim(
        self._workdir, self._config, training, parts=list(self.sizes),
        laps=self.laps.count, models=[c.text for c in self.candidates],
        vocabulary=self.source.vocabulary,
      )  # fmt: skip
    text = self._processes.gather(text)[0]
    if text:
      raise config_lib.ConfigError(text)
    if training and not self._processes.index:
      for c in self.candidates:
        os.makedirs(self.store.folder(c.index), exist_ok=True)

  # While it goes on.

  def _look(self):
    """Raises what a station or the post has raised; says that all is well."""
    for station in self._local.values():
      if station.error:
        raise station.error
    if self._mail:
      self._mail.look()
    if all(station.waits for station in self._local.values()):
      self._processes.heartbeat('waiting')
    else:
      steps = sum(station.steps for station in self._local.values())
      self._processes.heartbeat('training', steps)

  def _put(self, station, item):
    self._local[station].inbox.put(item)

  def _heard(self, name, request):
    """Called by the post with a message; and here with one to this process."""
    if name == 'stop':
      self.stopped = True
    elif name == 'over':
      self._over = True
    elif name == 'scored':
      self.lead.scored(**request)
    elif name == 'failed':
      self.lead.failed(**request)
    if self.lead:
      self.first.inbox.wake()

  def _to_lead(self, name, request):
    if self.lead:
      self._heard(name, request)
    else:
      self._mail.tell(0, name, request)

  def _tell_all(self, name):
    self._heard(name, {})
    for process in range(self._processes.count):
      if process != self._processes.index:
        self._mail.tell(process, name, {})

  # Ending.

  def _halt(self):
    """Returns when no station works and all that was sent has come."""
    for station in self._local.values():
      station.stop()
    for station in self._local.values():
      station.join()
    self._look()
    if self._mail:
      self._mail.wait()
    # From here on nothing comes any more.
    self._processes.gather('halted')

  def _finish(self):
    """Saves what is here, and scores what waits; steps made, by model."""
    self._processes.heartbeat('saving')
    steps = {}
    for station in self._local.values():
      for parcel in station.inbox.parcels:
        if isinstance(parcel, station_lib.Gone):
          continue
        steps[parcel.model] = parcel.step
        if parcel.state is None:
          continue
        state = station.runner(parcel.model).place(parcel.state)
        self.store.save(parcel.model, parcel.step, state)
    self.store.wait()
    self._processes.heartbeat('evaluating')
    for station in self._local.values():
      for item in station.inbox.scores:
        station.score(item)
    found = self._processes.gather(steps)
    return {int(m): step for part in found for m, step in part.items()}

  def _close(self):
    for station in self._local.values():
      station.stop()
      station.close()
    self.store.close()


def _meshes(config):
  """Of each of this process's stations."""
  devices = jax.local_devices()
  each = 1 if config.strategy.station == 'device' else len(devices)
  return [
    mesh_lib.create(config, devices[i : i + each])
    for i in range(0, len(devices), each)
  ]
