"""scripts/launch_local.sh, as the documentation types it."""

import os
import signal
import subprocess

import pytest

from tests import launching

pytestmark = pytest.mark.multiprocess


@pytest.mark.soak
def test_launch_local(tmp_path):
  """The documented command; its status is that of the failing rank."""
  command = ['scripts/launch_local.sh', '2', '--devices=2', '--bind']
  environment = {**os.environ, 'PYTHON': os.sys.executable}
  done = subprocess.run(
    [*command, *launching.arguments(tmp_path / 'run')],
    cwd=launching.ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'devices  4 x cpu' in done.stdout
  failed = subprocess.run(
    [*command, *launching.arguments(tmp_path / 'new', **{'mesh.data': '3'})],
    cwd=launching.ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert failed.returncode == 2
  assert 'config.mesh (data=3, model=1) does not fit 4 cpu' in failed.stderr


def test_launch_local_passes_signals_on(tmp_path):
  process = subprocess.Popen(
    [
      'scripts/launch_local.sh',
      '2',
      *launching.arguments(tmp_path / 'run', duration='100000 steps'),
    ],
    cwd=launching.ROOT,
    env={**os.environ, 'PYTHON': os.sys.executable},
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
