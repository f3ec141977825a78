"""The page of a study of a ring: tables, notes, the chart of who did what."""

import json
import os
import shlex

from anp_jax.reporting import report_kit
from anp_jax.runtimes.model_ring import leaderboard, model_ring_cost, spans as spans_lib
from anp_jax.tools.study import plots

RING = 'ring'
WAYS = {RING: 'ring', 'sync': 'one after another', 'independent': 'whole set in memory'}
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

  def write(self, rows: list[dict], arguments: list[str]) -> str:
    """Writes the page and the chart; returns the tables for a terminal.

    Args:
      rows: numbers of each way, the ring's first.
      arguments: of the command.
    """
    ratios = self._ratios(rows)
    head = ('', 'seconds', 'over the ring', 'devices in use', 'MB sent')
    table = report_kit.Table([head, *(_row(r, rows[0]) for r in rows)])
    notes = self._notes(rows, ratios)
    path = self._write_page(table, notes, arguments)
    blocks = [table, '\n'.join(notes), f'study: {path}']
    return f'\n{report_kit.plain(blocks)}\n\n{json.dumps(ratios)}'

  def _notes(self, rows, ratios):
    """Explains the table."""
    ring = rows[0]
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
      f'MB sent are those of the interface lo (1e6 bytes); '
      f'models and scores in the ring were {ring["moved"]:.1f}.',
    ]

  def _ratios(self, rows):
    """Returns what the ring took and sent, relative to its ideal and rivals."""
    ring, models = rows[0], len(self._models)
    slots = model_ring_cost.slots(models, self._stations, self._laps)
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

  def _write_page(self, table, notes, arguments):
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
    path = os.path.join(folder, 'study.md')
    report_kit.write(
      path,
      f'A ring of models, {self._flags.config}',
      [
        report_kit.code([command]),
        table,
        report_kit.bullets(notes),
        report_kit.Figure('who did what when', 'ring.png'),
        '## Leaderboard',
        board,
      ],
    )
    return path


def _row(way, ring):
  """What a way took, as texts."""
  return (
    WAYS[way['way']],
    f'{way["seconds"]:.1f}',
    f'{way["seconds"] / ring["seconds"]:.2f}',
    f'{100 * way["use"]:.1f} %' if way['use'] else '-',
    f'{way["sent"]:.1f}',
  )
