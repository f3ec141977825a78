"""What a run says while it runs: progress line, metrics.jsonl, TensorBoard."""

import collections
import contextlib
import json
import os
import re
import sys
import time

from anp_jax.system import progress
from anp_jax.training import metric_labels

# Scores in the order people read them: the parts stand beside their pair.

# Dense (not 2:4 sparse) peak TFLOP/s of one JAX device: (pattern in its
# device_kind, bfloat16, float32); the first match wins. float32 is what JAX's
# default precision reaches: TF32 tensor cores since Ampere, the CUDA cores
# before, one bfloat16 pass on TPU. Volta and Turing have no bfloat16 units, so
# it counts as float32 there. From NVIDIA's data sheet of each card (half of a
# rate that it gives as sparse), AWS's for the A10G, and
# cloud.google.com/tpu/docs/system-architecture-tpu-vm; a chip of TPU v2, v3 and
# 7x is two JAX devices, which hold half of the sheet's number.
_PEAKS = (
  (r'GB[23]00', 2500.0, 1250.0), (r'B[23]00', 2250.0, 1125.0),
  (r'H[12]00 NVL', 835.5, 417.5), (r'H100 PCIe', 756.5, 378.0),
  (r'G?H[12]00', 989.5, 494.5), (r'H20', 148.0, 74.0),
  (r'A100', 312.0, 156.0), (r'A40', 149.7, 74.8), (r'A30', 165.0, 82.0),
  (r'A10G', 70.0, 35.0), (r'A10', 125.0, 62.5),
  (r'L40S', 362.05, 183.0), (r'L40', 181.05, 90.5), (r'L4', 121.0, 60.0),
  (r'V100S', 16.4, 16.4), (r'V100-PCIE', 14.0, 14.0), (r'V100', 15.7, 15.7),
  (r'T4', 8.1, 8.1), (r'TPU ?7x', 1153.5, 1153.5),
  (r'TPU v6( lite|e)', 918.0, 918.0), (r'TPU v5( lite|e)', 197.0, 197.0),
  (r'TPU v5p?', 459.0, 459.0), (r'TPU v4', 275.0, 275.0),
  (r'TPU v3', 61.5, 61.5), (r'TPU v2', 22.5, 22.5),
)  # fmt: skip

# The ETA looks at this many of the last train() calls: a slow start (cold
# caches, compilation) leaves it, and the noise of one interval hardly shows.
_RECENT = 32

# Kind of a line that says how long something beside the steps has taken.
_TIME = 'time'

# The parts of the progress line that a narrow terminal keeps, first to last.
_PRIORITY = (
  'activity', 'step', 'loss', 'anp_top1', 'ETA', 'adjective_top1', 'noun_top1',
  'rate', 'input', 'MFU', 'epoch',
)  # fmt: skip


def peak_flops(device_kind: str, dtype: str) -> float:
  """Dense peak FLOP/s of one device, 0.0 where it is not known.

  Args:
    device_kind: JAX's `device.device_kind`, such as 'NVIDIA H100 80GB HBM3'.
    dtype: of the computation; 'bfloat16' or 'float32' (TF32 where there is).
  """
  # A MIG slice carries the whole chip's name and a part of its units.
  if dtype not in ('bfloat16', 'float32') or ' MIG ' in f'{device_kind} ':
    return 0.0
  for pattern, bfloat16, float32 in _PEAKS:
    if re.search(rf'\b{pattern}\b', device_kind, re.IGNORECASE):
      return (bfloat16 if dtype == 'bfloat16' else float32) * 1e12
  return 0.0


def read(workdir: str) -> list[dict]:
  """The metrics in workdir/metrics.jsonl, oldest first; torn lines left out."""
  return [r for r in _records(workdir) if r['kind'] != _TIME]


def times(workdir: str) -> dict[str, float]:
  """Seconds of a run beside its steps: 'start', 'compiling', 'saving', ..."""
  found = {}
  for record in _records(workdir):
    if record['kind'] == _TIME:
      what = record['what']
      found[what] = found.get(what, 0.0) + record['seconds']
  return found


def _records(workdir):
  records = []
  try:
    with open(os.path.join(workdir, 'metrics.jsonl'), 'rb') as f:
      lines = f.read().split(b'\n')
  except FileNotFoundError:
    return []
  for line in lines:
    with contextlib.suppress(ValueError):
      record = json.loads(line)
      if isinstance(record, dict) and {'kind', 'step'} <= record.keys():
        records.append(record)
  return records


def elapsed(seconds: float) -> str:
  """A time as 1:02:03, or 4:05 below one hour."""
  minutes, second = divmod(round(seconds), 60)
  hour, minute = divmod(minutes, 60)
  return f'{hour}:{minute:02}:{second:02}' if hour else f'{minute}:{second:02}'


def score(name: str, value: float) -> str:
  """A metric's value for people: accuracies in percent with one decimal."""
  return f'{100 * value:.1f}%' if '_top' in name else f'{value:.4g}'


class Telemetry:
  """Tells people and files how a run goes; only the primary process writes."""

  def __init__(
    self, workdir, *, total_steps, steps_per_epoch, batch_size, start_step=0,
    flops_per_step=0.0, peak_flops=0.0, tensorboard=True, writer=None,
    primary=True, stream=None, clock=time.monotonic,
  ):  # fmt: skip
    """Opens the files; what is after start_step in them is taken back.

    Args:
      workdir: the run's folder; metrics.jsonl and tensorboard/ go there.
      total_steps: the step at which the run ends.
      steps_per_epoch: may be a fraction.
      batch_size: images a step over all devices.
      start_step: the restored step; 0 for a new run.
      flops_per_step: of all devices together.
      peak_flops: FLOP/s of all devices together; 0.0 leaves the MFU out.
      tensorboard: whether to write event files.
      writer: () -> one more place for the metrics, with `write(kind, step,
        values)` and `close()`; called where this process writes. None: none.
      primary: whether this is the one process that writes.
      stream: where lines for people go; standard output by default.
      clock: returns seconds that never run backwards.
    """
    self._total_steps = total_steps
    self._steps_per_epoch = steps_per_epoch
    self._batch_size = batch_size
    self._start_step = self._step = self._last = start_step
    self._flops_per_step = flops_per_step
    self._peak_flops = peak_flops
    self._clock = clock
    self._mark = clock()  # when the current interval began
    self._paused = 0.0  # seconds of pauses in the current interval
    self._pauses = 0.0  # seconds of pauses that come back, since the start
    self._intervals = collections.deque(maxlen=_RECENT)  # (steps, seconds)
    self._activity, self._fields = '', {}  # of the progress line
    self._file = self._board = None
    self._writer = writer() if primary and writer else None
    self._line = progress.LiveLine((stream or sys.stdout) if primary else None)
    if primary:
      os.makedirs(workdir, exist_ok=True)
      cut(workdir, start_step)
      self._file = open(os.path.join(workdir, 'metrics.jsonl'), 'a')
      if tensorboard:
        self._board = Events(os.path.join(workdir, 'tensorboard'), start_step)

  def set_flops(self, flops_per_step: float):
    """Sets the count for the MFU, known once the step is compiled."""
    self._flops_per_step = flops_per_step

  def begin(self, step: int):
    """Rates count from here: `step` is done, and what it took is no rate."""
    self._mark, self._paused, self._step = self._clock(), 0.0, step

  def train(self, step: int, metrics: dict[str, float], input_wait: float):
    """Records what was measured since the last call.

    Args:
      step: updates made so far.
      metrics: name to Python float: loss, accuracies, learning_rate, ...
      input_wait: seconds the loop waited for input since the last call.
    """
    if self._file is None:
      return
    now = self._clock()  # which may stand still between two calls
    seconds = max(now - self._mark - self._paused, 1e-9)
    steps = step - self._step
    self._mark, self._paused, self._step = now, 0.0, step
    values = dict(metrics)
    if steps:  # none at the first step after `begin`: nothing was timed yet
      self._intervals.append((steps, seconds))
      values['seconds'] = seconds
      values['images_per_second'] = steps * self._batch_size / seconds
      values['input_wait'] = min(input_wait / seconds, 1.0)
      if self._peak_flops > 0 and self._flops_per_step > 0:
        rate = steps * self._flops_per_step / seconds
        values['mfu'] = rate / self._peak_flops
    self._record('train', step, values)
    self._fields = self._progress(step, values)
    if self._line.is_live:
      self._draw()
    else:
      self._line.note('  '.join(self._fields.values()))

  def evaluation(self, step: int, metrics: dict[str, float]):
    """Records the scores over the whole validation set at `step`."""
    if self._file is None:
      return
    self._record('validation', step, metrics)
    epoch = step / self._steps_per_epoch
    scores = ', '.join(
      f'{label} {score(k, metrics[k])}'
      for k, label in metric_labels.labels(metrics).items()
    )
    self.note(f'validation at step {step} (epoch {epoch:.2f}): {scores}')

  @contextlib.contextmanager
  def paused(self, what: str):
    """Time in here counts in no rate; the ETA expects it to come back.

    Args:
      what: shown in a terminal: 'evaluating', 'saving', or 'compiling', which
        the ETA takes to happen once.
    """
    start, outer, self._activity = self._clock(), self._activity, what
    self._draw()
    try:
      yield
    finally:
      self._activity = outer
      if not outer:  # a pause within a pause is counted once
        seconds = self._clock() - start
        self._paused += seconds
        self.spent(what, seconds)
        self._pauses += seconds if what != 'compiling' else 0.0
      self._draw()

  def spent(self, what: str, seconds: float):
    """Records how long something beside the steps has taken."""
    if self._file is not None:
      self._write_line(
        {'kind': _TIME, 'step': self._last, 'what': what, 'seconds': seconds}
      )

  def note(self, text: str):
    """Prints a line for people, above the live line."""
    self._line.note(text)

  def close(self):
    """Ends the live line and closes the files; a second call does nothing."""
    self._line.close()
    for file in (self._writer, self._board, self._file):
      if file is not None:
        with contextlib.suppress(OSError):  # a full disk
          file.close()
    self._line = progress.LiveLine(None)
    self._writer = self._board = self._file = None

  def _record(self, kind, step, values):
    values = {name: float(value) for name, value in values.items()}
    self._last = step
    line = {'kind': kind, 'step': step, 'time': time.time()}
    line['epoch'] = step / self._steps_per_epoch
    self._write_line(line | values)
    if self._writer:
      self._writer.write(kind, step, values)
    if self._board:
      self._board.write(kind, step, values)

  def _write_line(self, line):
    # One write and a flush: a crash tears the last line at most.
    try:
      self._file.write(json.dumps(line) + '\n')
      self._file.flush()
    except OSError as e:  # a full disk: what is trained is worth more
      self.note(
        f'metrics.jsonl: step {line["step"]} is not recorded: {e.strerror}'
      )

  def _progress(self, step, values):
    """The parts of the progress line, by name and in order."""
    fields = {
      'step': f'{step}/{self._total_steps}',
      'epoch': f'epoch {step / self._steps_per_epoch:.2f}',
    }
    for name in ('loss', 'anp_top1', 'adjective_top1', 'noun_top1'):
      if name in values:
        fields[name] = (
          f'{metric_labels.labels(values)[name]} {score(name, values[name])}'
        )
    if 'images_per_second' in values:
      fields['rate'] = f'{values["images_per_second"]:.0f} images/s'
      fields['input'] = f'input wait {100 * values["input_wait"]:.1f}%'
    if 'mfu' in values:
      fields['MFU'] = f'MFU {100 * values["mfu"]:.1f}%'
    fields['ETA'] = f'ETA {elapsed(self._eta(step))}'
    return fields

  def _eta(self, step):
    """Seconds to the end: recent steps, and pauses averaged over the run."""
    steps = max(sum(s for s, _ in self._intervals), 1)
    seconds = sum(t for _, t in self._intervals) / steps
    seconds += self._pauses / max(step - self._start_step, 1)
    return max(self._total_steps - step, 0) * seconds

  def _draw(self):
    """Writes the live line again, where there is one."""
    if self._line.is_live:
      fields = {'activity': self._activity} if self._activity else {}
      self._line.show(_fit(fields | self._fields, self._line.width))


class Events:
  """An event file, which TensorBoard shows with those before it."""

  def __init__(self, folder: str, start_step: int):
    """Opens it; what is after start_step in older ones is taken back.

    Args:
      folder: of the files; one writes to it at a time.
      start_step: steps that were made before.

    Raises:
      OSError: if it cannot be written.
    """
    # It imports torch wherever that is installed: seconds of a start.
    import tensorboardX

    # A file is named after the second and the host, and one that exists is
    # emptied: without the suffix a quick restart erases what it continues. They
    # are read in the order of their names.
    self._writer = tensorboardX.SummaryWriter(
      folder,
      purge_step=start_step + 1 if start_step else 0,
      filename_suffix=f'.{time.time_ns()}.{os.getpid()}',
      flush_secs=10,
      # Endless: where the disk is full its thread ends, and a queue that
      # nobody reads would hold the run up once it is full.
      max_queue=0,
    )

  def write(
    self, kind: str, step: int, values: dict[str, float],
    when: float | None = None,
  ):  # fmt: skip
    """Adds values of a step, measured at a time; None: now."""
    for name, value in values.items():
      self._writer.add_scalar(f'{kind}/{name}', value, step, when)

  def close(self):
    """Writes what waits, and closes the file."""
    with contextlib.suppress(OSError):  # a full disk
      self._writer.close()


def _fit(fields, width):
  """As many fields as fit, the most important ones, in their own order."""
  kept = set()
  for key in _PRIORITY:
    chosen = [f for k, f in fields.items() if k in kept | {key}]
    if key in fields and len('  '.join(chosen)) <= width:
      kept.add(key)
  return '  '.join(f for k, f in fields.items() if k in kept)[:width]


def cut(workdir: str, start_step: int) -> None:
  """Takes lines after start_step out of metrics.jsonl, torn ones too."""
  path = os.path.join(workdir, 'metrics.jsonl')
  # At step 0 nothing was restored: every line is of a run that left no state.
  kept = [
    r for r in _records(workdir) if start_step and r['step'] <= start_step
  ]
  with open(path + '.tmp', 'w') as f:
    f.writelines(json.dumps(r) + '\n' for r in kept)
    f.flush()
    os.fsync(f.fileno())
  os.replace(path + '.tmp', path)
