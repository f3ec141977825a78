"""scripts/launch_local.sh, as the documentation types it."""

import json
import os
import re
import signal
import subprocess

import pytest

from tests import launching

pytestmark = pytest.mark.multiprocess


def _started(arguments, *flags):
  return subprocess.Popen(
    ['scripts/launch_local.sh', '2', *flags, *arguments],
    cwd=launching.ROOT,
    env={**os.environ, **launching.QUICK, 'PYTHON': os.sys.executable},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def test_launch_local_passes_signals_on(tmp_path):
  process = _started(launching.arguments(tmp_path / 'run', duration='100000 steps'))
  for line in process.stdout:
    if '5/100000' in line:
      process.send_signal(signal.SIGTERM)
      break
  rest = process.stdout.read()
  assert process.wait(60) == 0, rest
  assert 'stopped at step' in rest


def test_all_that_are_lost_at_once_come_back(tmp_path):
  """They are where one is lost and the others cannot go on without it."""
  keys = {'checkpoint.every': '5 steps', 'eval.every': '60 steps', 'cluster.elastic': 'off'}
  arguments = launching.arguments(tmp_path / 'run', duration='60 steps', **keys)
  process = _started(arguments, '--again=1')
  checkpoints = tmp_path / 'run/checkpoints'
  launching.wait_until(lambda: any(path.name.isdigit() for path in checkpoints.glob('*')))
  os.kill(json.loads((tmp_path / 'run/in_use.json').read_text())['process'], signal.SIGKILL)
  rest = process.stdout.read()
  assert process.wait(60) == 0, rest
  assert rest.count('starting it again') == 2
  assert re.search(r'continuing from step \d+ of 60', rest)
