"""Telemetry of a run: progress line, metrics.jsonl, TensorBoard."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import os
import sys
import time
from typing import Protocol, TextIO

from anp_jax.config import urls
from anp_jax.reporting import metric_lines, step_rates
from anp_jax.system import files, progress
from anp_jax.training import metric_labels

METRICS = metric_lines.NAME
TENSORBOARD = 'tensorboard'  # likewise, a folder of event files

# The parts of the progress line that a narrow terminal lacks, first to last.
_DROPPED = 'epoch MFU input rate noun_top1 adjective_top1 ETA anp_top1 loss'.split()


def read(workdir: str) -> list[dict]:
  """Returns the metrics in workdir/metrics.jsonl, oldest first, without torn lines."""
  return [
    line for line in metric_lines.read(workdir) if line['kind'] not in metric_lines.WITHOUT_METRICS
  ]


def result(workdir: str) -> dict:
  """Returns the result of a run that has ended; {} before its end."""
  last = metric_lines.read(workdir)[-1:]
  return next((line for line in last if line['kind'] == metric_lines.RESULT), {})


def write_result(workdir: str, values: dict) -> None:
  """Ends workdir/metrics.jsonl with a line of kind 'result'.

  Args:
    workdir: folder of a run that has ended.
    values: 'step' and further JSON values.

  Raises:
    OSError: if it cannot be written.
  """
  line = {'kind': metric_lines.RESULT, 'time': time.time(), **values}
  files.append_json_line(os.path.join(workdir, METRICS), line)


def of_kind(workdir: str, kind: str) -> list[dict]:
  """Returns the lines of one kind of a run, in order, such as `metric_lines.CHANGE`."""
  return [line for line in metric_lines.read(workdir) if line['kind'] == kind]


def durations(workdir: str) -> dict[str, float]:
  """Returns the seconds between a run's steps by activity: 'start', 'compiling', ..."""
  seconds: dict[str, float] = {}
  for record in of_kind(workdir, metric_lines.TIME):
    seconds[record['what']] = seconds.get(record['what'], 0.0) + record['seconds']
  return seconds


def truncate_after(workdir: str, step: int) -> None:
  """Removes lines after a step from metrics.jsonl, and torn ones."""
  # At step 0 nothing was restored: every line is of a run that left no state.
  # A change at the step itself is recorded again, if it still is one; so is the
  # command.
  records = [
    r
    for r in metric_lines.read(workdir)
    if step and r['step'] <= step - (r['kind'] in (metric_lines.CHANGE, metric_lines.START))
  ]
  files.write_atomic(os.path.join(workdir, METRICS), ''.join(json.dumps(r) + '\n' for r in records))


class Writer(Protocol):
  """A further destination of metrics."""

  def write(self, kind: str, step: int, values: dict[str, float]) -> None:
    """Adds the metrics of a step; kind is 'train' or 'validation'."""

  def close(self) -> None:
    """Writes pending metrics, and ends."""


class Telemetry:
  """The progress of a run for people and files; only the primary process writes."""

  def __init__(
    self,
    workdir: str,
    length: step_rates.RunLength,
    peak_flops: float = 0.0,
    writers: Sequence[Callable[[], Writer]] = (),
    primary: bool = True,
    line: progress.LiveLine | None = None,
  ):
    """Opens the files; lines after length.start_step are removed.

    Args:
      workdir: folder of the run, with metrics.jsonl.
      length: length of the run.
      peak_flops: FLOP/s of all devices together; 0.0 leaves the MFU out.
      writers: functions that open further destinations, where this process writes.
      primary: whether this is the one process that writes.
      line: destination of the primary process's lines for people, standard output by
        default. Its clock is the telemetry's.
    """
    self._line = progress.LiveLine(None)
    if primary:
      self._line = line or progress.LiveLine(sys.stdout)
    self._length, self._last = length, length.start_step
    self._rates = step_rates.StepRates(length, peak_flops, self._line.clock)
    self._activity = ''
    self._fields: dict[str, str] = {}  # parts of the progress line by name
    self._simulated: Callable[[str, int], dict[str, float]] | None = None
    self._file: TextIO | None = None
    self._writers: list[Writer] = []
    if primary:
      os.makedirs(workdir, exist_ok=True)
      truncate_after(workdir, length.start_step)
      self._file = open(os.path.join(workdir, METRICS), 'a')
      self._writers = [open_writer() for open_writer in writers]

  def set_flops(self, flops_per_step: float) -> None:
    """Sets the operations of a step on all devices, for the MFU."""
    self._rates.flops_per_step = flops_per_step

  def simulate(self, values: Callable[[str, int], dict[str, float]]) -> None:
    """Records what a simulation tells with the metrics of each step.

    Args:
      values: ('train' or 'validation', step) -> metrics by name, such as
        'simulated_seconds' from the run's start.
    """
    self._simulated = values

  def start_timing(self, step: int) -> None:
    """Counts rates from here on; `step` is done and counts in no rate."""
    self._rates.start(step)

  def train(self, step: int, metrics: dict[str, float], input_wait: float) -> None:
    """Records the metrics of a step, and rates since the last call.

    Args:
      step: updates made so far.
      metrics: name to Python float: loss, accuracies, learning_rate, ...
      input_wait: seconds that the loop waited for input since the last call.
    """
    if self._file is None:
      return
    values = metrics | self._rates.end(step, input_wait)
    self._record('train', step, values)
    self._fields = self._progress(step, values)
    if self._line.is_live:
      self._draw()
    else:
      self._line.log('  '.join(self._fields.values()))

  def evaluation(self, step: int, metrics: dict[str, float]) -> None:
    """Records the scores over the whole validation set at `step`."""
    if self._file is None:
      return
    self._record('validation', step, metrics)
    text, epoch = metric_labels.text(metrics), self._length.epoch(step)
    self.log(f'validation at step {step} (epoch {epoch:.2f}): {text}')

  @contextlib.contextmanager
  def paused(self, what: str) -> Iterator[None]:
    """Excludes its block from all rates; the ETA expects it to come back.

    Args:
      what: activity, shown in a terminal: 'evaluating', 'saving', or 'compiling',
        which the ETA takes to happen once.
    """
    start, outer, self._activity = self._line.clock(), self._activity, what
    self._draw()
    try:
      yield
    finally:
      self._activity = outer
      if not outer:  # a pause within a pause is counted once
        seconds = self._line.clock() - start
        self._rates.pause(seconds, comes_back=what != 'compiling')
        self.log_duration(what, seconds)
      self._draw()

  def log_duration(self, what: str, seconds: float) -> None:
    """Records the duration of something other than a step."""
    self._write_line(metric_lines.TIME, self._last, what=what, seconds=seconds)

  @property
  def start_step(self) -> int:
    """The restored step; 0 for a new run."""
    return self._length.start_step

  def changes(self, values: dict[str, tuple], rates: tuple = ()) -> None:
    """Records keys of the config that change at the start step.

    Args:
      values: (old, new) by dotted key; None where the key does not apply.
      rates: (old, new) learning rate of the start step, where the duration
        changes and moves the schedule.
    """
    step = self._length.start_step
    for key, (old, new) in values.items():
      text = f'change   config.{key}={new} from step {step} on, {old} before'
      fields = {'key': key, 'old': old, 'new': new}
      if rates and key == 'duration':
        text += f': learning rate {rates[1]:.6g}, not {rates[0]:.6g}'
        fields |= {'old_rate': rates[0], 'new_rate': rates[1]}
      self.log(text)
      self._write_line(metric_lines.CHANGE, step, **fields)

  def start(self, values: dict) -> None:
    """Records the command by which a run begins or is resumed, and its data.

    Args:
      values: further JSON values.
    """
    step = self._length.start_step
    # A run that has ended ends with its result.
    if step < self._length.total_steps:
      fields = {'time': time.time(), 'command': metric_lines.command()} | values
      self._write_line(metric_lines.START, step, **fields)

  def restart(
    self, lost: Sequence[str], processes: tuple[int, int], step: int, seconds: float, repeated: int
  ) -> None:
    """Records that the run goes on after some of its processes were lost or have come.

    Args:
      lost: why each process is missing that was lost; () where one has come.
      processes: number of processes that go on, and of those before.
      step: step from which they go on.
      seconds: time from the first loss to the end of the next step; 0 where nobody waits.
      repeated: number of steps whose numbers were read before.
    """
    why, (count, before) = '; '.join(lost) or 'the processes have changed', processes
    of = f' of {before}' if count < before else ''
    self.log(
      f'{why}: going on with {count}{of} {"process" if max(processes) == 1 else "processes"} from '
      f'step {step}; {seconds:.1f} s; {repeated} '
      f'{"step" if repeated == 1 else "steps"} computed again'
    )
    self._write_line(
      metric_lines.RESTART,
      step,
      lost=list(lost),
      processes=count,
      seconds=seconds,
      repeated=repeated,
    )

  def log(self, text: str) -> None:
    """Prints a line for people, above the live line."""
    self._line.log(urls.remote_url(text))

  def close(self) -> None:
    """Ends the live line and closes the files; a second call does nothing."""
    self._line.close()
    closings = [writer.close for writer in self._writers]
    if self._file is not None:
      closings.append(self._file.close)
    for close in closings:
      with contextlib.suppress(OSError):  # a full disk
        close()
    self._line = progress.LiveLine(None, self._line.clock)
    self._file, self._writers = None, []

  def _record(self, kind, step, values):
    values = {name: float(value) for name, value in values.items()}
    if self._simulated:
      values |= self._simulated(kind, step)
    self._last = step
    self._write_line(kind, step, time=time.time(), epoch=self._length.epoch(step), **values)
    for writer in self._writers:
      writer.write(kind, step, values)

  def _write_line(self, kind, step, **fields):
    """Writes a line, where this process writes."""
    if self._file is None:
      return
    # One write and a flush: a crash tears the last line at most.
    try:
      self._file.write(json.dumps({'kind': kind, 'step': step, **fields}) + '\n')
      self._file.flush()
    except OSError as e:  # a full disk: what is trained is worth more
      self.log(f'{METRICS}: step {step} is not recorded: {e.strerror}')

  def _progress(self, step, values):
    """Returns the parts of the progress line, by name and in order."""
    fields = {
      'step': f'{step}/{self._length.total_steps}',
      'epoch': f'epoch {self._length.epoch(step):.2f}',
    }
    labels = metric_labels.labels(values)
    for name in ('loss', 'anp_top1', 'adjective_top1', 'noun_top1'):
      if name in values:
        value = metric_labels.format_value(name, values[name])
        fields[name] = f'{labels[name]} {value}'
    if 'images_per_second' in values:
      fields['rate'] = f'{values["images_per_second"]:.0f} images/s'
      fields['input'] = f'input wait {100 * values["input_wait"]:.1f}%'
    if 'mfu' in values:
      fields['MFU'] = f'MFU {100 * values["mfu"]:.1f}%'
    fields['ETA'] = f'ETA {progress.duration(self._rates.seconds_left(step))}'
    return fields

  def _draw(self):
    """Writes the live line again, where there is one."""
    if self._line.is_live:
      fields = {'activity': self._activity} if self._activity else {}
      self._line.show(_fitted(fields | self._fields, self._line.width))


def _fitted(fields, width):
  """Returns the fields that fit into a width, without the least important ones."""
  for name in _DROPPED:
    if len('  '.join(fields.values())) <= width:
      break
    fields.pop(name, None)
  return '  '.join(fields.values())[:width]
