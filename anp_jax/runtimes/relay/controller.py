"""Process 0 of a ring: who is in it, all scores, and the leaderboard."""

import os
import threading

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.cluster import preemption
from anp_jax.reporting import summary
from anp_jax.reporting import telemetry
from anp_jax.runtimes.relay import ensemble
from anp_jax.runtimes.relay import leaderboard as board_lib
from anp_jax.runtimes.relay import worker as station_lib
from anp_jax.training import metric_labels

_OPEN = (board_lib.GO_ON, board_lib.WAIT)


class Lead:
  """What process 0 knows of all models, beside its part of the ring.

  Attributes:
    candidates: all models.
  """

  def __init__(self, config, workdir: str, ring, objective, seats: int):
    """Makes it; nothing is written yet.

    Args:
      config: the run's config.
      workdir: of the run.
      ring: `run.Ring` of this process, which has station 0.
      objective: `objective.Objective`.
      seats: models in the ring at a time.
    """
    self.candidates = ring.candidates
    self._config, self._workdir = config, workdir
    self._ring = ring
    self._objective = objective
    self._seats = seats
    self._board = board_lib.Board(workdir, ring.candidates, ring.laps, config)
    self._lock = threading.Lock()  # of the board
    self._desk = station_lib.Desk(self, seats)
    self._lost = set()  # (model, laps): scores that nobody can make any more

  def begin(self) -> tuple[list[int], list[int]]:
    """What is saved goes to where it is to go on.

    Returns:
      The models that will be in the ring first, and those that enter later.
    """
    ring, board, desk, parcels = self._ring, self._board, self._desk, []
    self._introduce()
    for candidate in self.candidates:
      model = candidate.index
      checkpoints = ring.store.checkpoints(model)
      restored = checkpoints.restore()
      telemetry.truncate_after(
        ring.store.folder(model), restored[1] if restored else 0
      )
      if restored is None:
        continue
      state, step = restored
      desk.known.add(model)
      itinerary = ring.runner(model).itinerary
      laps = itinerary.laps_done(step)
      self._score_late(checkpoints, itinerary, model, laps)
      if board.outcome(model, laps) not in _OPEN:
        continue
      visit = itinerary.at(step)
      desk.inside.add(model)
      _note(f'{candidate.name}  goes on from step {step}')
      parcels.append((visit.station, station_lib.Parcel(model, step, state)))
    for station, parcel in parcels:
      ring.send(station, parcel)
    inside = sorted(desk.inside)
    new = [c.index for c in self.candidates if c.index not in desk.known]
    free = max(self._seats - len(inside), 0)
    return inside + new[:free], new[free:]

  def is_over(self) -> bool:
    """Whether no model is inside, none waits, and all have their scores."""
    last = self._ring.laps.count
    with self._ring.first.inbox.changed, self._lock:
      if self._desk.inside or len(self._desk.known) < len(self.candidates):
        return False
      board = self._board
      return all(
        (c.index, k) in self._lost
        for c in self.candidates
        if board.outcome(c.index, last) == board_lib.FINISHED
        for k in board.lacking(c.index, last)
      )

  def conclude(self, done: dict[int, int], vote: int) -> dict:
    """Says how far all have come, once no station works any more.

    Args:
      done: steps that each model in the ring has made.
      vote: see `stopping`; why the run stops before its end.

    Returns:
      The last scores of the best model, {} if there are none.
    """
    made, left = 0, 0
    for candidate in self.candidates:
      model, fate = candidate.index, board_lib.GO_ON
      itinerary = self._ring.runner(model).itinerary
      step = done.get(model, self._board.scores(model).get('step', 0))
      if model in done or model in self._desk.known:
        fate = self._board.outcome(model, itinerary.laps_done(step))
      self.keep_scores(model, step)
      made += step
      # Of one that is not held and whose end is not known, nothing is left.
      if fate in _OPEN:
        left += itinerary.total - step
    if left and self._ring.stopped:
      reason = preemption.REASONS.get(vote, 'a signal')
      workdir_lib.mark_stopped(self._workdir, made, made + left, reason)
      _note(
        f'stopped after {made} of {made + left} steps of all models; run '
        'the same command to resume'
      )
    return self._announce()

  def evaluate(self, which: str) -> dict:
    """Scores a checkpoint of every model; see `run.run`."""
    ring, found = self._ring, False
    if which == 'best':
      raise config_lib.ConfigError(
        '--checkpoint=best: of the models of a ring the newest checkpoints are '
        'kept; expected newest or a step'
      )
    for candidate in self.candidates:
      restored = ring.store.checkpoints(candidate.index).restore(which)
      if restored is None:
        continue
      state, step = restored
      runner = ring.runner(candidate.index)
      scores = runner.score(state.evaluated(), ring.eval_source)
      found = True
      _note(f'{candidate.name}  step {step}: {_text(scores)}')
    if not found:
      raise config_lib.ConfigError(
        f'{self._workdir} has no checkpoint to evaluate'
      )
    return self._announce()

  # What comes from stations, in their threads and that of the post.

  def choose(self, parcels):
    """What station 0 is to do next; see `station.Desk`."""
    return self._desk.choose(parcels)

  def fate(self, parcel) -> str:
    """What becomes of a model at station 0; see `Board.decide`."""
    itinerary = self._ring.runner(parcel.model).itinerary
    laps = itinerary.laps_done(parcel.step)
    if not laps or itinerary.ends[laps - 1] != parcel.step:
      laps = 0  # on its way: nothing is decided here
    with self._lock:
      return self._board.decide(parcel.model, laps)

  def leaves(self, parcel) -> None:
    """A model is taken out of the ring at station 0, and saved."""
    ring = self._ring
    if parcel.state is not None:
      state = ring.first.runner(parcel.model).place(parcel.state)
      ring.store.save(parcel.model, parcel.step, state)
    name = self.candidates[parcel.model].name
    _note(f'{name}  {self.fate(parcel)} at step {parcel.step}')

  def keep_scores(self, model: int, step: int) -> None:
    """Adds the scores of a model that is held here to its metrics.jsonl."""
    with self._lock:
      records = self._board.all_scores(model)
    self._ring.store.records.keep_scores(model, step, records)

  def scored(self, model: int, laps: int, step: int, scores: dict) -> None:
    """A model's scores have come."""
    last = self._ring.laps.count
    with self._lock:
      if not self._board.add(model, laps, step, scores):
        return
      self._board.write()
      self._ring.store.records.scored(
        model, self._board.all_scores(model), laps == last
      )
    _note(
      f'{self.candidates[model].name}  lap {laps} of {last}, step '
      f'{step}: {_text(scores)}'
    )

  def failed(self, model: int, step: int, text: str) -> None:
    """A model cannot go on."""
    with self._lock:
      self._board.fail(model, step, text)
      self._board.write()
    _note(f'{self.candidates[model].name}  failed: {text}')

  def _score_late(self, checkpoints, itinerary, model, laps):
    """Has those laps scored whose score was cut off."""
    ring = self._ring
    for k in self._board.lacking(model, laps):
      step = itinerary.ends[k - 1]
      if step not in checkpoints.steps():
        self._lost.add((model, k))
        continue
      state, _ = checkpoints.restore(str(step))
      item = station_lib.Score(model, k, step, state.evaluated())
      ring.send(ring.scorer(model, k), item)

  def _introduce(self):
    ring, count = self._ring, len(self.candidates)
    for text in (
      f'workdir  {self._workdir}',
      f'ring     {count} models, {ring.stations} stations, '
      f'{ring.laps.count} laps',
      f'parts    {", ".join(map(str, ring.sizes))} of {len(ring.source)} '
      f'examples of {ring.source.name}',
      f'scores   {self._config.checkpoint.best_metric} of '
      f'{len(ring.eval_source)} examples',
      *summary.cautions(
        self._config,
        ring.source,
        max(c.config.batch_size for c in self.candidates),
        min(ring.sizes),
      ),  # fmt: skip
    ):
      _note(text)

  def _announce(self):
    """Prints the leaderboard, and the ensemble of what is finished."""
    board, below = self._board, ''
    finished = board.finished()
    if len(finished) > 1:
      scores = ensemble.score(
        [self._ring.store.folder(m) for m in finished], self._objective
      )
      below = f'\nMean of the {len(finished)} finished: {_text(scores)}\n'
    board.write(below)
    _note(f'{board.table()}\n{below}')
    _note(f'leaderboard: {os.path.join(self._workdir, board_lib.PAGE)}')
    return board.best()


def _note(text: str) -> None:
  """Says it to people."""
  print(text, flush=True)


def _text(scores):
  return ', '.join(
    f'{label} {metric_labels.format_value(n, scores[n])}'
    for n, label in metric_labels.labels(scores).items()
  )
