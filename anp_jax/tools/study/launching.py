"""Processes of this machine that are one run, a core each."""

from collections.abc import Sequence
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

from anp_jax.tools.study import study_runner

LAUNCHER = str(pathlib.Path(__file__).with_name('launch_local.sh'))
TRAIN = ('-m', 'anp_jax')
_INTERFACE = '/sys/class/net/lo/statistics/tx_bytes'


class RunFailedError(Exception):
  """A run of a study did not come to its end."""


def bound(command: list[str], cores: Sequence[int]) -> list[str]:
  """Returns a command that runs on these cores, where taskset is there to bind it."""
  if not shutil.which('taskset'):
    return command
  return ['taskset', '-c', ','.join(map(str, cores)), *command]


def start(command: list[str], folder: str, environment: dict[str, str]) -> subprocess.Popen:
  """Starts processes on CPU devices, whose output is the folder's log."""
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, study_runner.LOG), 'w') as log:
    # In a session of its own: a terminal's Ctrl-C would reach the processes,
    # too, and a second signal means to leave without a save.
    return subprocess.Popen(
      command,
      env=environment | {'JAX_PLATFORMS': 'cpu'},
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )


def launch(program: Sequence[str], folder: str, count: int, arguments: list[str]) -> float:
  """Runs a program as processes that find each other, and waits for all.

  Args:
    program: arguments of the interpreter: a file, or '-m' and a module; it takes
      --coordinator, --num_processes and --process_id.
    folder: folder of the run, where the output goes.
    count: number of processes.
    arguments: arguments of each process.

  Returns:
    Megabytes (1e6) that the loopback interface has sent meanwhile.

  Raises:
    RunFailedError: naming the folder and the first error.
  """
  cores = sorted(os.sched_getaffinity(0))[:count]
  command = bound([LAUNCHER, str(count), '--bind', *arguments], cores)
  environment = {**os.environ, 'PYTHON': sys.executable, 'PROGRAM': shlex.join(program)}
  before = _sent()
  child = start(command, folder, environment)
  try:
    status = child.wait()
  except BaseException:
    child.terminate()
    child.wait()
    raise
  if status:
    error = study_runner.first_error(os.path.join(folder, study_runner.LOG))
    raise RunFailedError(f'{folder}: {error or f"ended with status {status}"}')
  return (_sent() - before) / 1e6


def _sent():
  """Bytes that this machine's loopback interface has sent."""
  try:
    with open(_INTERFACE) as f:
      return int(f.read())
  except OSError:  # not of Linux
    return 0
