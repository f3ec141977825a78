"""Whoever does not know a run's secret learns nothing and harms nothing."""

import contextlib
import json
import re
import socket

import pytest

from anp_jax.cluster import coordinator, handshake
from tests import coordinating

pytestmark = pytest.mark.usefixtures('short_waits')


def _messages():
  """One of each kind that the protocol has, and others."""
  messages = [
    coordinating.info(1, 2, {'optional': [1]}),
    coordinating.info(1, 99, {}),
    {},
    [],
    {'heartbeat': {'phase': 'step', 'step': 9}},
    {'gather': ['x', 1]},
    {'mail': [0, {'address': 'evil:1'}]},
    {'fail': [2, 'no']},
    {'stalled': 0},
    {'bye': 0},
    {'pong': 0},
    {'end': [2, 'no', False]},
    {'go': {}},
  ]
  return [json.dumps(message).encode() + b'\n' for message in messages] + [
    b'',
    b'\n',
    b'GET / HTTP/1.1\r\nHost: node0\r\n\r\n',
    b'\x16\x03\x01\x02\x00\xff\n',
    b'[' * 200_000 + b'\n',
    b'x' * (coordinator._MAX_LINE + 2**20),
  ]


@pytest.mark.parametrize('proof', ['', 'wrong', 'reflected'])
def test_a_stranger_is_told_nothing_and_harms_nothing(monkeypatch, proof):
  """Whether the run waits for its processes or goes on."""
  monkeypatch.setattr(handshake, 'LOG_PERIOD', 1000.0)
  run = coordinating.Run(2)

  def intrude(message):
    with run.raw(b'') as connection:
      lines = connection.makefile('rb')
      challenge = lines.readline()
      assert re.fullmatch(rb'[0-9a-f]{64}\n', challenge)
      if proof == 'wrong':
        connection.sendall(challenge[:-1] + b' ' + b'0' * 64 + b'\n')
      elif proof:
        connection.sendall(challenge)
      with contextlib.suppress(OSError):  # it has hung up
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        assert lines.read() == b''

  for message in _messages():
    intrude(message)
  assert not run.coordinator._members
  run.join(0, 1).started()
  for message in _messages():
    intrude(message)
  values = []
  coordinating.at_once([lambda i=i: values.append(run.clients[i].gather(i)) for i in (0, 1)])
  assert values == [[0, 1]] * 2
  assert not run.errors and not run.ended
  lines = [line for line in run.lines if not line.startswith('waiting')]
  (line,) = lines  # one a while, however many come
  assert line.startswith('a connection from 127.0.0.1 did not prove that')


def test_another_secret_is_not_believed():
  run = coordinating.Run(2)
  with run.raw(b'') as connection:
    assert not coordinating.introduce(connection, 'e5' * 32)
  with run.raw(b'') as connection:
    assert coordinating.introduce(connection)


@pytest.mark.parametrize(
  'message', [b'{}', b'[]', b'{"index": [1], "token": "job"}', b'[' * 200_000]
)
def test_a_process_of_the_run_that_talks_rubbish_is_not_taken_in(message):
  run = coordinating.Run(2)
  with run.raw(b'') as connection:
    assert coordinating.introduce(connection)
    connection.sendall(message + b'\n')
    assert connection.recv(1) == b''
  run.join(0, 1).started()
  assert not run.errors
