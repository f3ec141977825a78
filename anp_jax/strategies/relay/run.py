"""One process of a ring: its stations, and what they share."""

import contextlib
import os
import threading
import time

import jax

from anp_jax import checkpoint as checkpoint_lib
from anp_jax import cluster
from anp_jax import compile_cache
from anp_jax import config as config_lib
from anp_jax import mesh as mesh_lib
from anp_jax import objective as objective_lib
from anp_jax import telemetry
from anp_jax import workdir as workdir_lib
from anp_jax.cluster import stopping
from anp_jax.data import sources
from anp_jax.strategies.relay import board as board_lib
from anp_jax.strategies.relay import candidates as candidates_lib
from anp_jax.strategies.relay import ensemble
from anp_jax.strategies.relay import itinerary as itinerary_lib
from anp_jax.strategies.relay import spans as spans_lib
from anp_jax.strategies.relay import station as station_lib
from anp_jax.strategies.relay import store as store_lib

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
      return ring.evaluate(which)
    return ring.train()


class Ring:
  """What the stations of a process share.

  Attributes:
    candidates: all models.
    laps: `board.Laps`.
    sizes: examples of each station's part.
    stations: of all processes.
    eval_source: of the validation examples.
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
    self._source = source = sources.open_source(config, training=True)
    self.eval_source = sources.open_source(config, training=False)
    self._objective = objective_lib.create(source.vocabulary, config)
    checkpoint_lib.check_best_metric(config, self._objective.metric_names)
    self._seats = config.strategy.at_once or len(self.candidates)
    self.sizes = itinerary_lib.sizes(config, len(source), self.stations)
    self.laps = board_lib.Laps(
      config,
      candidates_lib.epochs('duration', config.duration),
      candidates_lib.epochs('eval.every', config.eval.every),
    )
    self.stopped = self._over = False
    self._lead = not processes.index
    self.store = store_lib.Store(
      config, workdir, self.candidates, source,
      lambda model: self._any().runner(model).like,
      config_lib.steps(
        config.log.every, self.candidates[0].config.batch_size, len(source)
      ),
      training,
    )  # fmt: skip
    self._claim(training)
    parts = itinerary_lib.parts(config, source, self.stations)
    self._lock = threading.Lock()  # of the board
    self._lost = set()  # (model, laps): scores that nobody can make any more
    self.spans = spans_lib.Spans(workdir, processes.index)
    stack.callback(self.spans.close)
    self._desk = self._board = self._mail = None
    if self._lead:
      self._board = board_lib.Board(workdir, self.candidates, self.laps, config)
    self._local = {}
    for i, mesh in enumerate(meshes):
      number = first + i
      choose = station_lib.in_order if number else self._choose
      self._local[number] = station_lib.Station(
        number, mesh, parts[number], self, choose
      )
    # Bad input is told now, rather than when a model's turn comes.
    for candidate in self.candidates:
      self._any().runner(candidate.index)
    stack.callback(self._close)
    if processes.count > 1:
      from anp_jax.strategies.relay import post  # Flight is imported

      self._mail = post.Mail(
        config, processes, self.spans, self._put, self._heard, self.store.let_go
      )
      stack.callback(self._mail.close)

  def train(self) -> dict:
    """Until all models have left the ring, or a signal."""
    processes = self._processes
    vote = stopping.GO_ON
    if self._config.log.tensorboard:
      # Seconds where torch is installed; not in the middle of a turn.
      import tensorboardX  # noqa: F401
    with processes.listening(self.store.to_save):
      models = processes.gather(self._begin() if self._lead else None)[0]
      for station in self._local.values():
        station.start(*models, self._seats)
      while not self._over and not self.stopped:
        vote = processes.vote()
        if vote:
          self._tell_all('stop')
        self._look()
        if self._lead and self._is_over():
          self._tell_all('over')
        time.sleep(_POLL)
      self._halt()
      done = self._finish()
    if self._lead:
      return self._conclude(done, vote)
    return {}

  def evaluate(self, which: str) -> dict:
    """Scores a checkpoint of every model; prints the leaderboard."""
    if which == 'best':
      raise config_lib.ConfigError(
        '--checkpoint=best: of the models of a ring the newest checkpoints are '
        'kept; expected newest or a step'
      )
    station = self._any()
    finished = False
    for candidate in self.candidates:
      restored = self.store.checkpoints(candidate.index).restore(which)
      if restored is None:
        continue
      state, step = restored
      scores = station.runner(candidate.index).score(
        state.evaluated(), self.eval_source
      )
      finished = True
      self._note(f'{candidate.name}  step {step}: {self._text(scores)}')
    if not finished:
      raise config_lib.ConfigError(
        f'{self._workdir} has no checkpoint to evaluate'
      )
    return self._announce()

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

  def keep_scores(self, model: int, step: int) -> None:
    """Adds the scores of a model that is held here to its metrics.jsonl."""
    with self._lock:
      records = self._board.all_scores(model)
    self.store.records.keep_scores(model, step, records)

  def keep_probabilities(self, model, scores, labels, weights) -> None:
    """Keeps what a model that is done makes of the validation set."""
    ensemble.keep(self.store.folder(model), scores, labels, weights)

  def fate(self, parcel) -> str:
    """What becomes of a model at station 0; see `Board.decide`."""
    itinerary = self._any().runner(parcel.model).itinerary
    laps = itinerary.laps_done(parcel.step)
    if not laps or itinerary.ends[laps - 1] != parcel.step:
      laps = 0  # on its way: nothing is decided here
    with self._lock:
      return self._board.decide(parcel.model, laps)

  def leaves(self, parcel) -> None:
    """A model is taken out of the ring at station 0, and saved."""
    if parcel.state is not None:
      state = self._local[0].runner(parcel.model).place(parcel.state)
      self.store.save(parcel.model, parcel.step, state)
    name = self.candidates[parcel.model].name
    self._note(f'{name}  {self.fate(parcel)} at step {parcel.step}')

  def _choose(self, parcels):
    return self._desk.choose(parcels)

  # Beginning.

  def _claim(self, training):
    """Refuses the workdir of another run; to train, process 0 takes it."""
    text = ''
    if self._lead:
      text = store_lib.claim(
        self._workdir, self._config, training, parts=list(self.sizes),
        laps=self.laps.count, models=[c.text for c in self.candidates],
        vocabulary=self._source.vocabulary,
      )  # fmt: skip
    text = self._processes.gather(text)[0]
    if text:
      raise config_lib.ConfigError(text)
    if self._lead and training:
      for c in self.candidates:
        os.makedirs(self.store.folder(c.index), exist_ok=True)

  def _begin(self) -> tuple[list[int], list[int]]:
    """Process 0: what is saved goes to where it is to go on.

    Returns:
      The models that will be in the ring first, and those that enter later.
    """
    board, parcels = self._board, []
    self._desk = station_lib.Desk(self, self._seats)
    self._introduce()
    for candidate in self.candidates:
      model = candidate.index
      checkpoints = self.store.checkpoints(model)
      restored = checkpoints.restore()
      telemetry.cut(self.store.folder(model), restored[1] if restored else 0)
      if restored is None:
        continue
      state, step = restored
      self._desk.known.add(model)
      itinerary = self._any().runner(model).itinerary
      laps = itinerary.laps_done(step)
      self._score_late(checkpoints, itinerary, model, laps)
      fate = board.outcome(model, laps)
      if fate not in (board_lib.GO_ON, board_lib.WAIT):
        continue
      visit = itinerary.at(step)
      self._desk.inside.add(model)
      self._note(f'{candidate.name}  goes on from step {step}')
      parcels.append((visit.station, station_lib.Parcel(model, step, state)))
    for station, parcel in parcels:
      self.send(station, parcel)
    inside = sorted(self._desk.inside)
    new = [c.index for c in self.candidates if c.index not in self._desk.known]
    free = max(self._seats - len(inside), 0)
    return inside + new[:free], new[free:]

  def _score_late(self, checkpoints, itinerary, model, laps):
    """Has those laps scored whose score was cut off."""
    for k in self._board.lacking(model, laps):
      step = itinerary.ends[k - 1]
      if step not in checkpoints.steps():
        self._lost.add((model, k))
        continue
      state, _ = checkpoints.restore(str(step))
      item = station_lib.Score(model, k, step, state.evaluated())
      self.send(self.scorer(model, k), item)

  def _introduce(self):
    c, count = self._config, len(self.candidates)
    for text in (
      f'workdir  {self._workdir}',
      f'ring     {count} models, {self.stations} stations, '
      f'{self.laps.count} laps',
      f'parts    {", ".join(map(str, self.sizes))} of {len(self._source)} '
      f'examples of {self._source.name}',
      f'scores   {c.checkpoint.best_metric} of {len(self.eval_source)} '
      'examples',
    ):
      self._note(text)

  # While it goes on.

  def _look(self):
    """Raises what a station or the post has raised; says that all is well."""
    for station in self._local.values():
      if station.error:
        raise station.error
    if self._mail:
      self._mail.look()
    if all(station.waits for station in self._local.values()):
      self._processes.beat('waiting')
    else:
      steps = sum(station.steps for station in self._local.values())
      self._processes.beat('training', steps)

  def _is_over(self):
    """Whether no model is inside, none waits, and all have their scores."""
    with self._local[0].inbox.changed, self._lock:
      if self._desk.inside or len(self._desk.known) < len(self.candidates):
        return False
      board = self._board
      return all(
        (c.index, k) in self._lost
        for c in self.candidates
        if board.outcome(c.index, self.laps.count) == board_lib.FINISHED
        for k in board.lacking(c.index, self.laps.count)
      )

  def _put(self, station, item):
    self._local[station].inbox.put(item)

  def _heard(self, name, request):
    """Called by the post with a message; and here with one to this process."""
    if name == 'stop':
      self.stopped = True
    elif name == 'over':
      self._over = True
    elif name == 'scored':
      self._take_scores(**request)
    elif name == 'failed':
      with self._lock:
        self._board.fail(request['model'], request['step'], request['text'])
        self._board.write()
      failed = self.candidates[request['model']].name
      self._note(f'{failed}  failed: {request["text"]}')
    if self._lead:
      self._local[0].inbox.wake()

  def _take_scores(self, model, laps, step, scores):
    with self._lock:
      if not self._board.add(model, laps, step, scores):
        return
      self._board.write()
      self.store.records.scored(
        model, self._board.all_scores(model), laps == self.laps.count
      )
    self._note(
      f'{self.candidates[model].name}  lap {laps} of {self.laps.count}, step '
      f'{step}: {self._text(scores)}'
    )

  def _to_lead(self, name, request):
    if self._lead:
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
    self._processes.beat('saving')
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
    self._processes.beat('evaluating')
    for station in self._local.values():
      for item in station.inbox.scores:
        station.score(item)
    found = self._processes.gather(steps)
    return {int(m): step for part in found for m, step in part.items()}

  def _conclude(self, done, vote):
    made, left = 0, 0
    for candidate in self.candidates:
      model, fate = candidate.index, board_lib.GO_ON
      itinerary = self._any().runner(model).itinerary
      step = done.get(model, self._board.scores(model).get('step', 0))
      if model in done or model in self._desk.known:
        fate = self._board.outcome(model, itinerary.laps_done(step))
      self.keep_scores(model, step)
      made += step
      # Of one that is not held and whose end is not known, nothing is left.
      if fate in (board_lib.GO_ON, board_lib.WAIT):
        left += itinerary.total - step
    if left and self.stopped:
      reason = stopping.REASONS.get(vote, 'a signal')
      workdir_lib.mark_stopped(self._workdir, made, made + left, reason)
      self._note(
        f'stopped after {made} of {made + left} steps of all models; the same '
        'command goes on'
      )
    return self._announce()

  def _announce(self):
    """Prints the leaderboard, and the ensemble of what is finished."""
    board, below = self._board, ''
    finished = board.finished()
    if len(finished) > 1:
      scores = ensemble.score(
        [self.store.folder(m) for m in finished], self._objective
      )
      below = f'\nMean of the {len(finished)} finished: {self._text(scores)}\n'
    board.write(below)
    self._note(f'{board.table()}\n{below}')
    self._note(f'leaderboard: {os.path.join(self._workdir, board_lib.PAGE)}')
    return board.best()

  def _close(self):
    for station in self._local.values():
      station.stop()
      station.close()
    self.store.close()

  # Small things.

  def _any(self):
    """One of this process's stations."""
    return next(iter(self._local.values()))

  def _text(self, scores):
    return ', '.join(
      f'{telemetry.LABELS[n]} {telemetry.score(n, scores[n])}'
      for n in telemetry.LABELS
      if n in scores
    )

  def _note(self, text):
    print(text, flush=True)


def _meshes(config):
  """Of each of this process's stations."""
  devices = jax.local_devices()
  each = 1 if config.strategy.station == 'device' else len(devices)
  return [
    mesh_lib.create(config, devices[i : i + each])
    for i in range(0, len(devices), each)
  ]
