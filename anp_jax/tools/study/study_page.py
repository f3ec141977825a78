"""The page of a study: its tables and figures, in its folder."""

from collections.abc import Sequence
import dataclasses
import os

from anp_jax.reporting import report_kit
from anp_jax.system import markdown
from anp_jax.tools.study import grid, plots, scores, study_results, study_runner, study_table, tune

PAGE = 'study.md'
_SCORES = 'Scores of the validation set:'
_TUNED = 'Accuracy of the longest run of each value that was tried:'


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a study's cells.

  Attributes:
    cells: all cells of the study.
    runs: numbers of the finished cells.
    failures: reasons of the other cells; a `study_runner.Refusal` of a refused config.
    cores: cores of the one machine where all ran; None: hosts of their own.
    emulation: what was emulated, in a line; '': nothing.
    simulation: times of simulated workers, in a line; '': none were.
    tuning: what was tuned; None: nothing.
    contests: results of the tuned values.
  """

  cells: list[grid.Cell]
  runs: dict[grid.Cell, study_results.Run]
  failures: dict[grid.Cell, str]
  cores: int | None
  emulation: str = ''
  simulation: str = ''
  tuning: tune.Tuning | None = None
  contests: list[tune.Tuned] = dataclasses.field(default_factory=list)

  @property
  def left_out(self) -> dict[grid.Cell, str]:
    """The cells whose config is refused, with the line that says why."""
    return {
      cell: error
      for cell, error in self.failures.items()
      if isinstance(error, study_runner.Refusal)
    }


def write(folder: str, title: str, command: str, outcome: Outcome, targets: Sequence[float]) -> str:
  """Writes study.md, cells.csv, curves.csv and the figures.

  Args:
    folder: folder of the study.
    title: title of the page.
    command: command that made the page.
    outcome: what became of the cells.
    targets: accuracies from 0 to 1 to which time and images are shown.

  Returns:
    The table and its notes, as text for the terminal.
  """
  runs, left_out, emulated = outcome.runs, outcome.left_out, bool(outcome.emulation)
  points = study_results.points(
    [c for c in outcome.cells if c not in left_out], runs, outcome.failures
  )
  notes = study_table.notes(points, outcome.cores, outcome.emulation, left_out, outcome.simulation)
  if outcome.tuning:
    notes += tune.notes(outcome.tuning, outcome.contests)
  tables = _tables(points, outcome, targets)
  figures = []
  for name, figure in _figures(points, outcome, targets).items():
    path = os.path.join(folder, f'{name}.png')
    if figure:
      plots.save(figure, path)
      figures.append(report_kit.Figure(name, f'{name}.png'))
    elif os.path.exists(path):  # of a study that was here before
      os.remove(path)
  report_kit.write(
    os.path.join(folder, PAGE),
    title,
    [
      report_kit.code([command]),
      *tables,
      report_kit.bullets(map(markdown.escape, notes)),
      *figures,
      'Every run: `cells.csv`; every evaluation: `curves.csv`.',
    ],
  )
  study_table.write_cells(
    os.path.join(folder, 'cells.csv'), outcome.cells, runs, outcome.failures, targets, emulated
  )
  study_table.write_curves(os.path.join(folder, 'curves.csv'), runs, emulated)
  return report_kit.plain([*tables, '\n'.join(notes)])


def _tables(points, outcome, targets):
  """The tables of a study that have something to show."""
  tables = {}
  if not outcome.simulation:
    tables[''] = study_table.speed(points, targets, bool(outcome.emulation))
  tables['All models of a run:'] = study_table.all_models(points)
  if not outcome.emulation:
    tables[_SCORES] = scores.rows(points, targets)
  if outcome.tuning:
    tables[_TUNED] = tune.rows(outcome.tuning, outcome.contests)
  return [report_kit.Table(rows, caption=caption) for caption, rows in tables.items() if rows]


def _figures(points, outcome, targets):
  """The figures of a study by name; None for one that has nothing to show."""
  figures = dict.fromkeys(('speed', 'accuracy', 'staleness', 'ring'))
  if not outcome.runs:
    return figures
  if not outcome.simulation:
    figures['speed'] = plots.speed(points)
  if not outcome.emulation:
    figures['accuracy'] = plots.accuracy(points, targets)
  figures['staleness'] = plots.staleness(points)
  # The ring itself, where there is one, rather than the baseline `independent`.
  rings = {c.label: run.ring for c, run in outcome.runs.items() if run.ring}
  if rings:
    ring = rings.get('model_ring') or next(iter(rings.values()))
    figures['ring'] = plots.gantt(ring.work, [text or 'as the config' for text in ring.models])
  return figures
