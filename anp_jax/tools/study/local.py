"""Cells as processes of this machine, one cell after another.

Cells of simulated workers, whose own speed is not measured, run as many at once
as there are cores for their devices.

Every device has a core to itself, whether it is alone or one of many: else one
device would use all cores, and more devices could not be faster. Where there
are fewer cores than devices, they share them. Devices that sleep share all
cores.
"""

from collections.abc import Callable
import contextlib
import os
import subprocess

from anp_jax.tools.study import emulate, grid, launching, study_runner

_POLL = 1.0  # seconds


def run(
  study: study_runner.Study,
  cells: list[grid.Cell],
  began: Callable[[grid.Cell], None],
  ended: Callable[[grid.Cell, str], None],
) -> None:
  """Runs cells through launch_local.sh.

  Args:
    study: the study.
    cells: of it, in this order.
    began: called (cell) at its start and every second or more until its end.
    ended: called (cell, error) at its end; '' if all went well.

  Raises:
    KeyboardInterrupt: once the processes have saved and stopped.
  """
  cores = sorted(os.sched_getaffinity(0))
  waiting, free, running = list(cells), _shares(study, cells, cores), {}
  try:
    while waiting or running:
      while waiting and free:
        cell, share = waiting.pop(0), free.pop(0)
        running[cell] = share, _start(study, cell, share)
      for cell, (share, child) in list(running.items()):
        began(cell)
        with contextlib.suppress(subprocess.TimeoutExpired):
          status = child.wait(_POLL / len(running))
          del running[cell]
          free.append(share)
          ended(cell, study_runner.ended(study, cell, status, len(cores)))
  except BaseException:
    # Not SIGINT, which all processes below a shell's `&` ignore.
    for _, child in running.values():
      child.terminate()
    for _, child in running.values():
      child.wait()
    raise


def _shares(study, cells, cores):
  """The cores of each run that is under way at one time."""
  devices = max((cell.devices for cell in cells), default=1)
  if not study.simulated or devices >= len(cores):
    return [cores]
  starts = range(0, len(cores) - devices + 1, devices)
  return [cores[start : start + devices] for start in starts]


def _command(study, cell, cores):
  command = [
    launching.LAUNCHER,
    str(cell.processes),
    f'--devices={cell.devices}',
    *([] if study.sleeps else ['--bind']),
    *study.arguments(cell),
  ]
  if study.sleeps:
    return command
  return launching.bound(command, cores[: cell.processes * cell.devices])


def _start(study, cell, cores):
  """The process that launches a cell's, with its output in the cell's log."""
  environment = study_runner.environment(cell) | emulate.environment(study)
  return launching.start(_command(study, cell, cores), study.workdir(cell), environment)
