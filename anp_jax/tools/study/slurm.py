"""Cells as Slurm jobs, all submitted at once."""

from collections.abc import Callable
import os
import pathlib
import re
import subprocess
import time

from anp_jax import config as config_lib
from anp_jax.tools.study import grid, study_runner

JOB = 'study.job'  # its number, while it may be running
_POLL = 5.0  # seconds
_TIMEOUT = 60  # seconds, of a command of Slurm's
_SCRIPT = 'scripts/slurm/train.sbatch'


def run(
  study: study_runner.Study,
  cells: list[grid.Cell],
  began: Callable[[grid.Cell], None],
  ended: Callable[[grid.Cell, str], None],
  options: list[str],
  poll: float = _POLL,
) -> None:
  """Submits cells to scripts/slurm/train.sbatch, and waits for them.

  Jobs of an earlier call that have not ended are waited for, not submitted again;
  a KeyboardInterrupt leaves all jobs running.

  Args:
    study: the study, whose folder all nodes see.
    cells: cells to run.
    began: called (cell) when the cell is submitted.
    ended: called (cell, error) at its end; '' if it succeeded.
    options: options of sbatch; {devices} is replaced by the devices of a node.
    poll: seconds between two looks at the queue.

  Raises:
    ConfigError: if Slurm refuses a job, with its line; outside the checkout.
  """
  script()  # outside the checkout, Slurm need not be asked
  running = _running()
  jobs = {}
  for cell in cells:
    study_runner.begin(study, cell)
    path = pathlib.Path(study.workdir(cell), JOB)
    job = path.read_text() if path.exists() else ''
    if job not in running:
      job = _submit(study, cell, options)
      path.write_text(job)
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


def script() -> str:
  """Returns the file that trains, as a job.

  Raises:
    ConfigError: outside the checkout, which alone has it.
  """
  if not os.path.isfile(_SCRIPT):
    raise config_lib.ConfigError(
      f'--slurm: there is no {_SCRIPT} here; start the study in the checkout of anp_jax'
    )
  return _SCRIPT


def _submit(study, cell, options):
  log = os.path.abspath(os.path.join(study.workdir(cell), study_runner.LOG))
  return _slurm(
    'sbatch',
    '--parsable',
    f'--job-name={cell.name}',
    f'--nodes={cell.processes}',
    f'--output={log}',
    *(o.replace('{devices}', str(cell.devices)) for o in options),
    script(),
    *study.arguments(cell),
    environment=study_runner.environment(cell),
  ).partition(';')[0]


def _running() -> set[str]:
  """Numbers of this user's jobs that have not ended."""
  return set(_slurm('squeue', '--me', '--noheader', '--format=%i').split())


def _status(job):
  """Exit status of a job that has just ended; 1 if it was killed, or Slurm has forgotten it."""
  try:
    text = _slurm('scontrol', 'show', 'job', '--oneliner', job)
  except config_lib.ConfigError as e:
    if 'Invalid job id' not in str(e):
      raise
    return 1
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
