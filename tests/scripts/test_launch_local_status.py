"""The status of scripts/launch_local.sh, from those of its processes."""

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


@pytest.mark.parametrize(
  'end, starts, status',
  [
    ('exit 75', 4, 75),  # a worker, at each loss of a server
    ('kill -KILL $$', 4, 137),
    ('exit 130', 1, 130),  # Ctrl-C: above 128, like a signal
    ('exit 69', 1, 69),  # nobody came, however long it waited
    ('[ "$0" = --join ] && exit 69; exit 75', 2, 75),
    ('[ "$0" = --join ] && exit 2; kill -KILL $$', 2, 137),  # it was refused
  ],
)
def test_how_often_a_process_is_started_again(end, starts, status):
  words = ['scripts/restart_on_failure.sh', '3', 'bash', '-c', f'echo started; {end}']
  assert launching.command(*words, status=status).stdout == starts * 'started\n'


@pytest.mark.parametrize(
  'statuses, want',
  [
    ('0 0', 0),
    ('-9 0', 0),
    ('75 0', 0),
    ('69 0', 0),
    ('75 75', 75),
    pytest.param('2 0', 2, marks=pytest.mark.slow),  # it waits for the other
  ],
)
def test_a_run_that_goes_on_without_a_lost_process_ends_well(tmp_path, statuses, want):
  program = tmp_path / 'program.py'
  program.write_text(_PROGRAM)
  environment = {'PROGRAM': str(program), 'PYTHON': sys.executable, 'STATUSES': statuses}
  launching.command('scripts/launch_local.sh', '2', status=want, timeout=60, **environment)
