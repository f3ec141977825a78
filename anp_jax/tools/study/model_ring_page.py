"""The page of a study of a ring: tables, notes, the chart of who did what."""

import json
import os
import shlex

from anp_jax.runtimes.model_ring import leaderboard, schedule, spans as spans_lib
from anp_jax.system import files
from anp_jax.tools.study import hours, plots, study_table

RING = 'ring'
WAYS = {
  RING: 'ring',
  'sync': 'one after another',
  'parts': 'parts travel',
  'independent': 'whole set in memory',
  'disk': 'whole set from disk',
}
WORK = 'train', 'score'


class Page:
  """The page of a study, in its folder."""

  def __init__(self, flags, models: list[list[str]], laps: int):
    """Writes nothing yet.

    Args:
      flags: of the study.
      models: what differs in each.
      laps: of the ring.
    """
    self._flags, self._models, self._laps = flags, models, laps
    self._stations = flags.stations
    self._ring_folder = os.path.join(flags.workdir, RING)
    self._interfaces = 'the interface lo'
    if flags.slurm is not None:
      self._interfaces = 'all interfaces of the nodes, other traffic included'

  def write(self, rows: list[dict], arguments: list[str]) -> str:
    """Writes the page and the chart; returns the tables for a terminal.

    Args:
      rows: numbers of each way, the ring's first.
      arguments: of the command.
    """
    ratios = self._ratios(rows)
    lines = study_table.markdown(
      [
        (
          '',
          'seconds',
          'over the ring',
          'devices in use',
          'MB sent',
          'MB read a station',
          'MB of memory',
        ),
        *(
          (
            WAYS[r['way']],
            f'{r["seconds"]:.1f}',
            f'{r["seconds"] / rows[0]["seconds"]:.2f}',
            f'{100 * r["use"]:.1f} %' if r['use'] else '-',
            f'{r["sent"]:.1f}',
            f'{r["read"]:.1f}',
            f'{r["peak"]:.0f}',
          )
          for r in rows
        ),
      ]
    )
    notes = self._notes(rows, ratios)
    if self._flags.data_set_gigabytes:
      more, note = self._prediction(rows, ratios)
      lines, notes = [*lines, '', *more], [*notes, note]
    path = self._write_page(lines, notes, arguments)
    return '\n'.join(['', *lines, '', *notes, f'\nstudy: {path}\n', json.dumps(ratios)])

  def _notes(self, rows, ratios):
    """Explains the table."""
    ring = rows[0]
    moved = [f'models and scores in the ring were {ring["moved"]:.1f}']
    moved += [f'parts of the data set {r["moved"]:.1f}' for r in rows if r['way'] == 'parts']
    return [
      f'{ratios["models"]} models, {self._stations} stations, {self._laps} '
      f'laps: {ratios["slots"]} turns, in which '
      f'{100 * ratios["schedule_occupancy"]:.1f} % of the stations are busy if '
      'nothing else costs time; the ring was at '
      f'{ratios["use_over_schedule"]:.3f} of that.',
      f'Its time was {ratios["time_over_ideal"]:.3f} of the ideal: each turn '
      'as long as the median one of its model, the scores, and no waiting.',
      f'A hand-over took {100 * ring["hand_over"]:.2f} % of a turn of at most '
      f'{ring["most_steps"]} steps (medians), during the training.',
      f'MB sent are those of {self._interfaces} (1e6 bytes); {", ".join(moved)}.',
      'MB read are those that the input pipeline took from the files of the '
      'data set, validation included; the system may have had them in memory. '
      'Memory is the most that was resident in one process, JAX included.',
    ]

  def _prediction(self, rows, ratios):
    """Returns the table of hours for a large set, and its note."""
    flags, ring = self._flags, rows[0]
    size = 1e9 * flags.data_set_gigabytes
    images = size / ring['image_bytes']
    rate = 1e6 * flags.disk_megabytes_per_second
    load = hours.Load(len(self._models), self._stations, self._laps, size, rate)
    # A part's time grows with the set, a model's does not.
    rates = {}
    for r in rows:
      transfer = {
        'ring': r.get('send_seconds'),
        'parts': r.get('byte_seconds', 0.0) * size / self._stations,
      }
      if r['way'] in hours.WAYS:
        rates[r['way']] = hours.Rate(images * r['image_seconds'], transfer.get(r['way'], 0.0))
    ratios['hours'] = load.hours(rates)
    note = (
      f'Hours are predicted for a set of {flags.data_set_gigabytes:g} GB, '
      f'{images:.3g} images of {ring["image_bytes"]:.0f} bytes, on a disk of '
      f'{flags.disk_megabytes_per_second:g} MB/s that {self._stations} '
      'stations share, from the median steps and hand-overs of this run; '
      'scores are left out. GB held are files; decoded images may be larger.'
    )
    return study_table.markdown(hours.table(load, rates, WAYS)), note

  def _ratios(self, rows):
    """Returns what the ring took and sent, relative to its ideal and rivals."""
    ring, models = rows[0], len(self._models)
    slots = len(schedule.slots(models, self._stations, self._laps))
    occupancy = models * self._laps / slots
    work = sum(ring['turn_seconds']) + ring['score_seconds']
    return {
      'stations': self._stations,
      'models': models,
      'laps': self._laps,
      'slots': slots,
      'schedule_occupancy': occupancy,
      'use_over_schedule': ring['use'] / occupancy,
      'time_over_ideal': ring['seconds'] * self._stations * occupancy / work,
      'hand_over_of_a_slot': ring['hand_over'],
      'most_steps_of_a_slot': ring['most_steps'],
      'time_over_ring': {WAYS[r['way']]: r['seconds'] / ring['seconds'] for r in rows},
      'sent_over_ring': {WAYS[r['way']]: r['sent'] / max(ring['sent'], 1e-9) for r in rows},
    }

  def _write_page(self, lines, notes, arguments):
    """Writes study.md and its chart; returns the path of the page."""
    folder = self._flags.workdir
    chart = plots.gantt(
      [s for s in spans_lib.read(self._ring_folder) if s['what'] in WORK],
      [', '.join(m) or 'as the config' for m in self._models],
    )
    plots.save(chart, os.path.join(folder, 'ring.png'))
    with open(os.path.join(self._ring_folder, leaderboard.PAGE)) as f:
      board = f.read().partition('\n\n')[2]
    command = shlex.join(['python', '-m', 'anp_jax.tools.study', 'model_ring', *arguments])
    page = [
      f'# A ring of models, {self._flags.config}',
      f'    {command}',
      '\n'.join(lines),
      '\n'.join(f'- {n}' for n in notes),
      '![who did what when](ring.png)',
      '## Leaderboard',
      board,
    ]
    path = os.path.join(folder, 'study.md')
    files.write_atomic(path, '\n\n'.join(page) + '\n')
    return path
