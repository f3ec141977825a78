"""Cells as Slurm jobs, all submitted at once; other programs, one at a time."""

from collections.abc import Callable, Sequence
import contextlib
import os
import re
import shlex
import subprocess
import sys
import time

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir
from anp_jax.tools.study import grid, launching, study_runner

JOB = 'study.job'  # its number, while it may be running
_POLL = 5.0  # seconds
_TIMEOUT = 60  # seconds, of a command of Slurm's
_FAILED_POLLS = 5  # in succession
_FOLDER = 'scripts/slurm'
# Its processes do not go down together.
_OWN_SCRIPTS = {'parameter_server': 'parameter_server.sbatch'}


def add_flag(parser) -> None:
  """Adds --slurm, None where it is not given, to a study's parser."""
  parser.add_argument(
    '--slurm',
    nargs='?',
    const='',
    metavar='OPTIONS',
    help='submit jobs, with these options of sbatch, such as '
    '--slurm="--partition=gpu --gpus-per-node={devices}"',
  )


def run(
  study: study_runner.Study,
  cells: list[grid.Cell],
  began: Callable[[grid.Cell], None],
  ended: Callable[[grid.Cell, str], None],
  options: list[str],
  poll: float = _POLL,
) -> None:
  """Submits cells to their scripts in scripts/slurm, and waits for them.

  Jobs that an earlier call submitted, and that are not at their end, are waited
  for; a KeyboardInterrupt leaves them all running.

  Args:
    study: the study; all nodes see its folder.
    cells: of it.
    began: called (cell) when it is submitted.
    ended: called (cell, error) at its end; '' if all went well.
    options: of sbatch; {devices} stands for those of a node.
    poll: seconds between two looks at the queue.

  Raises:
    ConfigError: if Slurm refuses a job, with its line; outside the checkout.
  """
  for strategy in {cell.strategy for cell in cells}:
    script(strategy)  # outside the checkout, Slurm need not be asked
  running = _running()
  jobs = {}
  for cell in cells:
    os.makedirs(study.workdir(cell), exist_ok=True)
    path = os.path.join(study.workdir(cell), JOB)
    job = ''
    if os.path.exists(path):
      with open(path) as f:
        job = f.read()
    if job not in running:
      job = _submit(study, cell, options)
      with open(path, 'w') as f:
        f.write(job)
    jobs[cell] = job
    began(cell)
  while jobs:
    time.sleep(poll)
    running = _running()
    for cell, job in list(jobs.items()):
      if job not in running:
        del jobs[cell]
        os.remove(os.path.join(study.workdir(cell), JOB))
        ended(cell, study_runner.ended(study, cell, _status(job), None))


def launch(
  program: Sequence[str],
  folder: str,
  count: int,
  arguments: list[str],
  options: list[str] = (),
  poll: float = _POLL,
) -> None:
  """Runs a program as one job, a process on each node, and waits for its end.

  A KeyboardInterrupt cancels the job.

  Args:
    program: see `launching.launch`.
    folder: of the run, one of the arguments; all nodes see it.
    count: of nodes.
    arguments: for each process.
    options: of sbatch; {devices} stands for 1.
    poll: seconds between two looks at the queue.

  Raises:
    ConfigError: if Slurm refuses the job, with its line.
    launching.RunFailedError: naming the folder and the first error.
  """
  os.makedirs(folder, exist_ok=True)
  log = os.path.abspath(os.path.join(folder, study_runner.LOG))
  environment = {
    **os.environ,
    'PYTHON': sys.executable,
    'PROGRAM': shlex.join(program),
    'JAX_NUM_CPU_DEVICES': '1',
  }
  # A job that is started again would not be timed as a whole.
  job = _slurm(
    'sbatch',
    '--parsable',
    '--no-requeue',
    f'--nodes={count}',
    f'--job-name={os.path.basename(folder)}',
    f'--output={log}',
    *(o.format(devices=1) for o in options),
    script('sync'),
    *arguments,
    environment=environment,
  ).partition(';')[0]
  try:
    _wait(job, poll)
  except BaseException:
    with contextlib.suppress(config_lib.ConfigError):
      _slurm('scancel', job)
    raise
  if os.path.exists(os.path.join(folder, run_dir.MARKER)):
    raise launching.RunFailedError(f'{folder}: stopped before its end, see {log}')
  if status := _status(job):
    error = study_runner.first_error(log) or f'ended with status {status}'
    raise launching.RunFailedError(f'{folder}: {error}')


def script(strategy: str) -> str:
  """Returns the file that trains with a strategy, as a job.

  Raises:
    ConfigError: outside the checkout, which alone has these files.
  """
  path = os.path.join(_FOLDER, _OWN_SCRIPTS.get(strategy, 'train.sbatch'))
  if not os.path.isfile(path):
    raise config_lib.ConfigError(
      f'--slurm: there is no {path} here; start the study in the checkout of anp_jax'
    )
  return path


def _submit(study, cell, options):
  log = os.path.abspath(os.path.join(study.workdir(cell), study_runner.LOG))
  return _slurm(
    'sbatch',
    '--parsable',
    f'--job-name={cell.name}',
    f'--nodes={cell.processes}',
    f'--output={log}',
    *(o.format(devices=cell.devices) for o in options),
    script(cell.strategy),
    *study.arguments(cell),
    environment=study_runner.environment(cell),
  ).partition(';')[0]


def _wait(job, poll):
  """Waits until a job has ended; a busy controller may fail to answer."""
  failures = 0
  while True:
    try:
      if job not in _running():
        return
      failures = 0
    except config_lib.ConfigError:
      failures += 1
      if failures > _FAILED_POLLS:
        raise
    time.sleep(poll)


def _running() -> set[str]:
  """Numbers of this user's jobs that are not at their end."""
  return set(_slurm('squeue', '--me', '--noheader', '--format=%i').split())


def _status(job):
  """What a job that has just ended, ended with; 1 for one that was killed."""
  text = _slurm('scontrol', 'show', 'job', '--oneliner', job)
  status, number = re.search(r'\bExitCode=(\d+):(\d+)', text).groups()
  return int(status) or int(number != '0')


def _slurm(*command, environment=None):
  try:
    done = subprocess.run(
      command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
  except subprocess.TimeoutExpired:
    raise config_lib.ConfigError(f'{command[0]}: no answer within {_TIMEOUT} s') from None
  except FileNotFoundError:
    raise config_lib.ConfigError(f'--slurm: there is no {command[0]} on this machine') from None
  if done.returncode:
    last_line = (done.stderr.strip().splitlines() or [''])[-1]
    raise config_lib.ConfigError(f'{command[0]}: {last_line}')
  return done.stdout.strip()
