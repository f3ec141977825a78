"""A station of the ring: it trains, scores and sends on the models that arrive.

One lap of a model, from station to station:

  1. `controller.RingController` sends the model to station 0.
  2. `RingWorker._train` makes the steps of the model's segment and sends it to
     the next station (step 2 again), the last one sends it to the controller.
  3. After a lap whose score is due, a copy of the weights goes to a station
     that has time for it; `RingWorker._score` sends the scores to the
     controller, and to the station that ended the lap: it writes the best.
  4. The controller sends the model on its next lap, or `Retired` from station 0
     round the ring (`RingWorker._retire`).
"""

from collections.abc import Callable, Sequence
import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp

from anp_jax.reporting import delayed_metrics
from anp_jax.runtimes.model_ring import (
  messages,
  ring_runner as runner_lib,
  spans as spans_lib,
  store as store_lib,
)

# Phases of the parts of its work.
_PHASES = {'prepare': 'compiling', 'train': 'step', 'score': 'evaluating', 'save': 'saving'}


class RingWorker:
  """One station, in a thread of its own.

  Attributes:
    phase: phase of its work, for `cluster.Processes.heartbeat`.
    progress: steps made since the start, and models prepared for.
    step: step of the model that it trains, or has trained last.
  """

  def __init__(
    self,
    runners: runner_lib.Runners,
    queue: messages.MessageQueue,
    store: store_lib.Store,
    spans: spans_lib.Spans,
    send_event: Callable[[int, Any], None],
  ):
    """Prepares the thread; `start` begins to work.

    Args:
      runners: runners of the station.
      queue: messages to the station.
      store: folders of the models.
      spans: record of the station's work.
      send_event: (address, event) -> None, see `messages.Sender`.
    """
    self.phase = 'waiting'
    self.progress = self.step = 0
    self._runners, self._ring = runners, runners.ring
    self._number = runners.station.number
    self._store, self._spans = store, spans
    self._send_event = send_event
    self._queue = queue
    self._handlers = {
      messages.ModelMessage: self._train,
      messages.ScoreRequest: self._score,
      messages.Ranked: self._keep,
      messages.Retired: self._retire,
    }

  def start(self, models: Sequence[int]) -> None:
    """Begins to work.

    Args:
      models: models to prepare for before the first arrives, so that no station
        waits while another compiles.
    """
    name = f'station {self._number}'
    self._thread = threading.Thread(target=self._run, args=(models,), name=name, daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """Takes no further message."""
    self._queue.close()

  def join(self) -> None:
    """Returns when the last step is made; call `stop` first."""
    self._thread.join()

  def save_waiting(self) -> dict[int, int]:
    """Saves the models that wait here; returns their steps, by model."""
    steps = {}
    for message in self._queue.remaining():
      if isinstance(message, messages.ModelMessage):
        steps[message.model] = message.step
        if message.state is not None:
          state = self._runners[message.model].place(message.state)
          self._store.save(message.model, message.step, state)
    return steps

  def handle_waiting(self, kind: type) -> None:
    """Handles the `ScoreRequest`s or `Ranked` that wait here."""
    for message in self._queue.remaining():
      if isinstance(message, kind):
        self._handlers[kind](message)

  def close(self) -> None:
    """Stops, and ends the streams of the station."""
    self.stop()
    self._runners.close()

  def _run(self, models):
    try:
      # All arrays of a station lie on its devices, also those made on the way,
      # such as a seed.
      with jax.default_device(self._runners.station.mesh.devices.flat[0]):
        self._prepare(models)
        while (message := self._queue.get()) is not None:
          self._handlers[type(message)](message)
    except BaseException as e:  # noqa: BLE001 - raised by the main thread
      self._send_event(messages.HERE, e)

  @contextlib.contextmanager
  def _record(self, what, model, lap):
    before, self.phase = self.phase, _PHASES[what]
    try:
      with self._spans.record(self._number, what, model, lap) as span:
        yield span
    finally:
      self.phase = before

  def _prepare(self, models):
    for model in models:
      if self._queue.closed:
        return
      runner = self._runners[model]
      with self._record('prepare', model, None):
        runner.compile(len(self._ring.eval_source))
        runner.prepare(0)
      self.progress += 1

  def _train(self, message):
    """Trains a model on this station's shard, and sends it on."""
    model, runner = message.model, self._runners[message.model]
    segment = runner.schedule.at(message.step)
    if segment is None or segment.station != self._number:
      self._send_on(message)  # it fills no batch here
      return
    self.step = step = message.step
    state = message.state
    message.state = None  # it will be donated
    with self._record('prepare', model, segment.lap):
      if state is None:
        state = runner.new_state(self._ring.folder(model))
      else:
        state = runner.place(state)
      runner.prepare(segment.first)
    try:
      with self._record('train', model, segment.lap) as span:
        for metrics, current in runner.train(
          state, message.step, segment.steps, lambda: self._queue.closed
        ):
          self.step = metrics.step
          self.progress += 1
          self._store.record_step(model, metrics)
          if current is not None:
            step, state = metrics.step, current
            if runner.is_save_due(step):
              with self._record('save', model, None):
                self._store.save(model, step, state)
        jax.block_until_ready(state)
        span['steps'] = step - message.step
    except delayed_metrics.NotFiniteError as e:
      self._send_event(messages.CONTROLLER, messages.Failed(model, message.step, str(e)))
      return
    self._request_score(model, step, state, segment.lap)
    if step == runner.schedule.total:
      state = None  # it is saved
    elif step < message.step + segment.steps:  # stopped on the way
      self._queue.put(messages.ModelMessage(model, step, state))
      return
    self._send_on(messages.ModelMessage(model, step, state))

  def _request_score(self, model, step, state, lap):
    """Sends the weights to be scored, if a lap is complete and it is due."""
    laps = self._runners[model].schedule.laps_done(step)
    if laps > lap and self._ring.laps.is_score_due(laps):
      # A copy: the next station donates what it gets.
      if self._runners[model].config.checkpoint.keep_best:
        state = jax.tree.map(jnp.copy, state)
        self._store.hold(model, step, state)
        evaluated = state.evaluated()
      else:
        evaluated = jax.tree.map(jnp.copy, state.evaluated())
      self._send_event(
        self._ring.scorer(model, laps),
        messages.ScoreRequest(model, step, evaluated, laps, self._number),
      )

  def _send_on(self, message):
    """Sends a model to the next station; after the last, to the controller."""
    is_last = self._number + 1 == self._ring.stations
    self._send_event(messages.CONTROLLER if is_last else self._number + 1, message)

  def _score(self, request):
    model, laps, runner = request.model, request.laps, self._runners[request.model]
    with self._record('score', model, laps):
      scores = runner.score(request.state, self._ring.eval_source)
    self._send_event(messages.CONTROLLER, messages.Scored(model, laps, request.step, scores))
    if runner.config.checkpoint.keep_best:
      self._send_event(request.origin, messages.Ranked(model, request.step, scores=scores))

  def _keep(self, message):
    """Saves a state that was scored, if it is among the best."""
    with self._record('save', message.model, None):
      self._store.keep_if_best(message.model, message.step, message.scores)

  def _retire(self, message):
    """Releases a model that has left the ring, and tells the next station."""
    if runner := self._runners.get(message.model):
      # Its last score is made: the request came before this message.
      runner.release()
    self._store.records.close_model(message.model)
    if self._number + 1 < self._ring.stations:
      self._send_event(self._number + 1, messages.Retired(message.model, message.step))
