"""The status of scripts/launch_local.sh, from those of its processes."""

import os
import subprocess
import sys

import pytest

from tests import launching

_PROGRAM = """
import os, signal, sys, time
(rank,) = (int(a.partition('=')[2]) for a in sys.argv if a.startswith('--process_id='))
status = int(os.environ['STATUSES'].split()[rank])
time.sleep(0.3 * (status == 0))  # a run that goes on ends last
if status < 0:
  os.kill(os.getpid(), -status)
sys.exit(status)
"""


def test_a_process_that_ended_by_ctrl_c_is_not_started_again():
  """Its status is above 128, like that of a signal."""
  command = ['scripts/restart_on_failure.sh', '3', 'bash', '-c', 'echo started; exit 130']
  done = subprocess.run(command, cwd=launching.ROOT, capture_output=True, text=True)
  assert (done.returncode, done.stdout) == (130, 'started\n')


@pytest.mark.parametrize(
  'statuses, want', [('0 0', 0), ('-9 0', 0), ('75 0', 0), ('75 75', 75), ('2 0', 2)]
)
def test_a_run_that_goes_on_without_a_lost_process_ends_well(tmp_path, statuses, want):
  program = tmp_path / 'program.py'
  program.write_text(_PROGRAM)
  environment = {
    **os.environ,
    'PROGRAM': str(program),
    'PYTHON': sys.executable,
    'STATUSES': statuses,
  }
  command = [launching.ROOT / 'scripts/launch_local.sh', '2']
  done = subprocess.run(command, env=environment, capture_output=True, timeout=60, text=True)
  assert done.returncode == want, done.stderr
