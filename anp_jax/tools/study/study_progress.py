"""The lines that a study prints while its runs are under way."""

import sys
import time

from anp_jax.reporting import telemetry
from anp_jax.system import progress as progress_lib
from anp_jax.tools.study import grid, study_runner


class Progress:
  """Prints which runs are running, and how they end."""

  def __init__(self, study: study_runner.Study):
    self._study = study
    self._line = progress_lib.LiveLine(sys.stdout)
    self._starts: dict[grid.Cell, float] = {}
    self._left = 0

  def begin(self, cells: list[grid.Cell], left: int) -> None:
    """Prints how many runs there are, and how many are left to do."""
    self._left = left
    durations = sorted({cell.duration for cell in cells if cell.duration})
    what = f' that tune, of {", ".join(durations)}' if durations else ''
    self._line.log(f'{len(cells)} runs{what}, {left} of them to do')

  def log(self, *lines: str) -> None:
    """Prints permanent lines."""
    for line in lines:
      self._line.log(line)

  def began(self, cell: grid.Cell) -> None:
    """Shows a run; called again while it runs."""
    if cell not in self._starts:
      self._starts[cell] = time.monotonic()
      if not self._line.is_live:
        self._line.log(f'{cell.name}: begins, {self._left} to do')
    lines = telemetry.read(self._study.workdir(cell))
    step = f', step {lines[-1]["step"]}' if lines else ''
    self._line.show(f'{cell.name}{step}, {self._time(cell)}, {self._left} to do')

  def ended(self, cell: grid.Cell, error: str) -> None:
    """Prints how a run ended; `error` is empty if it succeeded."""
    self._left -= cell in self._starts
    self._line.close(keep=False)
    what = 'left out' if isinstance(error, study_runner.Refusal) else 'failed'
    text = f'{what}: {error}' if error else f'done, {self._time(cell)}'
    self._line.log(f'{cell.name}: {text}')

  def _time(self, cell):
    return progress_lib.duration(time.monotonic() - self._starts[cell])
