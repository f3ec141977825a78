"""Compares a ring of models with two other ways to train them all.

  python -m scripts.study relay --config=configs/relay_anp.py
    --workdir=runs/relay_study --stations=2

trains the models of config.strategy.models on so many processes of this
machine, a core each: in a ring; one after another, each with its batch divided
over the processes (`sync`); and each on a process of its own, while the parts
of the data set travel. Then it writes a table, and a chart of who did what
when, to the workdir. --config.KEY=VALUE is for all three.

Times begin with the first step of training, once programs are compiled, and end
with the last score. What travels is counted by the system, on the loopback
interface. Status 0: all came to their end; 1: one did not; 2: bad input.
"""

import json
import os
import shlex
import shutil
import statistics
import sys

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.reporting import telemetry
from anp_jax.runtimes.relay import candidates
from anp_jax.runtimes.relay import leaderboard
from anp_jax.runtimes.relay import schedule
from anp_jax.runtimes.relay import spans as spans_lib
from anp_jax.system import files
from scripts.study import launching
from scripts.study import plots
from scripts.study import table

_WORK = 'train', 'score'


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    config = command_line.load(flags.config, overrides)
    if config.strategy.name != 'relay':
      raise config_lib.ConfigError(
        f'config.strategy.name={config.strategy.name!r}: expected relay'
      )
    study = Study(flags, overrides, config)
    rows = study.run()
  except config_lib.ConfigError as e:
    print(f'error: {e}'.replace('\n', ' '), file=sys.stderr)
    return 2
  except launching.Failed as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('\ninterrupted; the same command begins again')
    return 130
  print(study.write(rows, arguments))
  return 0


def _flags(arguments):
  parser = command_line.Parser(
    prog='python -m scripts.study relay',
    description=__doc__,
  )
  parser.add_argument('--config', help='FILE[:VARIANT], and --config.KEY=VALUE')
  parser.add_argument('--workdir', help='folder of the study')
  parser.add_argument('--stations', type=int, default=2, help='processes')
  flags = parser.parse(arguments)
  for name in ('config', 'workdir'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(f'--{name} is missing')
  command_line.check_folder('--workdir', flags.workdir)
  if flags.stations < 1:
    raise config_lib.ConfigError(
      f'--stations={flags.stations}: expected 1 or more'
    )
  return flags


class Study:
  """The three ways to train the models, and their numbers.

  Attributes:
    stations: processes of each way.
  """

  def __init__(self, flags, overrides, config):
    self.stations = flags.stations
    self._flags = flags
    self._overrides = overrides
    self._cores = sorted(os.sched_getaffinity(0))
    self._models = [
      [part.strip() for part in text.split(';') if part.strip()]
      for text in config.strategy.models
    ]
    self._laps = candidates.laps('duration', config.duration)
    self._ring = os.path.join(flags.workdir, 'ring')
    os.makedirs(flags.workdir, exist_ok=True)

  def run(self) -> list[dict]:
    """Runs each way from the beginning; returns the numbers of each."""
    rows = []
    for name, way in (
      ('ring', self._in_a_ring), ('one after another', self._one_by_one),
      ('parts travel', self._parts_travel),
    ):  # fmt: skip
      print(f'{name}: begins', flush=True)
      rows.append({'way': name, **way()})
    return rows

  def write(self, rows, arguments) -> str:
    """Writes the page and the chart; returns the table for a terminal."""
    ring, _, migration = rows
    ratios = self._ratios(rows)
    notes = [
      f'{ratios["models"]} models, {self.stations} stations, {self._laps} '
      f'laps: {ratios["slots"]} turns, in which '
      f'{100 * ratios["schedule_occupancy"]:.1f} % of the stations are busy if '
      'nothing else costs time; the ring was at '
      f'{ratios["use_over_schedule"]:.3f} of that.',
      f'Its time was {ratios["time_over_ideal"]:.3f} of the ideal: each turn '
      'as long as the median one of its model, the scores, and no waiting.',
      f'A hand-over took {100 * ring["hand_over"]:.2f} % of a turn of at most '
      f'{ring["most_steps"]} steps (medians), during the training.',
      'MB sent are those of the interface lo (1e6 bytes); models and scores '
      f'in the ring were {ring["moved"]:.1f}, parts of the data set '
      f'{migration["moved"]:.1f}.',
    ]
    lines = table.markdown([
      ('', 'seconds', 'over the ring', 'devices in use', 'MB sent'),
      *((r['way'], f'{r["seconds"]:.1f}',
         f'{r["seconds"] / ring["seconds"]:.2f}',
         f'{100 * r["use"]:.1f} %' if r['use'] else '-', f'{r["sent"]:.1f}')
        for r in rows),
    ])  # fmt: skip
    path = self._write_page(lines, notes, arguments)
    return '\n'.join(['', *lines, '', *notes, f'\nstudy: {path}\n',
                      json.dumps(ratios)])  # fmt: skip

  def _ratios(self, rows):
    """Returns what the ring took and sent, relative to its ideal and rivals."""
    ring, models = rows[0], len(self._models)
    slots = len(schedule.slots(models, self.stations, self._laps))
    occupancy = models * self._laps / slots
    work = sum(ring['turn_seconds']) + ring['score_seconds']
    return {
      'stations': self.stations,
      'models': models,
      'laps': self._laps,
      'slots': slots,
      'schedule_occupancy': occupancy,
      'use_over_schedule': ring['use'] / occupancy,
      'time_over_ideal': ring['seconds'] * self.stations * occupancy / work,
      'hand_over_of_a_slot': ring['hand_over'],
      'most_steps_of_a_slot': ring['most_steps'],
      'time_over_ring': {r['way']: r['seconds'] / ring['seconds']
                         for r in rows},
      'sent_over_ring': {r['way']: r['sent'] / max(ring['sent'], 1e-9)
                         for r in rows},
    }  # fmt: skip

  def _write_page(self, lines, notes, arguments):
    """Writes study.md and its chart; returns the path of the page."""
    folder = self._flags.workdir
    chart = plots.gantt(
      [s for s in spans_lib.read(self._ring) if s['what'] in _WORK],
      [', '.join(m) or 'as the config' for m in self._models],
    )
    plots.save(chart, os.path.join(folder, 'ring.png'))
    with open(os.path.join(self._ring, leaderboard.PAGE)) as f:
      board = f.read().partition('\n\n')[2]
    command = shlex.join(['python', '-m', 'scripts.study', 'relay', *arguments])
    page = [
      f'# A ring of models, {self._flags.config}', f'    {command}',
      '\n'.join(lines), '\n'.join(f'- {n}' for n in notes),
      '![who did what when](ring.png)', '## Leaderboard', board,
    ]  # fmt: skip
    path = os.path.join(folder, 'study.md')
    files.write_atomic(path, '\n\n'.join(page) + '\n')
    return path

  def turns(self, folder: str, models: int) -> dict:
    """Measures the turns of a ring from its spans.

    Returns:
      turn_seconds, of each model in all, were every turn its median one;
      score_seconds, in all; hand_over, relative to the median turn; most_steps
      of a turn.

    Raises:
      launching.Failed: if a model did not come to its end.
    """
    spans = spans_lib.read(folder)
    turns = [s for s in spans if s['what'] == 'train']
    failed = {s['model'] for s in turns if 'steps' not in s}
    if failed:
      names = ', '.join(' '.join(self._models[m]) for m in sorted(failed))
      raise launching.Failed(
        f'{folder}: not finite: {names}; models that come to their end are '
        'compared'
      )
    by_model = [
      [_seconds(s) for s in turns if s['model'] == m] for m in range(models)
    ]
    # A ring of one station sends nothing.
    sends = [_seconds(s) for s in spans if s.get('bytes')] or [0.0]
    return {
      'turn_seconds': [
        len(seconds) * statistics.median(seconds) for seconds in by_model
      ],
      'score_seconds': sum(_seconds(s) for s in spans if s['what'] == 'score'),
      'hand_over': (
        statistics.median(sends) / statistics.median(map(_seconds, turns))
      ),
      'most_steps': max(s['steps'] for s in turns),
    }

  def _in_a_ring(self):
    sent = self._launch(['main.py'], self._ring)
    return self.from_spans(self._ring, sent) | self.turns(
      self._ring, len(self._models)
    )

  def _one_by_one(self):
    seconds = sent = 0.0
    for i, model in enumerate(self._models):
      folder = os.path.join(self._flags.workdir, f'sync-{i:03}')
      differs = dict(text.split('=', 1) for text in model)
      sent += self._launch(
        ['main.py'], folder, {'strategy.name': 'sync', **differs}
      )
      records = telemetry.read(folder)
      timed = [r for r in records if r.get('seconds')]
      begin = timed[0]['time'] - timed[0]['seconds']
      # Rates count from after the first step.
      first = timed[0]['seconds'] / max(timed[0]['step'] - 1, 1)
      seconds += max(r['time'] for r in records) - begin + first
    return {'seconds': seconds, 'use': None, 'sent': sent}

  def _parts_travel(self):
    folder = os.path.join(self._flags.workdir, 'parts')
    sent = self._launch(['-m', 'scripts.study.migrate'], folder)
    return self.from_spans(folder, sent)

  def from_spans(self, folder: str, sent: float) -> dict:
    """Returns seconds, use and MB of a run that wrote spans."""
    spans = spans_lib.read(folder)
    begin = min(s['start'] for s in spans if s['what'] == 'train')
    end = max(s['end'] for s in spans if s['what'] in ('train', 'score'))
    busy = sum(
      max(s['end'] - max(s['start'], begin), 0.0)
      for s in spans
      if s['what'] in _WORK
    )
    return {
      'seconds': end - begin,
      'use': busy / (end - begin) / self.stations,
      'sent': sent,
      'moved': sum(s.get('bytes', 0) for s in spans) / 1e6,
    }

  def _launch(self, program, folder, changes=None):
    """Runs the processes of one way; returns the MB that the interface sent."""
    shutil.rmtree(folder, ignore_errors=True)
    spec = self._flags.config
    # One network by itself has no keys of a ring.
    overrides = command_line.applying(spec, self._overrides | (changes or {}))
    return launching.launch(
      program, folder, self.stations,
      [f'--config={spec}', f'--workdir={folder}',
       *(f'--config.{key}={value}' for key, value in overrides.items())],
      self._cores,
    )  # fmt: skip


def _seconds(span):
  return span['end'] - span['start']
