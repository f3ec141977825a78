"""A Slurm cluster for tests: the one that is there, or one on this machine."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests import launching

_LOCAL = launching.ROOT.parent / 'shared/bin/slurm_local.sh'
# Variables of a job whose processes heed those of phased.py.
PHASED = {'PYTHON': str(launching.ROOT / 'tests/phased_python.sh'), 'PHASED_PYTHON': sys.executable}
# States of a job that is not at its end.
_PASSING = ('PENDING', 'RUNNING', 'COMPLETING', 'REQUEUED', 'NODE_FAIL', 'CONFIGURING', 'PREEMPTED')


class Cluster:
  """Jobs on a cluster; faults only on one that this machine simulates."""

  def __init__(self, local: bool):
    self._local = local
    self._jobs = []

  def fault(self, *command, timeout=60) -> None:
    """Breaks or mends a node: 'node-kill node2', 'net-cut node2' ..."""
    if not self._local:
      pytest.skip('breaks nodes, which only a cluster of its own may suffer')
    subprocess.run([_LOCAL, *command], check=True, timeout=timeout, stdout=subprocess.DEVNULL)

  def submit(self, script, options, arguments, output, **environment) -> str:
    """Submits a script as it stands; returns the job's number."""
    words = 'sbatch', '--parsable', f'--output={output}', *options, script, *arguments
    variables = {**launching.QUICK, 'PYTHON': sys.executable, **environment}
    done = launching.command(*words, timeout=60, **variables)
    job = done.stdout.strip().split(';')[0]
    self._jobs.append(job)
    return job

  def field(self, job, name) -> str:
    """Returns a field of `scontrol show job`: JobState, Restarts, ExitCode."""
    text = subprocess.run(
      ['scontrol', 'show', 'job', job], capture_output=True, text=True, timeout=60
    ).stdout
    match = re.search(rf'\b{name}=(\S+)', text)
    return match[1] if match else ''

  def wait(self, job, state='COMPLETED', timeout=180) -> None:
    """Waits until a job is in a state; no other final one is accepted."""
    end = time.monotonic() + timeout
    while (now := self.field(job, 'JobState')) != state:
      assert now in _PASSING, now
      assert time.monotonic() < end, f'{now} for {timeout} s'
      time.sleep(0.3)

  def update(self, *fields) -> None:
    """Changes a job or node: 'jobid=7 numnodes=2' as two arguments."""
    subprocess.run(['scontrol', 'update', *fields], check=True, timeout=60)

  def signal(self, job, name) -> None:
    """Signals all tasks of a job, not its script."""
    subprocess.run(['scancel', f'--signal={name}', job], timeout=60)

  def cancel_all(self) -> None:
    for job in self._jobs:
      subprocess.run(['scancel', job], timeout=60)
    ending = 'RUNNING', 'COMPLETING'
    for job in self._jobs:
      launching.wait_until(lambda job=job: self.field(job, 'JobState') not in ending, 30, pause=0.3)
    self._jobs = []


@contextlib.contextmanager
def open_cluster(nodes=2):
  """The cluster that `sinfo` finds, else one started here, else a skip."""
  if (
    shutil.which('sinfo')
    and subprocess.run(['sinfo'], capture_output=True, timeout=60).returncode == 0
  ):
    count = len(set(os.popen('sinfo -h -N -o %N').read().split()))
    if count < nodes:
      pytest.skip(f'{nodes} nodes are needed, and this cluster has {count}')
    yield Cluster(local=_is_ours())
    return
  if os.geteuid():
    pytest.skip('no Slurm cluster here, and only root can start one')
  if not _LOCAL.exists():
    pytest.skip('no Slurm cluster here, and no script that starts one')
  if not shutil.which('slurmctld') and not os.path.exists('/usr/sbin/slurmctld'):
    pytest.skip('Slurm is not installed')
  variables = {'SLURM_LOCAL_NODES': str(nodes)}
  started = launching.command(_LOCAL, 'start', status=None, timeout=120, **variables)
  if started.returncode:
    pytest.skip(f'no Slurm cluster: {started.stderr.strip()[-200:]}')
  text = subprocess.run([_LOCAL, 'env'], capture_output=True, text=True).stdout
  os.environ['SLURM_CONF'] = re.search(r'SLURM_CONF=(\S+)', text)[1]
  try:
    yield Cluster(local=True)
  finally:
    del os.environ['SLURM_CONF']
    subprocess.run([_LOCAL, 'stop'], capture_output=True, timeout=120)


def _is_ours():
  configured = os.environ.get('SLURM_CONF', '')
  return 'slurm_local' in configured and _LOCAL.exists()


def until(path: pathlib.Path, pattern, timeout=90) -> str:
  """Waits until a file matches a pattern; returns its text."""

  def text():
    return path.read_text() if path.exists() else ''

  def missing():
    return f'{path} has no {pattern!r}:\n{text()[-3000:]}'

  launching.wait_until(lambda: re.search(pattern, text()), timeout, missing, pause=0.2)
  return text()
