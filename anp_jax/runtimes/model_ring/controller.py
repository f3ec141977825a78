"""The controller of a ring, in process 0: the models in the ring, and all scores."""

from collections.abc import Callable
import itertools
import os
from typing import Any

from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib, run_dir
from anp_jax.reporting import summary, telemetry
from anp_jax.runtimes.model_ring import (
  leaderboard as leaderboard_lib,
  messages,
  ring_runner as runner_lib,
  store as store_lib,
)
from anp_jax.training import metric_labels


class RingController:
  """Decides which models enter and stay in the ring, and when the ring ends.

  Models arrive here after each lap. Only the main thread calls it.
  """

  def __init__(
    self,
    runners: runner_lib.Runners,
    store: store_lib.Store,
    send_event: Callable[[int, Any], None],
  ):
    """Reads the leaderboard; nothing is written yet.

    Args:
      runners: runners of station 0.
      store: folders of the models.
      send_event: (address, event) -> None, see `messages.Sender`.
    """
    self._ring = runners.ring
    self._runners, self._store = runners, store
    self._send_event = send_event
    self._leaderboard = _open_leaderboard(self._ring)
    self._inside: set[int] = set()  # models in the ring
    self._lost: set[tuple[int, int]] = set()  # (model, laps) that can no longer be scored

  def start(self) -> list[int]:
    """Sends each model to where it begins or continues; returns those in the ring."""
    self._introduce()
    for model in self._ring.models:
      self._enter(model)
    return sorted(self._inside)

  def on_event(self, event: Any) -> None:
    """Handles a model that has done a lap, scores, or a failure."""
    handlers = {
      messages.ModelMessage: self._on_lap,
      messages.Scored: self._on_scores,
      messages.Failed: self._on_failure,
    }
    handlers[type(event)](event)

  def is_over(self) -> bool:
    """Returns whether all models have left the ring and have their scores."""
    if self._inside:
      return False
    laps, leaderboard = self._ring.laps.total, self._leaderboard
    return all(
      (model, k) in self._lost
      for model in self._ring.models
      if leaderboard.status(model, laps) == leaderboard_lib.FINISHED
      for k in leaderboard.missing_scores(model, laps)
    )

  def conclude(self, steps: dict[int, int], reason: str) -> dict:
    """Reports how far all models have come, once no station works any more.

    Args:
      steps: steps that each model in the ring has made.
      reason: cause of a stop before the end; '' at the end.

    Returns:
      The last scores of the best model, {} if there are none.
    """
    done, left = 0, 0
    for model in self._ring.models:
      schedule = self._runners[model].schedule
      scores = self._leaderboard.last_scores(model)
      step = steps.get(model, scores.get('step', 0))
      self._store.records.append_scores(model, step, self._leaderboard.all_scores(model))
      done += step
      status = self._leaderboard.status(model, schedule.laps_done(step))
      if status == leaderboard_lib.GO_ON:
        left += schedule.total - step
    if left and reason:
      run_dir.mark_stopped(self._ring.workdir, done, done + left, reason)
    return _announce(self._ring, self._leaderboard)

  def _introduce(self):
    ring = self._ring
    for text in (
      f'workdir  {ring.workdir}',
      f'strategy {ring.config.strategy.name}',
      f'ring     {len(ring.candidates)} models, {ring.stations} stations, {ring.laps.total} laps',
      f'parts    {", ".join(map(str, ring.sizes))} of {len(ring.source)} '
      f'examples of {ring.source.name}',
      f'scores   {ring.config.checkpoint.best_metric} of {len(ring.eval_source)} examples',
      *summary.cautions(
        ring.config, ring.source, max(c.config.batch_size for c in ring.candidates), min(ring.sizes)
      ),
    ):
      _note(text)

  def _enter(self, model):
    """Sends a model into the ring, unless it has left it.

    A model that is restored has those laps scored whose score was cut off, too.
    """
    if self._leaderboard.status(model, 0) == leaderboard_lib.FAILED:
      return
    ring, schedule = self._ring, self._runners[model].schedule
    # A lap without a step, where a batch is larger than all shards, has no scores.
    laps_of_ends = enumerate(itertools.pairwise([0, *schedule.ends]), 1)
    self._lost |= {(model, k) for k, (begin, end) in laps_of_ends if begin == end}
    checkpoints = self._store.checkpoints(model)
    restored = checkpoints.restore()
    telemetry.truncate_after(ring.folder(model), restored[1] if restored else 0)
    if restored is None:
      self._inside.add(model)
      self._send_event(0, messages.ModelMessage(model))
      return
    state, step = restored
    laps = schedule.laps_done(step)
    self._request_missing_scores(model, laps, checkpoints)
    if self._leaderboard.status(model, laps) != leaderboard_lib.GO_ON:
      return
    self._inside.add(model)
    _note(f'{ring.candidates[model].name}  continuing from step {step}')
    at_lap_end = step in schedule.ends
    address = messages.CONTROLLER if at_lap_end else schedule.at(step).station
    self._send_event(address, messages.ModelMessage(model, step, state))

  def _request_missing_scores(self, model, laps, checkpoints):
    ring, schedule = self._ring, self._runners[model].schedule
    for k in self._leaderboard.missing_scores(model, laps):
      lap_end = schedule.ends[k - 1]
      if lap_end not in checkpoints.steps():
        self._lost.add((model, k))
        continue
      try:
        lap_state, _ = checkpoints.restore(str(lap_end))
      except config_lib.ConfigError:  # damaged; a newer one is whole
        self._lost.add((model, k))
        continue
      if self._runners[model].config.checkpoint.keep_best:
        self._store.hold(model, lap_end, lap_state)
      # Station 0 is of this process, the only one that has read the state.
      request = messages.ScoreRequest(model, lap_end, lap_state.evaluated(), k, 0)
      self._send_event(ring.scorer(model, k), request)

  def _on_lap(self, message):
    """Sends a model on its next lap, or out of the ring."""
    model, step = message.model, message.step
    laps = self._runners[model].schedule.laps_done(step)
    status = self._leaderboard.status(model, laps)
    self._store.records.append_scores(model, step, self._leaderboard.all_scores(model))
    if status == leaderboard_lib.GO_ON:
      self._send_event(0, message)
      return
    _note(f'{self._ring.candidates[model].name}  {status} at step {step}')
    self._inside.discard(model)
    self._send_event(0, messages.Retired(model, step))

  def _on_scores(self, event):
    if self._leaderboard.add(event.model, event.laps, event.step, event.scores):
      self._leaderboard.write()
      _note(
        f'{self._ring.candidates[event.model].name}  lap {event.laps} of {self._ring.laps.total}, '
        f'step {event.step}: {metric_labels.text(event.scores)}'
      )

  def _on_failure(self, event):
    self._leaderboard.fail(event.model, event.step, event.reason)
    self._leaderboard.write()
    _note(f'{self._ring.candidates[event.model].name}  failed: {event.reason}')
    self._inside.discard(event.model)
    self._send_event(0, messages.Retired(event.model, event.step))


def evaluate(runners: runner_lib.Runners, store: store_lib.Store, which: str) -> dict:
  """Scores a checkpoint of every model.

  Args:
    runners: runners of any station.
    store: folders of the models.
    which: 'newest', 'best' or a step.

  Returns:
    The last scores of the best model.

  Raises:
    ConfigError: if there is no such checkpoint.
  """
  ring, count = runners.ring, 0
  for candidate in ring.candidates:
    checkpoints = store.checkpoints(candidate.index)
    if which == 'best' and not checkpoints.steps(checkpoint_lib.BEST):
      continue  # it has left the ring before its first score
    restored = checkpoints.restore(which)
    if restored is None:
      continue
    state, step = restored
    scores = runners[candidate.index].score(state.evaluated(), ring.eval_source)
    _note(f'{candidate.name}  step {step}: {metric_labels.text(scores)}')
    count += 1
  if not count:
    raise config_lib.ConfigError(f'{ring.workdir} has no checkpoint to evaluate')
  return _announce(ring, _open_leaderboard(ring))


def _open_leaderboard(ring):
  return leaderboard_lib.Leaderboard(
    ring.workdir, ring.candidates, ring.laps, ring.config.checkpoint.best_metric
  )


def _announce(ring, leaderboard):
  """Prints the leaderboard; returns the last scores of the best model."""
  leaderboard.write()
  _note(leaderboard.table())
  _note(f'leaderboard: {os.path.join(ring.workdir, leaderboard_lib.PAGE)}')
  return leaderboard.best()


def _note(text):
  print(text, flush=True)
