"""How a process ends: its exit status and its last words."""

import re
import threading
from unittest import mock

import pytest

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import termination
from tests import coordinating, launching


@pytest.mark.parametrize(
  'error, status',
  [
    (config_lib.ConfigError('a\nb'), (2, 'a')),
    (termination.PeerLostError('rank 1 has gone'), (75, 'rank 1 has gone')),
    (termination.PeerLostError('rank 1 has not come', 69), (69, 'rank 1 has not come')),
    (cluster.RunFailedError('not finite'), (1, 'not finite')),
    (ValueError('a\nb'), (1, 'ValueError: a')),
    (KeyError(), (1, 'KeyError')),
    (KeyboardInterrupt(), (130, 'interrupted')),
  ],
)
def test_exit_status(error, status):
  assert cluster.exit_status(error) == status


def test_stacks_of_all_threads(monkeypatch, capfd):
  ends, done = [], threading.Event()
  monkeypatch.setattr(termination.os, '_exit', ends.append)
  monkeypatch.setattr(termination.threading, 'Timer', mock.Mock())

  def waits_for_data():
    done.wait(coordinating.SOON)

  thread = threading.Thread(target=waits_for_data, name='feed')
  thread.start()
  termination.end_process(75, 'stuck', stacks=True)
  done.set()
  thread.join()
  text = capfd.readouterr().err
  assert re.search(r'test_termination.py", line \d+ in waits_for_data', text)
  assert 'in test_stacks_of_all_threads' in text
  assert text.endswith('\nerror: stuck\n') and ends == [75]


_STUCK = """
import threading
from anp_jax.cluster import termination
termination._LAST_WORDS = 0.5

def leave():
  termination.end_process(75, 'rank 1 has gone')

threading.Timer(0.5, leave).start()
print('x' * 2**24)
"""


def test_a_process_with_a_stuck_output_ends_too():
  # Without a buffer there is nothing to get stuck in.
  with launching.start('-c', _STUCK, PYTHONUNBUFFERED='') as child:
    assert child.wait(coordinating.SOON) == 75
    assert child.stderr.read() == 'error: rank 1 has gone\n'
