"""The client of a coordinator that the test itself plays."""

import json
import re
import socket
import threading
import time
import types

import pytest

from anp_jax import config as config_lib
from anp_jax.cluster import client, cluster_env, termination
from tests import coordinating, launching

pytestmark = pytest.mark.usefixtures('short_waits')


@pytest.mark.parametrize(
  'host, why',
  [('127.0.0.1', 'Connection refused'), ('no-such-host.invalid', '')],  # it may resolve later
)
def test_nobody_at_the_coordinator(capsys, host, why):
  address = f'{host}:{launching.free_port()}'
  env = cluster_env.ClusterEnv('flags', 1, 2, address, secret=coordinating.SECRET)
  settings = types.SimpleNamespace(rendezvous_timeout=0.5)
  with pytest.raises(termination.PeerLostError) as caught:
    client.CoordinatorClient(env, {}, settings)
  text = str(caught.value)
  assert f'rank 1 on {socket.gethostname()}: no answer from rank 0 at {address} within' in text
  is_loopback = host == '127.0.0.1'
  assert ('a loopback address reaches this host only' in text) == is_loopback
  # And meanwhile.
  line = f'waiting: rank 0 at {address} does not answer yet; 0 s left; {why}'
  assert line in capsys.readouterr().out


def _env(port):
  return cluster_env.ClusterEnv('flags', 1, 2, f'127.0.0.1:{port}', secret=coordinating.SECRET)


class _FakeCoordinator:
  """Process 0's side of one connection, in the test's hands."""

  def __init__(self):
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.port = self._listener.getsockname()[1]

  def meet(self):
    with self._listener:
      self.connection, _ = self._listener.accept()
    self.say_line('c0' * 32)
    lines = self.connection.makefile('r')
    answer, proof = lines.readline().split()
    assert proof == coordinating.proof('newcomer', 'c0' * 32, answer)
    self.say_line(coordinating.proof('coordinator', 'c0' * 32, answer))
    lines.readline()
    self.say({'go': {'port': 1, 'devices': None, 'hosts': ['node0', 'node1']}})

  def say(self, message):
    self.say_line(json.dumps(message))

  def say_line(self, text):
    self.connection.sendall(text.encode() + b'\n')


@pytest.fixture
def lonely(request):
  """A coordinator that the test plays, its client, and how that ended."""
  fake, ends = _FakeCoordinator(), []
  env = _env(fake.port)
  settings = types.SimpleNamespace(
    rendezvous_timeout=coordinating.SOON,
    heartbeat_timeout=getattr(request, 'param', coordinating.SOON),
  )
  thread = threading.Thread(target=fake.meet)
  thread.start()
  connected = client.CoordinatorClient(env, {}, settings, lambda *end: ends.append(end))
  thread.join()
  yield fake, connected, ends
  fake.connection.close()


@pytest.mark.parametrize('lonely', [0.3], indirect=True)
def test_a_silent_process_0(lonely):
  fake, connected, ends = lonely
  coordinating.wait(lambda: ends)
  ((code, text, _),) = ends
  assert code == 75
  assert text.startswith('rank 0 on node0 has been silent for 0.3 s')


def test_a_dead_process_0(lonely):
  fake, connected, ends = lonely
  fake.connection.shutdown(socket.SHUT_RDWR)
  coordinating.wait(lambda: ends)
  assert ends[0][:2] == (75, 'rank 0 on node0 has gone: its process was ended, or its host')


def test_process_0_may_go_once_all_have_come_to_the_end(lonely):
  """Though the main thread here has not yet read that they have."""
  fake, connected, ends = lonely
  fake.say({'gathered': ['leave', [0, 0]]})
  fake.connection.shutdown(socket.SHUT_RDWR)
  connected.close()
  time.sleep(0.2)
  assert not ends


def test_process_0_that_goes_before_all_came():
  fake = _FakeCoordinator()
  fake.say = lambda message: fake.connection.shutdown(socket.SHUT_RDWR)
  thread = threading.Thread(target=fake.meet)
  thread.start()
  env = _env(fake.port)
  settings = types.SimpleNamespace(rendezvous_timeout=coordinating.SOON)
  with pytest.raises(termination.PeerLostError, match='has gone before all came'):
    client.CoordinatorClient(env, {}, settings)
  thread.join()


class _FalseRankZero:
  """A listener that does not know the secret and notes what it is told."""

  def __init__(self, answer):
    self.heard = b''
    self.count = 0
    self._answer = answer
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.port = self._listener.getsockname()[1]
    threading.Thread(target=self._serve, daemon=True).start()

  def _serve(self):
    while True:
      connection, _ = self._listener.accept()
      with connection:
        self.count += 1
        connection.sendall(b'c0' * 32 + b'\n')
        self.heard += connection.recv(2000)
        if self._answer:
          connection.sendall(self._answer)
          self.heard += connection.recv(2000)


@pytest.mark.parametrize('answer', [b'', b'0' * 64 + b'\n', b'{"go": {}}\n'])
def test_a_false_rank_0_is_told_nothing(answer):
  false = _FalseRankZero(answer)
  settings = types.SimpleNamespace(rendezvous_timeout=coordinating.SOON)
  with pytest.raises(config_lib.ConfigError) as caught:
    client.CoordinatorClient(_env(false.port), coordinating.info(1, 2, {}), settings)
  text = f'what answers at 127.0.0.1:{false.port} does not know the secret'
  assert text in str(caught.value)
  assert 'share --workdir' in str(caught.value)
  line = rb'[0-9a-f]{64} [0-9a-f]{64}\n'
  assert re.fullmatch(rb'(' + line + rb')+', false.heard)
