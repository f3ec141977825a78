"""The page of a study: its tables and figures, in its folder."""

import dataclasses
import os

from scripts.study import grid
from scripts.study import plots
from scripts.study import results
from scripts.study import runner
from scripts.study import table

PAGE = 'study.md'


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a study's cells.

  Attributes:
    cells: of the study.
    runs: finished ones, by cell.
    failures: for each other cell, the line that says why; a `runner.Refusal`
      of one that cannot be.
    cores: of the one machine where all ran; None: of hosts of their own.
    emulation: what was emulated, in a line; '': nothing was.
  """

  cells: list[grid.Cell]
  runs: dict[grid.Cell, results.Run]
  failures: dict[grid.Cell, str]
  cores: int | None
  emulation: str = ''

  @property
  def left_out(self) -> dict[grid.Cell, str]:
    """The cells whose config is refused, with the line that says why."""
    return {
      cell: error
      for cell, error in self.failures.items()
      if isinstance(error, runner.Refusal)
    }


def write(
  folder: str, title: str, command: str, outcome: Outcome, target: float | None
) -> str:
  """Writes study.md, cells.csv, curves.csv and the figures.

  Args:
    folder: of the study.
    title: of the page.
    command: that made it.
    outcome: of the study.
    target: accuracy from 0 to 1 to which the time is shown; None: none is.

  Returns:
    The table and its notes, as text for the terminal.
  """
  cells, runs = outcome.cells, outcome.runs
  left_out, emulation = outcome.left_out, outcome.emulation
  points = results.points(
    [c for c in cells if c not in left_out], runs, outcome.failures
  )
  rows = table.rows(points, target, bool(emulation))
  notes = table.notes(points, outcome.cores, emulation, left_out)
  figures = {}
  if runs:
    figures = {
      'speed': plots.speed(points),
      'accuracy': None if emulation else plots.accuracy(points, target),
      'staleness': plots.staleness(points),
      'traffic': plots.traffic(points),
    }
  parts = [f'# {title}', f'    {command}', '\n'.join(table.markdown(rows))]
  tried = table.by_learning_rate(points)
  if tried:
    parts += ['Accuracy by learning rate:', '\n'.join(table.markdown(tried))]
  parts += ['\n'.join(f'- {n}'.replace('*', '\\*') for n in notes)]
  for name, figure in figures.items():
    if figure:
      plots.save(figure, os.path.join(folder, f'{name}.png'))
      parts.append(f'![{name}]({name}.png)')
  parts.append('Every run: `cells.csv`; every evaluation: `curves.csv`.')
  with open(os.path.join(folder, PAGE), 'w', encoding='utf-8') as f:
    f.write('\n\n'.join(p for p in parts if p) + '\n')
  table.write_cells(
    os.path.join(folder, 'cells.csv'), cells, runs, outcome.failures, target
  )
  table.write_curves(os.path.join(folder, 'curves.csv'), runs)
  lines = [*table.lines(rows), '']
  if tried:
    lines += [*table.lines(tried), '']
  return '\n'.join([*lines, *notes]).rstrip()
