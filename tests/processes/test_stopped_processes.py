"""A run that is stopped for a while, as by Ctrl-Z, continues afterwards."""

import signal
import time

import pytest

from anp_jax.reporting import telemetry
from tests import launching

pytestmark = pytest.mark.multiprocess

# Seconds: no shorter, as a busy machine answers slowly.
_HEARTBEAT, _STALL = 10, 12


def _steps(workdir):
  return [r['step'] for r in telemetry.read(str(workdir))]


def _send(ranks, number):
  for process in ranks.processes:
    process.send_signal(number)


def test_a_run_continues_that_was_stopped_longer_than_its_timeouts(tmp_path):
  """A clock of the machine says that both ranks were silent and stuck."""
  keys = {
    'duration': '600 steps',
    'eval.every': '600 steps',
    'checkpoint.every': '600 steps',
    'log.every': '10 steps',
    'cluster.heartbeat_timeout': str(_HEARTBEAT),
    'cluster.stall_timeout': str(_STALL),
  }
  arguments = launching.arguments(tmp_path / 'run', **keys)
  with launching.Ranks(tmp_path, 2, arguments) as ranks:
    launching.wait_until(lambda: _steps(tmp_path / 'run'), 180, ranks.text)
    _send(ranks, signal.SIGSTOP)
    before = _steps(tmp_path / 'run')[-1]
    time.sleep(1.3 * _STALL)
    assert _steps(tmp_path / 'run')[-1] == before < 600
    _send(ranks, signal.SIGCONT)
    ranks.ends(0, 0)
  assert _steps(tmp_path / 'run')[-1] == 600
