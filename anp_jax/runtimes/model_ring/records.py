"""Metrics of a ring's models: metrics.jsonl and TensorBoard's event files."""

import os
import time

from anp_jax.reporting import event_file, telemetry
from anp_jax.runtimes.model_ring import ring as ring_lib
from anp_jax.system import files

_NO_SCORES = ('model', 'laps', 'step', 'time')


class Records:
  """Writes what people read of each model, to the model's own folder.

  Only the process that holds a model writes there. Process 0 holds each model
  between two laps and then adds the scores, which any station computes.
  """

  def __init__(self, ring: ring_lib.Ring):
    """Prepares the files, which are opened when there is something to write."""
    self._ring = ring
    self._events: dict[int, event_file.EventFile | None] = {}
    self._score_steps: dict[int, set[int]] = {}  # steps whose scores metrics.jsonl has

  def train(self, model: int, step: int, metrics: dict[str, float]) -> None:
    """Records a step of a model that this process holds."""
    self._append(model, 'train', step, time.time(), metrics)

  def append_scores(self, model: int, step: int, records: list[dict]) -> None:
    """Adds scores to the files of a model that this process holds.

    Args:
      model: index of the model.
      step: step of the model; later scores are those of a run that was cut off.
      records: all records that the leaderboard has of the model.
    """
    if model not in self._score_steps:
      self._score_steps[model] = {
        r['step'] for r in telemetry.read(self._ring.folder(model)) if r['kind'] == 'validation'
      }
    for r in records:
      if r['step'] <= step and r['step'] not in self._score_steps[model]:
        scores = {k: v for k, v in r.items() if k not in _NO_SCORES}
        self._append(model, 'validation', r['step'], r['time'], scores)
        self._score_steps[model].add(r['step'])

  def close_model(self, model: int) -> None:
    """Closes the event file of a model that leaves this process or the ring."""
    events = self._events.pop(model, None)
    if events:
      events.close()

  def close(self) -> None:
    """Closes all event files."""
    for model in list(self._events):
      self.close_model(model)

  def _append(self, model, kind, step, when, values):
    """Writes a line and events."""
    ring = self._ring
    if ring.config.log.tensorboard and model not in self._events:
      self._events[model] = self._open(ring.folder(model))
    path = os.path.join(ring.folder(model), telemetry.METRICS)
    epoch = step * ring.candidates[model].config.batch_size / len(ring.source)
    line = {'kind': kind, 'step': step, 'time': when, 'epoch': epoch, **values}
    try:
      files.append_json_line(path, line)
    except OSError as e:  # a full disk: what is trained is worth more
      print(f'{path}: step {step} is not recorded: {e.strerror}', flush=True)
    if events := self._events.get(model):
      events.write(kind, step, values, when)

  def _open(self, model_folder):
    """Returns the event file; None if it cannot be opened."""
    folder = os.path.join(model_folder, telemetry.TENSORBOARD)
    # Later events than in metrics.jsonl were written by a run that was cut off.
    last_step = max((r['step'] for r in telemetry.read(model_folder)), default=0)
    try:
      return event_file.EventFile(folder, last_step)
    except OSError as e:
      print(f'{folder}: no event file: {e.strerror}', flush=True)
      return None
