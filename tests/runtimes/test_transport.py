"""The transport: which address a host gives, how memory is used again."""

import contextlib
import gc
import socket
import time
from unittest import mock

import jax
import numpy as np
from pyarrow import flight
import pytest

from anp_jax.cluster import cluster_env
from anp_jax.runtimes import addresses, transport
from anp_jax.system import emulation
from tests import builders


def _address(array):
  return array.__array_interface__['data'][0]


@pytest.mark.parametrize(
  'token',
  [
    '',
    'Bearer',
    'Bearer ',
    'secret',
    'Bearer secre',
    'Bearer secret1',
    'Bearer secreT',
    'bearer secret',
    ' Bearer secret',
    'Bearer  secret',
  ],
)
def test_the_whole_token_is_compared(token):
  gate = transport.Gate('secret')
  gate.start_call(None, {'authorization': ['Bearer secret']})
  with pytest.raises(flight.FlightUnauthenticatedError, match='wrong token'):
    gate.start_call(None, {'authorization': [token]})
  with pytest.raises(flight.FlightUnauthenticatedError, match='wrong token'):
    gate.start_call(None, {})


@pytest.mark.parametrize('hosts', [0, 2])
@pytest.mark.parametrize('name', ['127.0.1.1', None])
def test_a_name_that_means_loopback_is_not_told_to_other_hosts(monkeypatch, hosts, name):
  """Debian's /etc/hosts has such a name; or it does not resolve."""

  def resolved(_):
    if not name:
      raise socket.gaierror(-2, 'Name or service not known')
    return name

  monkeypatch.setattr(socket, 'gethostbyname', resolved)
  monkeypatch.setattr(socket, 'gethostname', lambda: 'gpu2')
  place = cluster_env.ClusterEnv('flags', 1, 2, 'gpu1:4321', num_hosts=hosts)
  sockets = mock.MagicMock()
  route = sockets.return_value.__enter__.return_value
  route.getsockname.return_value = '10.0.0.7', 1234  # on the way to all others
  with monkeypatch.context() as m:
    m.setattr(socket, 'socket', sockets)
    m.setattr(socket, 'getaddrinfo', lambda *_, **__: [_found('10.0.0.5')])
    assert addresses.own_address('', place) == '10.0.0.7'
    route.connect.assert_called_with(('10.0.0.5', 4321))
  # On the coordinator itself, with the system's own sockets.
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: [_found('127.0.1.1')])
  message = builders.refusal(addresses.own_address, '', place)
  assert message.startswith("config.strategy.bind='': gpu2, the name of this host")
  assert 'coordinator gpu1:4321' in message
  # Processes of one host find each other there.
  assert addresses.own_address('', place._replace(num_hosts=1)) == '127.0.0.1'


def test_a_name_that_means_an_address_is_taken(monkeypatch):
  monkeypatch.setattr(socket, 'gethostbyname', lambda _: '10.0.0.9')
  place = cluster_env.ClusterEnv('flags', 1, 2, 'gpu1:4321')
  assert addresses.own_address('', place) == '10.0.0.9'


def _found(host):
  """An answer of the resolver."""
  return socket.AF_INET, socket.SOCK_DGRAM, 17, '', (host, 4321)


@pytest.mark.usefixtures('quick_collections')
def test_memory_is_used_again_once_nothing_is_made_of_it():
  buffers = transport._Buffers()
  first = buffers.take(4096)
  first[:] = 7
  where = _address(first)
  part = first.view(np.float32)[10:20].reshape(2, 5)
  copy = part.copy()
  del first
  gc.collect()
  # A part of it, of another dtype and shape, is still in use.
  second = buffers.take(4096)
  assert _address(second) != where
  second[:] = 0
  np.testing.assert_array_equal(part, copy)
  del part
  gc.collect()
  assert _address(buffers.take(4096)) == where
  arrays = [buffers.take(64) for _ in range(3 * transport._SPARE)]
  assert len({_address(a) for a in arrays}) == len(arrays)
  del arrays
  gc.collect()
  assert len(buffers._free[64]) == transport._SPARE


@pytest.mark.usefixtures('quick_collections')
def test_memory_that_a_device_may_share_is_not_written_to():
  """On CPUs JAX may take an array as it is."""
  buffers = transport._Buffers()
  host = buffers.take(2**20)
  host[:] = 3
  on_device = jax.device_put(host)
  del host
  gc.collect()
  buffers.take(2**20)[:] = 4
  assert int(on_device.sum()) == 3 * 2**20


class _Echo(transport.Port):
  """Keeps the bytes that are put, and gives them back."""

  def receive(self, request, data):
    self.data = data

  def answer(self, name):
    return {}, [self.data]


@pytest.mark.parametrize('local', [False, True])
def test_an_emulated_link_slows_down_what_leaves_the_process(monkeypatch, local):
  """3 MB at 5 MB/s each way: 0.6 s there, 0.6 s back.

  Both ends are this process, whose two ways work at the same time: on one batch
  after another, else the second would begin when the first has ended.
  """
  config = builders.config({'strategy.name': 'parameter_server'})
  data = np.random.default_rng(0).integers(0, 256, 3 * 10**6, np.uint8)
  emulation.begin(0, 5e6, False)
  secret = '5a' * 32
  port = _Echo(config, cluster_env.ALONE._replace(secret=secret), 'a test')
  try:
    if not local:
      monkeypatch.setattr(transport, '_own_addresses', set())
    with contextlib.closing(transport.Client(config, port.endpoint, secret)) as client:
      start = time.monotonic()
      client.put({}, [data])
      middle = time.monotonic()
      _, received = client.get('data')
      seconds = middle - start, time.monotonic() - middle
    assert np.array_equal(received, data)
    if local:
      assert sum(seconds) < 0.4
    else:
      assert all(0.6 <= s < 1.1 for s in seconds)
  finally:
    emulation.begin(0, 0.0, False)
    port.shutdown()
