"""Tables of a run: its scores and its speed, from metrics.jsonl."""

import itertools
import math
import statistics
import time

import numpy as np

from anp_jax.config import saved_run
from anp_jax.reporting import metric_lines, report_kit, telemetry
from anp_jax.system import progress
from anp_jax.training import metric_labels


def load(workdir: str, batch_size: int = 0) -> tuple[list[dict], list[dict]]:
  """Returns the lines of training and of validation, each step once, in order.

  Where steps were timed, each line has 'trained_seconds', the time of training until then. A
  step takes the mean time of its interval, so a run that was stopped and resumed has no gap.

  Args:
    workdir: folder of the run.
    batch_size: images of a step, as config.json in the folder has it; 0 without that: seconds
      are of the steps that were timed.
  """
  train: dict[int, dict] = {}
  validation: dict[int, dict] = {}
  for record in telemetry.read(workdir):
    # The last line counts: a resumed run may evaluate its first step again.
    by_step = train if record['kind'] == 'train' else validation
    by_step[record['step']] = record
  lines = [train[step] for step in sorted(train)]
  timed = [line for line in lines if 'images_per_second' in line]
  batch_size = batch_size or saved_run.read(workdir).get('batch_size', 0)
  timed = timed if batch_size else [line for line in timed if 'seconds' in line]
  ends = [0] + [line['step'] for line in timed]
  if batch_size:
    for line, (begin, end) in zip(timed, itertools.pairwise(ends)):
      line['seconds'] = (end - begin) * batch_size / line['images_per_second']
  scored = [validation[step] for step in sorted(validation)]
  if timed:
    clock = np.cumsum([0] + [line['seconds'] for line in timed])
    for line in lines + scored:
      line['trained_seconds'] = float(np.interp(line['step'], ends, clock))
  return lines, scored


def scores(train: list[dict], validation: list[dict]) -> report_kit.Table | None:
  """Returns the table of scores; None where nothing was scored."""
  names = set().union(*train[-1:], *validation)
  rows = [('', 'best validation', 'at', 'last validation', 'last training')]
  for name, label in metric_labels.labels(names).items():
    best = best_line(name, validation)
    last = [_value(name, last_line(name, lines)) for lines in (validation, train)]
    rows.append((label, _value(name, best), _where(best), *last))
  if len(rows) == 1:
    return None
  return report_kit.Table(rows if validation else [(row[0], row[-1]) for row in rows])


def facts(train: list[dict], validation: list[dict]) -> list[tuple]:
  """Returns speed and time as (name, text) rows."""
  if not train:
    return []
  ends = train[-1:] + validation[-1:]
  rows = [('trained', _where(max(ends, key=lambda r: r['step'])))]
  seconds = sum(r.get('seconds', 0) for r in train)
  rows.append(('training time', f'{progress.duration(seconds)} without pauses'))
  # The median: the first interval may hold a compilation.
  for name, label, form in (
    ('images_per_second', 'images/s (median)', '{:.0f}'),
    ('input_wait', 'input wait (median)', '{:.1%}'),
    ('mfu', 'MFU (median)', '{:.1%}'),
  ):
    values = [r[name] for r in train if name in r]
    if values:
      rows.append((label, form.format(statistics.median(values))))
  return rows


def result(train: list[dict], validation: list[dict]) -> dict:
  """Returns the result of a run, for programs.

  Args:
    train: lines of training, from `load`.
    validation: lines of validation, likewise.

  Returns:
    'step' and 'epoch' at the end, the 'best' and the 'last' validation metrics
    by name, 'training' metrics at the end, 'seconds' of training without
    pauses, and the median of 'images_per_second', None without any. A metric
    that is not finite is None.
  """
  ends = train[-1:] + validation[-1:]
  names = metric_labels.labels(set().union(*ends))
  end = max(ends, key=lambda r: r['step'], default={'step': 0, 'epoch': 0.0})
  return {
    'step': end['step'],
    'epoch': end['epoch'],
    'best': _finite(names, validation, best_line),
    'last': _finite(names, validation, last_line),
    'training': _finite(names, train, last_line),
    'seconds': sum(r.get('seconds', 0) for r in train),
    'images_per_second': images_per_second(train),
  }


def images_per_second(train: list[dict]) -> float | None:
  """Returns the median rate: the first interval may hold a compilation."""
  rates = [r['images_per_second'] for r in train if 'images_per_second' in r]
  return statistics.median(rates) if rates else None


def run(workdir: str) -> list[tuple]:
  """Returns data, dates and command of a run as (name, text) rows."""
  starts = telemetry.of_kind(workdir, metric_lines.START)
  if not starts:
    return []
  first, last = starts[0], starts[-1]
  end = max(r.get('time', 0) for r in [*starts, *telemetry.read(workdir)])
  images = f'{last["training_images"]:,} for training, {last["validation_images"]:,} for validation'
  rows = [
    ('trained on', last['data']),
    ('images', images),
    ('classes', last['classes']),
    ('started', _date(first['time'])),
    ('last step', _date(end)),
    ('command', last['command']),
  ]
  if len(starts) > 1:
    rows.insert(4, ('resumed', f'{len(starts) - 1} x'))
  return rows


def changes(workdir: str) -> list[tuple]:
  """Returns losses and joins of processes, and what --change changed, as (name, text) rows."""
  rows = [
    (
      f'at step {r["step"]}',
      f'{"; ".join(r["lost"]) or "the processes have changed"}: {r["processes"]} processes, '
      f'{r["seconds"]:.1f} s, {r["repeated"]} steps computed again',
    )
    for r in telemetry.of_kind(workdir, metric_lines.RESTART)
  ]
  for r in telemetry.of_kind(workdir, metric_lines.CHANGE):
    text = f'{r["key"]}={r["new"]}, {r["old"]} before'
    if {'old_rate', 'new_rate'} <= r.keys():
      before, now = fact(r['old_rate']), fact(r['new_rate'])
      text += f': learning rate {now}, not {before}'
    rows.append((f'from step {r["step"]}', text))
  return rows


def durations(workdir: str, train: list[dict]) -> dict[str, float]:
  """Returns the seconds of a run by activity, in the order of drawing.

  Args:
    workdir: folder of the run.
    train: lines of training, from `load`.
  """
  seconds = sum(r.get('seconds', 0) for r in train)
  waited = sum(r.get('seconds', 0) * r.get('input_wait', 0) for r in train)
  pauses = telemetry.durations(workdir)
  seconds_by_cause = {
    'start': pauses.pop('start', 0.0),
    'compiling': pauses.pop('compiling', 0.0),
    'steps': seconds - waited,
    'waiting for input': waited,
  }
  return {k: v for k, v in (seconds_by_cause | pauses).items() if v > 0}


def fact(value: object) -> str:
  """Returns a value for people."""
  return f'{value:.6g}' if isinstance(value, float) else str(value)


def best_line(name: str, lines: list[dict]) -> dict:
  """Returns the first line with the best finite value; {} if none has one."""
  lines = [r for r in lines if math.isfinite(r.get(name, math.nan))]
  sign = 1 if name == 'loss' else -1
  return min(lines, key=lambda r: sign * r[name], default={})


def last_line(name: str, lines: list[dict]) -> dict:
  """Returns the last line that has a metric; {} if none has it."""
  return next((r for r in reversed(lines) if name in r), {})


def _date(seconds):
  return time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(seconds))


def _value(name, line):
  return metric_labels.format_value(name, line[name]) if line else '-'


def _where(line):
  return f'epoch {line.get("epoch", math.nan):.4g}, step {line["step"]}' if line else '-'


def _finite(names, lines, choose):
  """The values of the chosen lines, of the metrics that the lines have."""
  values = {k: choose(k, lines).get(k, math.nan) for k in names if last_line(k, lines)}
  return {k: v if math.isfinite(v) else None for k, v in values.items()}
