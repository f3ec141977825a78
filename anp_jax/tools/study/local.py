"""Cells as processes of this machine, one cell after another.

Every device has a core to itself: a single device that used all cores would hide
the gain of more devices. If there are fewer cores than devices, they share them.
Devices that sleep share all cores. Cells of simulated workers, whose own speed is
not measured, run at the same time, as many as have cores for their devices; those
that can be members of an ensemble share processes, see `together`.
"""

from collections.abc import Callable
import contextlib
import os
import pathlib
import shutil
import subprocess

from anp_jax.tools.study import emulate, grid, study_runner, together

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
  free = _shares(study, cells, cores)
  waiting = together.groups(study, cells, len(free))
  running: dict[tuple[grid.Cell, ...], tuple[list[int], subprocess.Popen]] = {}
  try:
    while waiting or running:
      while waiting and free:
        group, share = waiting.pop(0), free.pop(0)
        running[group] = share, _start(study, group, share)
      for group, (share, child) in list(running.items()):
        for cell in group:
          began(cell)
        with contextlib.suppress(subprocess.TimeoutExpired):
          status = child.wait(_POLL / len(running))
          del running[group]
          free.append(share)
          if status and len(group) > 1:
            status, left = 0, together.unfinished(study, group)
            waiting += [(cell,) for cell in left]
            group = tuple(cell for cell in group if cell not in left)
          for cell in group:
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
  shares_device = _platform(study) != 'cpu'
  if not study.simulated or shares_device or devices >= len(cores):
    return [cores]
  starts = range(0, len(cores) - devices + 1, devices)
  return [cores[start : start + devices] for start in starts]


def _platform(study):
  """The platform of the runs: of those whose own speed is not measured, any."""
  return os.environ.get('JAX_PLATFORMS', 'cpu') if study.simulated else 'cpu'


def _command(study, cell, cores):
  command = [LAUNCHER, str(cell.processes), f'--devices={cell.devices}']
  if study.sleeps:
    return [*command, *study.arguments(cell)]
  command += ['--bind', *study.arguments(cell)]
  return [*_pinned(cores[: cell.processes * cell.devices]), *command]


def _pinned(cores):
  """The words before a command that runs on these cores."""
  return ['taskset', '-c', ','.join(map(str, cores))] if shutil.which('taskset') else []


def _start(study, group, cores):
  """The process of a group of cells, with its output in the log of the first."""
  cell = group[0]
  workdir = study.workdir(cell)
  for member in group:
    study_runner.begin(study, member)
  environment = {**study_runner.environment(cell), **emulate.environment(study)}
  with open(os.path.join(workdir, study_runner.LOG), 'w') as log:
    # In a session of its own: a terminal's Ctrl-C would reach the processes,
    # too, and a second signal means to leave without a save.
    options = {
      'env': environment | {'JAX_PLATFORMS': _platform(study)},
      'stdout': log,
      'stderr': subprocess.STDOUT,
      'start_new_session': True,
    }
    if len(group) > 1:
      return together.start(study, group, _pinned(cores), **options)
    return subprocess.Popen(_command(study, cell, cores), stdin=subprocess.DEVNULL, **options)
