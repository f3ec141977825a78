"""Cells as processes of this machine, one cell after another.

Every device has a core to itself, whether it is alone or one of many: else one
device would use all cores, and more devices could not be faster. Where there
are fewer cores than devices, they share them. Devices that sleep share all
cores.
"""

from collections.abc import Callable
import functools
import os
import shutil
import subprocess

from scripts.study import emulate
from scripts.study import grid
from scripts.study import runner

_POLL = 1.0  # seconds


def run(
  study: runner.Study,
  cells: list[grid.Cell],
  began: Callable[[grid.Cell], None],
  ended: Callable[[grid.Cell, str], None],
) -> None:
  """Runs cells through scripts/launch_local.sh.

  Args:
    study: the study.
    cells: of it, in this order.
    began: called (cell) at its start and every second until its end.
    ended: called (cell, error) at its end; '' if all went well.

  Raises:
    KeyboardInterrupt: once the processes have saved and stopped.
  """
  cores = sorted(os.sched_getaffinity(0))
  for cell in cells:
    os.makedirs(study.workdir(cell), exist_ok=True)
    with open(os.path.join(study.workdir(cell), runner.LOG), 'w') as log:
      command = _command(study, cell, cores)
      environment = runner.environment(cell) | emulate.environment(study)
      status = _launch(
        command, environment, log, functools.partial(began, cell)
      )
    ended(cell, runner.ended(study, cell, status, len(cores)))


def _command(study, cell, cores):
  command = [
    'scripts/launch_local.sh', str(cell.nodes), f'--devices={cell.devices}',
    *([] if study.sleeps else ['--bind']), *study.arguments(cell),
  ]  # fmt: skip
  if study.sleeps:
    return command
  if shutil.which('taskset'):
    core_list = ','.join(str(c) for c in cores[: cell.workers])
    command = ['taskset', '-c', core_list, *command]
  return command


def _launch(command, environment, log, began):
  """The exit status; a Ctrl-C makes the processes save, and is waited for."""
  # In a session of its own: a terminal's Ctrl-C would reach the processes, too,
  # and a second signal means to leave without a save.
  child = subprocess.Popen(
    command,
    env=environment | {'JAX_PLATFORMS': 'cpu'},
    stdin=subprocess.DEVNULL,
    stdout=log,
    stderr=subprocess.STDOUT,
    start_new_session=True,
  )
  try:
    while True:
      began()
      try:
        return child.wait(_POLL)
      except subprocess.TimeoutExpired:
        pass
  except BaseException:
    # Not SIGINT, which all processes below a shell's `&` ignore.
    child.terminate()
    child.wait()
    raise
