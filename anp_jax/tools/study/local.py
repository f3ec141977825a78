"""Cells as processes of this machine, one cell after another.

Every device has a core to itself: a single device that used all cores would hide
the gain of more devices. If there are fewer cores than devices, they share them.
Devices that sleep share all cores. Cells of simulated workers, whose own speed is
not measured, run at the same time, as many as have cores for their devices.
"""

from collections.abc import Callable
import contextlib
import os
import pathlib
import shutil
import subprocess

from anp_jax.tools.study import emulate, grid, study_runner

LAUNCHER = str(pathlib.Path(__file__).with_name('launch_local.sh'))
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
    cells: cells to run, in this order.
    began: called (cell) at its start and about every second until its end.
    ended: called (cell, error) at its end; '' if it succeeded.

  Raises:
    KeyboardInterrupt: once the processes have saved and stopped.
  """
  cores = sorted(os.sched_getaffinity(0))
  waiting, free = list(cells), _shares(study, cells, cores)
  running: dict[grid.Cell, tuple[list[int], subprocess.Popen]] = {}
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
  """The cores of each of the runs that run at the same time."""
  devices = max((cell.devices for cell in cells), default=1)
  if not study.simulated or devices >= len(cores):
    return [cores]
  starts = range(0, len(cores) - devices + 1, devices)
  return [cores[start : start + devices] for start in starts]


def _command(study, cell, cores):
  command = [LAUNCHER, str(cell.processes), f'--devices={cell.devices}']
  if study.sleeps:
    return [*command, *study.arguments(cell)]
  command += ['--bind', *study.arguments(cell)]
  if not shutil.which('taskset'):
    return command
  return ['taskset', '-c', ','.join(map(str, cores[: cell.processes * cell.devices])), *command]


def _start(study, cell, cores):
  """The process that launches a cell's, with its output in the cell's log."""
  workdir = study.workdir(cell)
  os.makedirs(workdir, exist_ok=True)
  with open(os.path.join(workdir, study_runner.LOG), 'w') as log:
    # In a session of its own: a terminal's Ctrl-C would reach the processes,
    # too, and a second signal means to leave without a save.
    return subprocess.Popen(
      _command(study, cell, cores),
      env=study_runner.environment(cell) | emulate.environment(study) | {'JAX_PLATFORMS': 'cpu'},
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
