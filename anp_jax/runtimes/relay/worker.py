"""A station of the ring: it trains what comes, scores, and passes on."""

import collections
import dataclasses
import threading

import jax
import jax.numpy as jnp

from anp_jax.runtimes.relay import background_compiler as ahead_lib
from anp_jax.runtimes.relay import leaderboard as board_lib
from anp_jax.runtimes.relay import programs as programs_lib
from anp_jax.runtimes.relay import runner as runner_lib


@dataclasses.dataclass
class Parcel:
  """A model on its way.

  Attributes:
    model: its index.
    step: steps made.
    state: TrainState, or its bytes; None: the model has not begun, or is done.
  """

  model: int
  step: int = 0
  state: object = None


@dataclasses.dataclass
class Gone:
  """A model has left the ring: its streams may be closed."""

  model: int


@dataclasses.dataclass
class Score:
  """A model to be scored.

  Attributes:
    model: its index.
    laps: that it has done.
    step: steps made.
    evaluated: what TrainState.evaluated gave, or its bytes.
  """

  model: int
  laps: int
  step: int
  evaluated: object


class Inbox:
  """What waits at a station: scores first, for others may wait for them."""

  def __init__(self):
    self.changed = threading.Condition()
    self.parcels = collections.deque()
    self.scores = collections.deque()
    self.closed = False

  def put(self, item) -> None:
    """Puts it behind those of its kind."""
    with self.changed:
      kind = self.scores if isinstance(item, Score) else self.parcels
      kind.append(item)
      self.changed.notify_all()

  def take(self, choose):
    """The next item, once there is one; None once it is closed.

    Args:
      choose: called (parcels) to take the next of them; None: not yet.
    """
    with self.changed:
      while not self.closed:
        if self.scores:
          return self.scores.popleft()
        found = choose(self.parcels)
        if found is not None:
          return found
        self.changed.wait()
    return None

  def wake(self) -> None:
    """Lets `choose` be asked again."""
    with self.changed:
      self.changed.notify_all()

  def close(self) -> None:
    """Gives nothing more away."""
    with self.changed:
      self.closed = True
      self.changed.notify_all()


def in_order(parcels):
  """The first parcel; None if there is none."""
  return parcels.popleft() if parcels else None


class Station:
  """One station, in a thread of its own.

  Attributes:
    number: from 0, in the order of the ring.
    inbox: what waits.
    error: what ended a thread badly; None.
    waits: whether there is nothing to do.
    steps: made since the start, and models prepared for, for those who watch.
  """

  def __init__(self, number, mesh, part, run, choose=in_order):
    """Makes it; `start` begins.

    Args:
      number: of the station.
      mesh: of its devices.
      part: `subset.Subset` that it holds.
      run: the process's `run.Ring`.
      choose: see `Inbox.take`.
    """
    self.number = number
    self.inbox = Inbox()
    self.error = None
    self.waits = False
    self.steps = 0
    self._mesh = mesh
    self._part = part
    self._run = run
    self._choose = choose
    self._ahead = None
    self._runners = {}
    self._programs = programs_lib.Programs()
    self._thread = threading.Thread(
      target=self._work, name=f'station {number}', daemon=True
    )

  def start(self, first, later, seats: int) -> None:
    """Begins to work.

    Args:
      first: models to prepare for before the first comes, so that no station
        waits while another compiles.
      later: models that take the places of those, in their order: they are
        compiled for while others train.
      seats: models in the ring at a time.
    """
    self._first = first
    self._ahead = ahead_lib.Ahead(
      f'ahead of station {self.number}', later, seats, self._compile_for,
      self._fail,
    )  # fmt: skip
    self._thread.start()

  def stop(self) -> None:
    """Takes nothing more from the inbox, and compiles nothing more ahead."""
    self.inbox.close()
    if self._ahead:
      self._ahead.stop()

  def join(self) -> None:
    """Returns when its last step is made; `stop` comes first."""
    self._thread.join()

  def expect(self, parcel) -> None:
    """Begins to move a model of this process to this station's devices."""
    runner = self._runners.get(parcel.model)
    if runner and parcel.state is not None:
      parcel.state = runner.place(parcel.state)

  def runner(self, model: int) -> runner_lib.Runner:
    """A model's, at this station."""
    if model not in self._runners:
      run = self._run
      made = runner_lib.Runner(
        run.candidates[model], self._mesh, self._part, self.number, run.sizes,
        run.laps.count, self._programs,
      )  # fmt: skip
      # Of two threads that make one at once, the first one's is taken.
      self._runners.setdefault(model, made)
    return self._runners[model]

  def score(self, item: Score) -> None:
    """Scores a model, and says so."""
    runner, run = self.runner(item.model), self._run
    with run.spans.during(self.number, 'score', item.model, item.laps):
      scores = runner.score(item.evaluated, run.eval_source)
      if item.laps == run.laps.count:
        run.keep_probabilities(
          item.model, *runner.probabilities(item.evaluated, run.eval_source)
        )
    run.scored(item.model, item.laps, item.step, scores)

  def close(self) -> None:
    """Ends all streams; returns when nothing is being compiled ahead."""
    if self._ahead:
      self._ahead.join()
    for runner in list(self._runners.values()):
      runner.close()

  def _work(self):
    try:
      # A station's own work lies on its own devices, also what is made on the
      # way, such as a seed.
      with jax.default_device(self._mesh.devices.flat[0]):
        for model in self._first:
          if not self.inbox.closed:
            self._prepare_for(model)
        self._ahead.start()
        while (item := self._next()) is not None:
          if isinstance(item, Score):
            self.score(item)
          elif isinstance(item, Gone):
            self._let_go(item)
          else:
            self._visit(item)
    except BaseException as e:  # noqa: BLE001 - raised by the main thread
      self._fail(e)

  def _fail(self, error):
    # The first one: others may come of it.
    self.error = self.error or error

  def _prepare_for(self, model):
    runner, run = self.runner(model), self._run
    with run.spans.during(self.number, 'prepare', model, None):
      runner.compile(len(run.eval_source), begins=not self.number)
      runner.prepare(0)
    self.steps += 1  # it gets on

  def _compile_for(self, model, stopped):
    run = self._run
    # Which device is the default is a thread's own.
    with (
      jax.default_device(self._mesh.devices.flat[0]),
      run.spans.during(self.number, 'compile', model, None),
    ):
      self.runner(model).compile(len(run.eval_source), not self.number, stopped)

  def _next(self):
    self.waits = True
    item = self.inbox.take(self._choose)
    self.waits = False
    return item

  def _let_go(self, gone):
    self._ahead.gone(gone.model)
    runner = self._runners.get(gone.model)
    if runner:
      # Its last score is made: that was here before the word that it has gone.
      runner.release()
    self._run.store.records.left(gone.model)
    if self.number + 1 < self._run.stations:
      self._run.send(self.number + 1, gone)

  def _visit(self, parcel):
    run, runner = self._run, self.runner(parcel.model)
    self._ahead.came(parcel.model)
    visit = runner.itinerary.at(parcel.step)
    if not self.number:  # process 0 holds it now
      run.lead.keep_scores(parcel.model, parcel.step)
    if visit is None or visit.station != self.number:  # no whole batch here
      run.send(self._following(), parcel)
      return
    spans = run.spans
    with spans.during(self.number, 'prepare', parcel.model, visit.lap):
      if parcel.state is None:
        state = runner.new(run.store.folder(parcel.model))
      else:
        state = runner.place(parcel.state)
      runner.prepare(visit.first)
    parcel.state = None  # donated
    try:
      with spans.during(self.number, 'train', parcel.model, visit.lap) as span:
        state, step = runner.train(
          state, parcel.step, visit.count, lambda: run.stopped,
          lambda *told: self._after(runner, parcel.model, *told),
        )  # fmt: skip
        jax.block_until_ready(state)
        span['steps'] = step - parcel.step
    except runner_lib.NotFinite as e:
      run.failed(parcel.model, parcel.step, str(e))
      run.send(0, Gone(parcel.model))
      return
    self._pass_on(runner, Parcel(parcel.model, step, state), visit)

  def _after(self, runner, model, step, metrics, state):
    self.steps += 1
    self._run.store.measured(runner, model, step, metrics)
    if state is not None and runner.is_due(step):
      with self._run.spans.during(self.number, 'save', model, None):
        self._run.store.save(model, step, state)

  def _pass_on(self, runner, parcel, visit):
    run, step = self._run, parcel.step
    laps = runner.itinerary.laps_done(step)
    if laps > visit.lap and run.laps.is_due(laps):
      # A copy: the next station donates what it gets.
      evaluated = jax.tree.map(jnp.copy, parcel.state.evaluated())
      run.send(
        run.scorer(parcel.model, laps),
        Score(parcel.model, laps, step, evaluated),
      )
    left = runner.itinerary.at(step)
    if left is None:
      parcel.state = None  # which is saved: word of it is enough
    if left and (left.lap, left.station) == (visit.lap, self.number):
      self.inbox.parcels.appendleft(parcel)  # stopped on the way; to be saved
    else:
      run.send(self._following(), parcel)

  def _following(self):
    return (self.number + 1) % self._run.stations


class Desk:
  """Station 0's choice: who enters the ring, who goes on, who leaves.

  Attributes:
    known: models that are in the ring or have left it.
    inside: models in the ring.
  """

  def __init__(self, lead, seats: int):
    """Makes it; models of a ring that goes on are added to what it has.

    Args:
      lead: `lead.Lead`.
      seats: models in the ring at a time.
    """
    self._lead = lead
    self._seats = seats
    self.known = set()
    self.inside = set()

  def choose(self, parcels):
    """What station 0 is to do next; see `Inbox.take`."""
    lead = self._lead
    gone = next((p for p in parcels if isinstance(p, Gone)), None)
    if gone:
      parcels.remove(gone)
      self.inside.discard(gone.model)
      return gone
    waiting = [c.index for c in lead.candidates if c.index not in self.known]
    # One that was inside when a run was cut off enters before its turn.
    late = waiting and any(waiting[0] < m for m in self.inside)
    if waiting and (len(self.inside) < self._seats or late):
      self.known.add(waiting[0])
      self.inside.add(waiting[0])
      return Parcel(waiting[0])
    for parcel in parcels:
      fate = lead.fate(parcel)
      if fate == board_lib.WAIT:
        continue
      parcels.remove(parcel)
      if fate == board_lib.GO_ON:
        return parcel
      lead.leaves(parcel)
      self.inside.discard(parcel.model)
      return Gone(parcel.model)
    return None
