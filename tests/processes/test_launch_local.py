"""scripts/launch_local.sh, as the documentation types it."""

import os
import signal
import subprocess

import pytest

from tests import launching

pytestmark = pytest.mark.multiprocess


def test_launch_local_passes_signals_on(tmp_path):
  arguments = launching.arguments(tmp_path / 'run', duration='100000 steps')
  process = subprocess.Popen(
    ['scripts/launch_local.sh', '2', *arguments],
    cwd=launching.ROOT,
    env={**os.environ, **launching.QUICK, 'PYTHON': os.sys.executable},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  for line in process.stdout:
    if '5/100000' in line:
      process.send_signal(signal.SIGTERM)
      break
  rest = process.stdout.read()
  assert process.wait(60) == 0, rest
  assert 'stopped at step' in rest
