"""Process 0 of a ring: which models are in it, and all scores."""

from collections.abc import Callable
import os

from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib, run_dir
from anp_jax.reporting import summary, telemetry
from anp_jax.runtimes.model_ring import leaderboard as leaderboard_lib, messages
from anp_jax.training import metric_labels

_OPEN = (leaderboard_lib.GO_ON, leaderboard_lib.WAIT)


class AdmissionPolicy:
  """Which models enter the ring: in their order, so many at a time.

  Attributes:
    inside: models in the ring.
    outside: models that have not entered, in their order.
  """

  def __init__(self, models, max_in_ring: int):
    """Begins with an empty ring.

    Args:
      models: all indices, in the order in which they enter.
      max_in_ring: models in the ring at a time.
    """
    self._max_in_ring = max_in_ring
    self.inside = set()
    self.outside = list(models)

  def first_models(self) -> list[int]:
    """Returns the models that are in the ring once it is full."""
    free = max(self._max_in_ring - len(self.inside), 0)
    return sorted(self.inside) + self.outside[:free]

  def next_model(self) -> int | None:
    """Returns the model to enter now; None: nobody waits, or there is no room.

    A model that was inside when a run was cut off, and had saved nothing,
    enters before its turn: later ones may have to wait for its scores.
    """
    if not self.outside:
      return None
    is_late = any(self.outside[0] < m for m in self.inside)
    if len(self.inside) < self._max_in_ring or is_late:
      model = self.outside.pop(0)
      self.inside.add(model)
      return model
    return None


class RingController:
  """Decides what enters the ring, what stays in it, and when the ring ends.

  Models come here after each lap. Only the main thread calls it.
  """

  def __init__(self, ring, runners, store, send_event: Callable):
    """Reads the leaderboard; nothing is written yet.

    Args:
      ring: `ring.Ring`.
      runners: `runner.Runners` of station 0.
      store: `store.Store`.
      send_event: called (address, event), see `messages.Sender`.
    """
    self._ring, self._runners, self._store = ring, runners, store
    self._send_event = send_event
    self._leaderboard = open_leaderboard(ring)
    self._policy = AdmissionPolicy(ring.models, ring.max_in_ring)
    self._undecided = []  # messages that wait for a score
    self._lost = set()  # (model, laps): scores that can no longer be made

  def start(self) -> tuple[list[int], list[int]]:
    """Sends saved models to where they go on, and the first new ones.

    Returns:
      The models that will be in the ring first, and those that enter later.
    """
    self._introduce()
    restored = [
      message for model in self._ring.models if (message := self._restored(model)) is not None
    ]
    first_models = self._policy.first_models()
    later_models = [m for m in self._policy.outside if m not in first_models]
    self._admit()
    for message in restored:
      schedule = self._runners[message.model].schedule
      at_lap_end = message.step in schedule.ends
      station = schedule.at(message.step).station
      address = messages.CONTROLLER if at_lap_end else station
      self._send_event(address, message)
    return first_models, later_models

  def on_event(self, event) -> None:
    """Handles a model that has done a lap, scores, or a failure."""
    handlers = {
      messages.ModelMessage: self._undecided.append,
      messages.Scored: self._on_scores,
      messages.Failed: self._on_failure,
    }
    handlers[type(event)](event)
    self._undecided = [m for m in self._undecided if not self._decide(m)]
    self._admit()

  def is_over(self) -> bool:
    """Returns whether all models have left the ring and have their scores."""
    if self._policy.inside or self._policy.outside:
      return False
    laps, leaderboard = self._ring.rungs.laps, self._leaderboard
    return all(
      (model, k) in self._lost
      for model in self._ring.models
      if leaderboard.status(model, laps) == leaderboard_lib.FINISHED
      for k in leaderboard.missing_scores(model, laps)
    )

  def release_undecided(self) -> None:
    """Sends the models that wait here to station 0, to be saved."""
    for message in self._undecided:
      self._send_event(0, message)

  def conclude(self, steps: dict[int, int], reason: str) -> dict:
    """Reports how far all models have come, once no station works any more.

    Args:
      steps: that each model in the ring has made.
      reason: why the run stops before its end; '' if it does not.

    Returns:
      The last scores of the best model, {} if there are none.
    """
    done, left = 0, 0
    for model in self._ring.models:
      schedule, status = self._runners[model].schedule, leaderboard_lib.GO_ON
      scores = self._leaderboard.last_scores(model)
      step = steps.get(model, scores.get('step', 0))
      if model in steps or model not in self._policy.outside:
        status = self._leaderboard.status(model, schedule.laps_done(step))
      self._append_scores(model, step)
      done += step
      # Of a model that is lost and whose end is not known, nothing is left.
      if status in _OPEN:
        left += schedule.total - step
    if left and reason:
      run_dir.mark_stopped(self._ring.workdir, done, done + left, reason)
      note(
        f'stopped after {done} of {done + left} steps of all models; run the same command to resume'
      )
    return announce(self._ring, self._leaderboard)

  def _introduce(self):
    ring = self._ring
    for text in (
      f'workdir  {ring.workdir}',
      f'strategy {ring.config.strategy.name}',
      f'ring     {len(ring.candidates)} models, {ring.stations} stations, {ring.rungs.laps} laps',
      f'parts    {", ".join(map(str, ring.sizes))} of {len(ring.source)} '
      f'examples of {ring.source.name}',
      f'scores   {ring.config.checkpoint.best_metric} of {len(ring.eval_source)} examples',
      *summary.cautions(
        ring.config, ring.source, max(c.config.batch_size for c in ring.candidates), min(ring.sizes)
      ),
    ):
      note(text)

  def _restored(self, model):
    """Returns the message of a saved model that is still in the ring.

    Requests the scores of those laps whose score was cut off, too.
    """
    ring, schedule = self._ring, self._runners[model].schedule
    checkpoints = self._store.checkpoints(model)
    restored = checkpoints.restore()
    telemetry.truncate_after(ring.folder(model), restored[1] if restored else 0)
    if restored is None:
      return None
    state, step = restored
    self._policy.outside.remove(model)
    laps = schedule.laps_done(step)
    for k in self._leaderboard.missing_scores(model, laps):
      lap_end = schedule.ends[k - 1]
      if lap_end not in checkpoints.steps():
        self._lost.add((model, k))
        continue
      lap_state, _ = checkpoints.restore(str(lap_end))
      origin = schedule.at(lap_end - 1).station
      if not ring.owners[origin]:  # the others have not read it
        self._store.hold(model, lap_end, lap_state)
      self._send_event(
        ring.scorer(model, k),
        messages.ScoreRequest(model, lap_end, lap_state.evaluated(), k, origin),
      )
    if self._leaderboard.status(model, laps) not in _OPEN:
      return None
    self._policy.inside.add(model)
    note(f'{ring.candidates[model].name}  continuing from step {step}')
    return messages.ModelMessage(model, step, state)

  def _admit(self):
    while (model := self._policy.next_model()) is not None:
      self._send_event(0, messages.ModelMessage(model))

  def _decide(self, message):
    """Sends a model on its next lap, or out; returns False to wait."""
    model, step = message.model, message.step
    laps = self._runners[model].schedule.laps_done(step)
    status = self._leaderboard.decide(model, laps)
    if status == leaderboard_lib.WAIT:
      return False
    self._append_scores(model, step)
    if status == leaderboard_lib.GO_ON:
      self._send_event(0, message)
      return True
    note(f'{self._ring.candidates[model].name}  {status} at step {step}')
    self._policy.inside.discard(model)
    self._send_event(0, messages.Retired(model, step, message.state))
    return True

  def _on_scores(self, event):
    model, laps, count = event.model, event.laps, self._ring.rungs.laps
    if not self._leaderboard.add(model, laps, event.step, event.scores):
      return
    self._leaderboard.write()
    self._store.records.show_scores(model, self._leaderboard.all_scores(model), laps == count)
    note(
      f'{self._ring.candidates[model].name}  lap {laps} of {count}, step '
      f'{event.step}: {_text(event.scores)}'
    )

  def _on_failure(self, event):
    self._leaderboard.fail(event.model, event.step, event.reason)
    self._leaderboard.write()
    note(f'{self._ring.candidates[event.model].name}  failed: {event.reason}')
    self._policy.inside.discard(event.model)
    self._send_event(0, messages.Retired(event.model, event.step))

  def _append_scores(self, model, step):
    """Adds scores to the metrics.jsonl of a model, which this process holds."""
    records = self._leaderboard.all_scores(model)
    self._store.records.append_scores(model, step, records)


def open_leaderboard(ring) -> leaderboard_lib.Leaderboard:
  """Returns the leaderboard of a ring, with what its workdir has."""
  return leaderboard_lib.Leaderboard(
    ring.workdir, ring.candidates, ring.rungs, ring.config.checkpoint.best_metric
  )


def evaluate(ring, runners, store, which: str) -> dict:
  """Scores a checkpoint of every model.

  Args:
    ring: `ring.Ring`.
    runners: `runner.Runners` of any station.
    store: `store.Store`.
    which: 'newest', 'best' or a step.

  Returns:
    The last scores of the best model.

  Raises:
    ConfigError: if there is no such checkpoint.
  """
  count = 0
  for candidate in ring.candidates:
    checkpoints = store.checkpoints(candidate.index)
    if which == 'best' and not checkpoints.steps(checkpoint_lib.BEST):
      continue  # it has left the ring before its first score
    restored = checkpoints.restore(which)
    if restored is None:
      continue
    state, step = restored
    runner = runners[candidate.index]
    scores = runner.score(state.evaluated(), ring.eval_source)
    note(f'{candidate.name}  step {step}: {_text(scores)}')
    count += 1
  if not count:
    raise config_lib.ConfigError(f'{ring.workdir} has no checkpoint to evaluate')
  return announce(ring, open_leaderboard(ring))


def announce(ring, leaderboard: leaderboard_lib.Leaderboard) -> dict:
  """Prints the leaderboard.

  Returns:
    The last scores of the best model, {} if there are none.
  """
  leaderboard.write()
  note(leaderboard.table())
  note(f'leaderboard: {os.path.join(ring.workdir, leaderboard_lib.PAGE)}')
  return leaderboard.best()


def note(text: str) -> None:
  """Prints a line for people."""
  print(text, flush=True)


def _text(scores):
  return ', '.join(
    f'{label} {metric_labels.format_value(n, scores[n])}'
    for n, label in metric_labels.labels(scores).items()
  )
