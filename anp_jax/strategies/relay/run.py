"""One process of a ring: its stations, and what they share."""

from concurrent import futures
import contextlib
import json
import os
import secrets
import threading
import time

import jax
import numpy as np

from anp_jax import checkpoint as checkpoint_lib
from anp_jax import cluster
from anp_jax import compile_cache
from anp_jax import config as config_lib
from anp_jax import mesh as mesh_lib
from anp_jax import objective as objective_lib
from anp_jax import telemetry
from anp_jax import workdir as workdir_lib
from anp_jax.cluster import stopping
from anp_jax.data import damage
from anp_jax.data import sources
from anp_jax.strategies.relay import board as board_lib
from anp_jax.strategies.relay import candidates as candidates_lib
from anp_jax.strategies.relay import ensemble
from anp_jax.strategies.relay import itinerary as itinerary_lib
from anp_jax.strategies.relay import spans as spans_lib
from anp_jax.strategies.relay import station as station_lib

FILE = 'relay.json'
MODELS = 'models'
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
    source = sources.open_source(config, training=True)
    self.eval_source = sources.open_source(config, training=False)
    self._fingerprint = sources.fingerprint(source)
    self._objective = objective_lib.create(source.vocabulary)
    names = self._objective.metric_names
    checkpoint_lib.check_best_metric(config, names)
    self.sizes = itinerary_lib.sizes(config, len(source), self.stations)
    self.laps = board_lib.Laps(
      config,
      candidates_lib.epochs('duration', config.duration),
      candidates_lib.epochs('eval.every', config.eval.every),
    )
    self._claim(training)
    parts = itinerary_lib.parts(config, source, self.stations)
    self._source = source
    self.stopped = self._over = False
    self._lead = not processes.index
    self._log_every = config_lib.steps(
      config.log.every, self.candidates[0].config.batch_size, len(source)
    )
    self._lock, self._saving = threading.Lock(), threading.Lock()
    self._checkpoints, self._damaged, self._seen = {}, {}, {}
    self._lost = set()  # (model, laps): scores that nobody can make any more
    self.spans = spans_lib.Spans(workdir, processes.index)
    stack.callback(self.spans.close)
    self._sender = futures.ThreadPoolExecutor(1, 'sender')
    stack.callback(self._sender.shutdown, wait=False, cancel_futures=True)
    self._sent = []
    self._desk = self._board = None
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
    self._open_post(stack)

  def train(self) -> dict:
    """Until all models have left the ring, or a signal."""
    processes = self._processes
    vote = stopping.GO_ON
    with processes.listening():
      ahead = processes.gather(self._begin() if self._lead else None)[0]
      for station in self._local.values():
        station.start(ahead)
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
      restored = self._opened(candidate.index).restore(which)
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
    if owner == self._processes.index:
      target = self._local[station]
      if isinstance(item, station_lib.Parcel):
        target.expect(item)
      target.inbox.put(item)
      return
    sent = self._sender.submit(self._send_away, owner, station, item)
    with self._lock:  # several stations send
      waiting = [s for s in self._sent if not s.done() or s.exception()]
      self._sent = [*waiting, sent]

  def scored(self, model: int, laps: int, step: int, scores: dict) -> None:
    """Hands a model's scores in."""
    self._to_lead(
      'scored', {'model': model, 'laps': laps, 'step': step, 'scores': scores}
    )

  def failed(self, model: int, step: int, text: str) -> None:
    """Says that a model cannot go on."""
    self._to_lead('failed', {'model': model, 'step': step, 'text': text})

  def measured(self, runner, model: int, step: int, metrics: dict) -> None:
    """Records what a step showed."""
    with self._lock:
      self._damaged[model] = self._damaged.get(model, 0) + metrics['damaged']
      self._seen[model] = self._seen.get(model, 0) + runner.config.batch_size
      damaged, seen = self._damaged[model], self._seen[model]
    text = damage.excess(self._config, int(damaged), seen, self._source.name)
    if text:
      raise cluster.Failed(text)
    if step % self._log_every and step != runner.itinerary.total:
      return
    size = runner.config.batch_size
    record = {
      'kind': 'train', 'step': step, 'time': time.time(),
      'epoch': step * size / len(self._source), **metrics, 'damaged': damaged,
    }  # fmt: skip
    with open(os.path.join(self._folder(model), 'metrics.jsonl'), 'a') as f:
      f.write(json.dumps(record) + '\n')

  def save(self, model: int, step: int, state) -> None:
    """Begins to save a model; one that is saved at this step stays."""
    with self._saving:
      self._opened(model).save(step, state)

  def keep_probabilities(self, model, probabilities, labels, weights) -> None:
    """Keeps what a model that is done makes of the validation set."""
    ensemble.keep(self._folder(model), probabilities, labels, weights)

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
      self.save(parcel.model, parcel.step, state)
    name = self.candidates[parcel.model].name
    self._note(f'{name}  {self.fate(parcel)} at step {parcel.step}')

  def _choose(self, parcels):
    return self._desk.choose(parcels)

  # Beginning.

  def _claim(self, training):
    """Refuses the workdir of another run; to train, process 0 takes it."""
    path = os.path.join(self._workdir, FILE)
    now = {
      'parts': list(self.sizes),
      'laps': self.laps.count,
      'models': [c.text for c in self.candidates],
      'config': json.loads(config_lib.to_json(self._config)),
    }
    text = ''
    if not self._processes.index:
      if os.path.exists(path):
        with open(path) as f:
          saved = json.load(f)
        if not training:  # scores are the same on any devices
          saved['parts'] = now['parts']
        text = _difference(saved, now, self._config)
        text = text and f'{self._workdir} belongs to another {text}'
      elif not training:
        text = f'{self._workdir} has no checkpoint of a ring to evaluate'
      if training and not text:
        workdir_lib.claim(self._workdir, self._config)
        with open(path + '.new', 'w') as f:
          json.dump(now, f, indent=1)
        os.replace(path + '.new', path)
        for c in self.candidates:
          os.makedirs(self._folder(c.index), exist_ok=True)
    text = self._processes.gather(text)[0]
    if text:
      raise config_lib.ConfigError(text)

  def _open_post(self, stack):
    self._addresses, self._token, self._clients = [''], '', {}
    if self._processes.count == 1:
      return
    from anp_jax.strategies.relay import post  # Flight is imported

    lead = not self._processes.index
    token = self._processes.gather(secrets.token_hex(32) if lead else '')[0]
    box = post.Post(
      self._config, self._processes.place, token, self._took, self._heard
    )
    stack.callback(box.shutdown)
    self._addresses = self._processes.gather(box.address)
    self._token = token
    stack.callback(
      lambda: [client.close() for client in self._clients.values()]
    )

  def _begin(self) -> list[int]:
    """Process 0: what is saved goes to where it is to go on.

    Returns:
      The models that will be in the ring first.
    """
    board, parcels = self._board, []
    seats = self._config.strategy.at_once or len(self.candidates)
    self._desk = station_lib.Desk(self, seats)
    self._introduce()
    for candidate in self.candidates:
      model = candidate.index
      checkpoints = self._opened(model)
      restored = checkpoints.restore()
      telemetry.cut(self._folder(model), restored[1] if restored else 0)
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
    return inside + new[: max(seats - len(inside), 0)]

  def _score_late(self, checkpoints, itinerary, model, laps):
    """Has those laps scored whose score was cut off."""
    for k in self._board.lacking(model, laps):
      step = itinerary.ends[k - 1]
      if step not in checkpoints.steps():
        self._lost.add((model, k))
        continue
      state, _ = checkpoints.restore(str(step))
      item = station_lib.Score(model, k, step, state.evaluated())
      self.send((model + k) % self.stations, item)

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
    for sent in self._sent:
      if sent.done() and sent.exception():
        raise cluster.Lost(f'a model could not be sent: {sent.exception()}')
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

  def _took(self, request, data):
    """Called by the post with what has come."""
    station, kind = request.pop('station'), request.pop('kind')
    if kind == 'score':
      item = station_lib.Score(**request, evaluated=data)
    elif kind == 'gone':
      item = station_lib.Gone(**request)
    else:
      item = station_lib.Parcel(**request, state=data if data.size else None)
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
    self._note(
      f'{self.candidates[model].name}  lap {laps} of {self.laps.count}, step '
      f'{step}: {self._text(scores)}'
    )

  def _to_lead(self, name, request):
    if self._lead:
      self._heard(name, request)
    else:
      self._client(0).ask(name, **request)

  def _tell_all(self, name):
    self._heard(name, {})
    for process in range(self._processes.count):
      if process != self._processes.index:
        self._client(process).ask(name)

  def _send_away(self, owner, station, item):
    """Sends an item to another process, and with it the model's folder."""
    request, leaves = {'station': station}, []
    if isinstance(item, station_lib.Gone):
      request |= {'kind': 'gone', 'model': item.model}
    elif isinstance(item, station_lib.Score):
      leaves = jax.tree.leaves(item.evaluated)
      request |= {
        'kind': 'score', 'model': item.model, 'laps': item.laps,
        'step': item.step,
      }  # fmt: skip
    else:
      self._let_go(item.model)
      leaves = jax.tree.leaves(item.state)
      request |= {'kind': 'parcel', 'model': item.model, 'step': item.step}
    model = item.model
    with self.spans.during(station, 'send', model, None) as span:
      arrays = [np.asarray(x) for x in jax.device_get(leaves)]
      span['bytes'] = sum(a.nbytes for a in arrays)
      self._client(owner).put(request, arrays)

  def _client(self, process):
    from anp_jax.strategies.relay import post

    with self._lock:
      if process not in self._clients:
        self._clients[process] = post.client(
          self._config, self._addresses[process], self._token
        )
      return self._clients[process]

  # Ending.

  def _halt(self):
    """Returns when no station works and all that was sent has come."""
    for station in self._local.values():
      station.inbox.close()
    for station in self._local.values():
      station.join()
    self._look()
    futures.wait(self._sent)
    self._look()
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
        self.save(parcel.model, parcel.step, state)
    for checkpoints in self._checkpoints.values():
      checkpoints.wait()
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
        [self._folder(m) for m in finished], self._objective
      )
      below = f'\nMean of the {len(finished)} finished: {self._text(scores)}\n'
    board.write(below)
    self._note(f'{board.table()}\n{below}')
    self._note(f'leaderboard: {os.path.join(self._workdir, board_lib.PAGE)}')
    return board.best()

  def _close(self):
    for station in self._local.values():
      station.inbox.close()
      station.close()
    for checkpoints in self._checkpoints.values():
      checkpoints.close()

  # Small things.

  def _any(self):
    """One of this process's stations."""
    return next(iter(self._local.values()))

  def _folder(self, model):
    return os.path.join(self._workdir, MODELS, self.candidates[model].name)

  def _opened(self, model):
    """A model's checkpoints; who holds a model has its folder for itself."""
    if model not in self._checkpoints:
      own = self.candidates[model].config.copy_and_resolve_references()
      own.checkpoint.keep_best = 0
      self._checkpoints[model] = checkpoint_lib.Checkpoints(
        self._folder(model), own, self._fingerprint,
        self._any().runner(model).like,
      )  # fmt: skip
    return self._checkpoints[model]

  def _let_go(self, model):
    with self._saving:
      checkpoints = self._checkpoints.pop(model, None)
    if checkpoints:
      checkpoints.close()

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


def _difference(saved, now, config):
  """What makes a workdir's ring another one; '' if nothing."""
  for key, what in (
    ('parts', 'ring: its stations have parts of'),
    ('laps', 'ring: its models make laps:'),
  ):
    if saved[key] != now[key]:
      return f'{what} {saved[key]}, not {now[key]}; choose another --workdir'
  if saved['models'] != now['models'][: len(saved['models'])]:
    return (
      'ring: config.strategy.models may only grow at its end; choose another '
      '--workdir'
    )
  text = config_lib.difference(saved['config'], config)
  return text and f'run: {text}; choose another --workdir'
