"""What models' steps and scores showed: metrics.jsonl and tensorboard/."""

import os
import threading
import time

from anp_jax.reporting import event_file, telemetry
from anp_jax.system import files

_EVENTS = 'tensorboard'
_NO_SCORES = ('model', 'laps', 'step', 'time')


class Records:
  """Writes what people read of each model, to the model's own folder.

  A model's metrics.jsonl and its event files of training are written by the
  process that holds it. Event files of its scores, which any station computes,
  are written by process 0 to a folder of their own: TensorBoard follows the
  newest file of a folder, and reads no further in the others.
  """

  def __init__(self, ring):
    """Prepares the files, which are opened when there is something to write.

    Args:
      ring: `ring.Ring`.
    """
    self._ring = ring
    self._lock = threading.Lock()
    self._events = {}  # by model and kind
    self._score_steps = {}  # by model, steps whose scores metrics.jsonl has

  def train(self, model: int, step: int, metrics: dict) -> None:
    """Records a step of a model that this process holds."""
    self._append(model, 'train', step, time.time(), metrics)
    if self._ring.config.log.tensorboard:
      with self._lock:
        # What is there after the step before is of a run that was cut off.
        events = self._open(model, 'train', step - 1)
        if events:
          events.write('train', step, metrics)

  def show_scores(self, model: int, records: list[dict], is_last: bool) -> None:
    """Shows scores in TensorBoard; process 0 alone does.

    Args:
      model: its index.
      records: all that the leaderboard has of it, the new one at the end.
      is_last: whether no more will come.
    """
    if not self._ring.config.log.tensorboard:
      return
    with self._lock:
      # A new file purges what is in older ones: the leaderboard knows best.
      is_open = self._events.get((model, 'validation'))
      events = self._open(model, 'validation', 0)
      for r in records[-1:] if is_open else records:
        if events:
          events.write('validation', r['step'], _scores(r), r['time'])
      if is_last:
        self._close(model, 'validation')

  def append_scores(self, model: int, step: int, records: list[dict]) -> None:
    """Adds scores to the metrics.jsonl of a model that this process holds.

    Args:
      model: its index.
      step: of the model: later scores are of a run that was cut off.
      records: all that the leaderboard has of it.
    """
    if model not in self._score_steps:
      self._score_steps[model] = {
        r['step'] for r in telemetry.read(self._ring.folder(model)) if r['kind'] == 'validation'
      }
    for r in records:
      if r['step'] <= step and r['step'] not in self._score_steps[model]:
        self._append(model, 'validation', r['step'], r['time'], _scores(r))
        self._score_steps[model].add(r['step'])

  def close_training(self, model: int) -> None:
    """Closes what the next process to hold a model writes to."""
    with self._lock:
      self._close(model, 'train')

  def close_model(self, model: int) -> None:
    """Closes all files of a model that has left the ring."""
    with self._lock:
      for kind in ('train', 'validation'):
        self._close(model, kind)

  def close(self) -> None:
    """Closes all event files."""
    for model, _ in list(self._events):
      self.close_model(model)

  def _append(self, model, kind, step, when, values):
    ring = self._ring
    path = os.path.join(ring.folder(model), 'metrics.jsonl')
    size = ring.candidates[model].config.batch_size
    line = {
      'kind': kind,
      'step': step,
      'time': when,
      'epoch': step * size / len(ring.source),
      **values,
    }
    try:
      files.append_json_line(path, line)
    except OSError as e:  # a full disk: what is trained is worth more
      print(f'{path}: step {step} is not recorded: {e.strerror}', flush=True)

  def _open(self, model, kind, start_step):
    """Returns the event file; None if it cannot be opened."""
    key = model, kind
    if key not in self._events:
      folder = os.path.join(self._ring.folder(model), _EVENTS)
      if kind == 'validation':
        folder = os.path.join(folder, kind)
      try:
        self._events[key] = event_file.EventFile(folder, start_step)
      except OSError as e:
        print(f'{folder}: no event file: {e.strerror}', flush=True)
        self._events[key] = None
    return self._events[key]

  def _close(self, model, kind):
    events = self._events.pop((model, kind), None)
    if events:
      events.close()


def _scores(record):
  return {k: v for k, v in record.items() if k not in _NO_SCORES}
