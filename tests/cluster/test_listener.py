"""The port of process 0: which one, and at which addresses."""

import contextlib
import socket
from unittest import mock

import pytest

from anp_jax.cluster import cluster_env, handshake, listener, termination
from tests import builders, coordinating, launching

pytestmark = pytest.mark.usefixtures('short_waits')


class _OtherRun(coordinating.Run):
  secret = 'e5' * 32


def _env(port):
  return cluster_env.ClusterEnv('flags', 0, 2, f'127.0.0.1:{port}', secret='ab' * 32)


def _names(monkeypatch, *addresses):
  """Has every name mean these addresses."""
  answers = [(0, 0, 0, '', (address, 0)) for address in addresses]
  monkeypatch.setattr(socket, 'getaddrinfo', lambda *_, **__: answers)


def test_a_port_that_is_taken():
  """It may be free soon: the job is to be started again."""
  with socket.create_server(('127.0.0.1', 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(termination.PeerLostError) as caught:
      listener.listen(_env(port))
  text = str(caught.value)
  assert f'rank 0 cannot open port {port} (taken' in text
  assert '--coordinator=HOST:PORT or JAX_COORDINATOR_PORT' in text
  assert termination.exit_status(caught.value)[0] == 75


@pytest.mark.parametrize('host', ['0.0.0.0', '127.0.0.1', '::', '::1'])
def test_a_reserved_port_is_only_for_a_service_that_shares_it(host):
  """So does gRPC; `create_server` alone reuses an address, but not a port."""
  port = listener.reserve_port()
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  with pytest.raises(OSError, match='in use'):
    socket.create_server((host, port), family=family)
  with socket.create_server((host, port), family=family, reuse_port=True) as service:
    listener.release_ports()
    with socket.create_connection((host, port), 5) as client:
      assert service.accept()[1][:2] == client.getsockname()[:2]
  socket.create_server((host, port), family=family).close()


def test_a_port_that_may_not_be_opened(monkeypatch):
  refuse = mock.Mock(side_effect=PermissionError(13, 'Permission denied'))
  monkeypatch.setattr(socket, 'create_server', refuse)
  builders.assert_refused(['port 99 (Permission'], listener.listen, _env(99))


@pytest.mark.parametrize('count', [0, 2])
@pytest.mark.parametrize('by', ['another service', 'another run'])
def test_the_first_free_port_is_found_by_all(monkeypatch, count, by):
  monkeypatch.setattr(handshake, 'WITHIN', 0.3)  # a service may say nothing
  ports = [launching.free_port() for _ in range(3)]
  with contextlib.ExitStack() as stack:
    for port in ports[:count]:
      if by == 'another run':
        other = _OtherRun(2, ports=[port])
        stack.callback(other.close)
      else:
        stack.enter_context(socket.create_server(('127.0.0.1', port)))
    run = coordinating.Run(2, ports=ports)
    run.join(0, 1).started()
    assert not run.errors
    ports_open = [s.getsockname()[1] for s in run.coordinator.listeners]
    assert ports_open == [ports[count]]
    run.close()


@pytest.mark.parametrize(
  'addresses, host, bound',
  [
    (['127.0.0.1'], 'localhost', ['127.0.0.1']),
    (['127.0.1.1'], 'node1', ['']),  # so Debian names a host to itself
    (['192.0.2.1'], 'node1', ['']),  # another's: behind NAT
    (['127.0.0.1', '192.0.2.1'], 'node1', ['']),
    (['10.1.2.3', '127.0.1.1'], 'node1', ['10.1.2.3']),
    ([], 'no-such-host.invalid', ['']),  # yet
  ],
)
def test_the_addresses_of_process_0(monkeypatch, addresses, host, bound):
  is_here = listener._is_here
  if addresses:
    _names(monkeypatch, *addresses)
  monkeypatch.setattr(listener, '_is_here', lambda a: a == '10.1.2.3' or is_here(a))
  assert listener.bind_addresses(host) == bound


def test_a_loopback_coordinator_is_not_reached_from_elsewhere():
  (listening,) = listener.listen(_env(launching.free_port()))
  with listening:
    assert listening.getsockname()[0] == '127.0.0.1'
