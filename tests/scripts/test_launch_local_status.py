"""Status and output of scripts/launch_local.sh, from those of its processes."""

import os
import signal
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

# Ends by the last word of its arguments, once it was signalled.
_SPEAKS = """
import os, signal, sys, time
numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
for number, stream in enumerate((sys.stdout, sys.stderr), 1):
  print('of Python', file=stream, flush=True)
  os.write(number, b'of native code \\xff\\n\\n')
  os.system(f'echo of a child >&{number}')  # meanwhile SIGINT is lost
print('ready', flush=True)
for _ in numbers:
  signal.sigwait(numbers)
time.sleep(0.5)  # else the launcher takes their numbers for a status
os.write(2, b'last words')
os.abort() if sys.argv[-1] == 'abort' else os._exit(int(sys.argv[-1]))
"""
_COMMAND = [launching.ROOT / 'scripts/launch_local.sh', '2']


def _environment(folder, program):
  """Variables with which the script starts a program."""
  path = folder / 'program.py'
  path.write_text(program)
  return {**os.environ, 'PROGRAM': str(path), 'PYTHON': sys.executable}


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
  'statuses, want', [('0 0', 0), ('-9 0', 0), ('75 0', 0), ('69 0', 0), ('75 75', 75), ('2 0', 2)]
)
def test_a_run_that_goes_on_without_a_lost_process_ends_well(tmp_path, statuses, want):
  """Its output ends with it, too: nothing else holds the pipe open."""
  environment = _environment(tmp_path, _PROGRAM) | {'STATUSES': statuses}
  launching.command(*_COMMAND, status=want, timeout=10, **environment)


@pytest.mark.parametrize('end, status', [('75', 75), ('abort', 134)])
def test_every_line_has_its_rank_up_to_the_last_words(tmp_path, end, status):
  """Also where a terminal signals every process."""
  environment = _environment(tmp_path, _SPEAKS)
  with subprocess.Popen(
    [*_COMMAND, end],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    errors='replace',
    start_new_session=True,
  ) as process:
    lines = [process.stdout.readline() for _ in range(10)]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
      os.killpg(process.pid, number)
    out, err = process.communicate()
  assert process.returncode == status
  assert not out
  texts = ['of Python', 'of native code \ufffd', '', 'of a child']
  for rank in range(2):
    label = f'[{rank}] '
    want = [label + text for text in texts]
    assert [line[:-1] for line in lines if line.startswith(label)] == [*want, f'{label}ready']
    assert [line for line in err.splitlines() if line.startswith(label)][:4] == want
    assert f'{label}last words' in err
