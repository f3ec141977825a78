"""The client of a coordinator that the test itself plays."""

import json
import re
import socket
import threading
import time
import types

import pytest

from anp_jax.cluster import client, cluster_env, connection, handshake, termination
from tests import builders, coordinating, launching

pytestmark = pytest.mark.usefixtures('short_waits')


def _go():
  """What process 1 of two is sent for its start."""
  run = coordinating.members_of((0, 1), 2)
  run.begin(1, least=1)
  return {'go': run.start_of(run[1])}


def _env(address='node0:99'):
  return cluster_env.ClusterEnv('flags', 1, 2, address, secret=coordinating.SECRET)


@pytest.mark.parametrize(
  'host, why',
  [('127.0.0.1', 'Connection refused'), ('no-such-host.invalid', '')],  # it may resolve later
)
def test_nobody_at_the_coordinator(capsys, host, why):
  address = f'{host}:{launching.free_port()}'
  with pytest.raises(termination.PeerLostError) as caught:
    connection.connect(_env(address), 0.5)
  status, text = termination.exit_status(caught.value)
  assert status == 69
  assert f'rank 1 on {socket.gethostname()}: no answer from rank 0 at {address} within' in text
  is_loopback = host == '127.0.0.1'
  assert ('a loopback address reaches this host only' in text) == is_loopback
  # And meanwhile.
  line = f'waiting: rank 0 at {address} does not answer yet; 0 s left; {why}'
  assert line in capsys.readouterr().out


@pytest.fixture
def lonely():
  """(message, heartbeat_timeout) -> process 0's socket after it, a client, how that ended."""
  ours, zero = socket.socketpair()

  def connect(message, heartbeat_timeout=coordinating.SOON):
    ends = []
    settings = types.SimpleNamespace(rendezvous_timeout=0, heartbeat_timeout=heartbeat_timeout)
    if message:
      _say(zero, message)
    else:
      zero.close()
    connected = client.CoordinatorClient(
      ours, {'elastic': False}, settings, leave=lambda *end: ends.append(end)
    )
    return zero, connected, ends

  yield connect
  zero.close()


def _say(connected, message):
  connected.sendall(json.dumps(message).encode() + b'\n')


def test_a_silent_process_0(lonely):
  _, _, ends = lonely(_go(), heartbeat_timeout=0.3)
  coordinating.wait(lambda: ends)
  ((code, text, _),) = ends
  assert code == 75
  assert text.startswith('rank 0 on node0 has been silent for 0.3 s')


def test_a_dead_process_0(lonely):
  zero, _, ends = lonely(_go())
  zero.close()
  coordinating.wait(lambda: ends)
  assert ends[0][:2] == (75, 'rank 0 on node0 has gone: its process was ended, or its host')


def test_process_0_may_go_once_all_have_come_to_the_end(lonely):
  """Though the main thread here has not yet read that they have."""
  zero, connected, ends = lonely(_go())
  _say(zero, {'gathered': ['leave', [0, 0]]})
  zero.shutdown(socket.SHUT_RDWR)
  connected.close()
  time.sleep(0.2)
  assert not ends


def test_process_0_that_goes_before_all_came(lonely):
  with pytest.raises(termination.PeerLostError, match='has gone before all came'):
    lonely(None)


def test_messages_come_in_any_pieces():
  """A torn one ends them, as a connection that breaks does."""
  ours, zero = socket.socketpair()
  with ours, zero:
    opened = connection.Connection(ours, coordinating.SOON)
    messages = opened.messages()
    zero.sendall(b'{"a": 1}\n{"b"')
    assert next(messages) == {'a': 1}
    zero.sendall(b': 2}\n{"c": 3}\n{"d')
    assert [next(messages), next(messages)] == [{'b': 2}, {'c': 3}]
    zero.sendall(b'\n')
    assert list(messages) == [] and not opened.is_silent


class _RankZero:
  """A listener that notes what it is told, and then answers (challenge, proof)."""

  def __init__(self, answer):
    self.heard = b''
    self._answer = answer
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.port = self._listener.getsockname()[1]
    threading.Thread(target=self._serve, daemon=True).start()

  def _serve(self):
    while True:
      connected, _ = self._listener.accept()
      with connected:
        connected.sendall(b'c0' * 32 + b'\n')
        line = connected.recv(2000)
        self.heard += line
        if answer := self._answer(*line.decode().split()):
          connected.sendall(answer)
          self.heard += connected.recv(2000)


def test_both_sides_prove_the_secret():
  def answer(challenge, proof):
    assert proof == coordinating.proof('newcomer', 'c0' * 32, challenge)
    return coordinating.proof('coordinator', 'c0' * 32, challenge).encode() + b'\n'

  zero = _RankZero(answer)
  with handshake.connect(('127.0.0.1', zero.port), coordinating.SECRET) as connected:
    connected.sendall(b'proved')
    coordinating.wait(lambda: zero.heard.endswith(b'proved'))


@pytest.mark.parametrize('answer', [b'', b'0' * 64 + b'\n', b'{"go": {}}\n'])
def test_a_false_rank_0_is_told_nothing(answer):
  false = _RankZero(lambda *_: answer)
  refusal = builders.refusal(connection.connect, _env(f'127.0.0.1:{false.port}'), coordinating.SOON)
  text = f'what answers at 127.0.0.1:{false.port} does not know the secret'
  assert text in refusal
  assert 'share --workdir' in refusal
  line = rb'[0-9a-f]{64} [0-9a-f]{64}\n'
  assert re.fullmatch(rb'(' + line + rb')+', false.heard)
