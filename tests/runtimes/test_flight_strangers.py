"""Whoever lacks the run's secret gets nothing from its Flight ports."""

import contextlib
import hashlib
import hmac
import json
import socket
import threading

import jax
import numpy as np
import pyarrow as pa
from pyarrow import flight
import pytest

from anp_jax.cluster import cluster_env
from anp_jax.runtimes import addresses, transport
from anp_jax.runtimes.offload import remote_device
from anp_jax.runtimes.parameter_server import service as service_lib
from tests import builders, certificates

_SECRET = 32 * 'a1'


def _put(client, options):
  descriptor = flight.FlightDescriptor.for_command(_REQUEST)
  writer, reader = client.do_put(descriptor, _SCHEMA, options)
  with writer:
    writer.write_batch(_BATCH)
    writer.done_writing()
    reader.read()


def _exchange(client, options):
  descriptor = flight.FlightDescriptor.for_command(_REQUEST)
  writer, reader = client.do_exchange(descriptor, options)
  with writer:
    writer.begin(_SCHEMA)
    writer.write_batch(_BATCH)
    writer.done_writing()
    reader.read_all()


_SCHEMA = pa.schema([('bytes', pa.uint8())])
_BATCH = pa.record_batch([pa.array([1, 2, 3], pa.uint8())], schema=_SCHEMA)
# A request that each service would begin to answer.
_REQUEST = json.dumps(
  {
    'bytes': 3,
    'worker': 'a',
    'ticket': [0, 0],
    'dtype': 'float32',
    'device': 0,
    'number': 1,
    'kind': 'program',
    'name': 'y',
    'part': 'y',
    'address': -1,
  }
).encode()
_TICKET = flight.Ticket(_REQUEST)
_PATH = flight.FlightDescriptor.for_path('all')
_CALLS = {
  'put': _put,
  'exchange': _exchange,
  'get': lambda c, o: c.do_get(_TICKET, o).read_all(),
  'list': lambda c, o: list(c.list_flights(b'', o)),
  'list_actions': lambda c, o: list(c.list_actions(o)),
  'info': lambda c, o: c.get_flight_info(_PATH, o),
  'schema': lambda c, o: c.get_schema(_PATH, o),
  'handshake': lambda c, o: c.authenticate_basic_token(b'a', b'b', o),
  **{
    name: lambda c, o, name=name: list(c.do_action(flight.Action(name, _REQUEST), o))
    for name in service_lib._ACTIONS
  },
}


def _server(config, place, received):
  del received
  port = service_lib.Service(config, place)
  port.opened.set_result(None)  # none that knows a request: it answers at once

  def works(client):
    with pytest.raises(flight.FlightServerError, match="refused: nothing is called 'x'"):
      client.get('x')
    return True

  return port, works


def _station(config, place, received):
  port = transport.Port(config, place, 'a station')
  port.receive = lambda request, data: received.append(data)

  def works(client):
    client.put({}, [np.arange(3, dtype=np.uint8)])
    return np.array_equal(received.pop(), [0, 1, 2])

  return port, works


def _offload(config, place, received):
  del received
  port = remote_device.OffloadServer(config, place, jax.devices()[:1])

  def works(client):
    with pytest.raises(flight.FlightServerError, match='refused: '):
      client.get('result', device=0, number=7, part='y')  # never computed
    return port.requests == 0 and not port._tasks and not port._results

  return port, works


@pytest.fixture(params=[_server, _station, _offload], ids=lambda f: f.__name__)
def service(request):
  """A port, how it is called well, and what reaches it."""
  config = builders.config({'strategy.name': 'parameter_server'})
  received = []
  place = cluster_env.ClusterEnv('test', 0, 2, num_hosts=1, secret=_SECRET)
  port, works = request.param(config, place, received)
  with contextlib.closing(transport.Client(config, port.endpoint, _SECRET)) as client:
    yield port, lambda: works(client), received
  port.shutdown()


_TOKENS = {  # by the session of the port
  'an empty one': lambda session: '',
  'a guess': lambda session: 'Bearer guess',
  'the session': lambda session: f'Bearer {session}',
  'that of another session': lambda _: f'Bearer {transport.session_token(_SECRET, "then")}',
  'that of another run': lambda session: f'Bearer {transport.session_token(32 * "b2", session)}',
}


@pytest.mark.parametrize('token', [None, *_TOKENS.values()], ids=['no token', *_TOKENS])
def test_no_call_without_the_token_is_answered(service, token):
  port, works, received = service
  address, session = port.endpoint
  headers = [(b'authorization', token(session).encode())] if token else []
  options = flight.FlightCallOptions(timeout=20, headers=headers)
  with flight.FlightClient(f'grpc://{address}') as stranger:
    for name, call in _CALLS.items():
      # pyarrow makes an OSError of get_schema's.
      with pytest.raises((flight.FlightUnauthenticatedError, OSError)) as e:
        call(stranger, options)
      assert 'wrong token: not of this run' in str(e.value), name
  assert not received and works()


def test_the_token_is_derived_from_the_secret_and_the_session():
  def hmac_of(key, message):
    return hmac.new(bytes.fromhex(key), message, hashlib.sha256).hexdigest()

  key = hmac_of(_SECRET, b'key\nflight')
  assert transport.session_token(_SECRET, 'x') == hmac_of(key, b'x')
  with pytest.raises(ValueError, match='secret'):
    transport.session_token('', 'x')


@pytest.fixture
def tls_config(tmp_path):
  """A config with TLS."""
  return builders.config({'strategy.name': 'parameter_server', **certificates.keys(tmp_path)})


@pytest.mark.parametrize(
  'address',
  [
    'grpc://10.0.0.1:4',
    'grpc+unix:///tmp/x:4',
    'http://10.0.0.1:4',
    'user@10.0.0.1:4',
    '10.0.0.1',
    '10.0.0.1:0',
    '10.0.0.1:65536',
    '10.0.0.1:4/x',
    '10.0.0.1:4\n',
    '::1:4',
    None,
    ['10.0.0.1:4'],
  ],
)
def test_an_address_has_no_scheme(tls_config, address):
  arguments = tls_config, [address, 'session'], _SECRET
  builders.assert_refused(['HOST:PORT'], transport.Client, *arguments)


@pytest.mark.parametrize(
  'address', ['10.0.0.1:4', 'node-1.cluster_a.org:65535', '[::1]:40000', 'localhost:1']
)
def test_a_host_and_a_port_are_an_address(address):
  addresses.check(address)


def test_nothing_is_told_in_clear_where_the_config_has_tls(tls_config):
  """Not even to a port that knows no TLS."""
  packets = []
  with socket.create_server(('127.0.0.1', 0)) as listener:

    def listen():
      connection, _ = listener.accept()
      with connection:
        connection.settimeout(5)
        packets.append(connection.recv(4096))

    thread = threading.Thread(target=listen)
    thread.start()
    endpoint = [f'127.0.0.1:{listener.getsockname()[1]}', 'session']
    client = transport.Client(tls_config, endpoint, _SECRET, 5.0)
    with contextlib.closing(client), pytest.raises(flight.FlightError):
      client.ask('hello')
    thread.join()
  # A handshake (22) of TLS (3, ...), RFC 8446, 5.1.
  assert packets[0][:2] == b'\x16\x03' and b'Bearer' not in packets[0]


@pytest.mark.parametrize(
  'place',
  [
    cluster_env.ClusterEnv('Slurm', 0, 2, 'node1:4000', num_hosts=1),
    cluster_env.ClusterEnv('flags', 0, 2, '127.0.0.1:4000'),
    cluster_env.ClusterEnv('flags', 0, 2, '[::1]:4000'),
    cluster_env.ALONE,
  ],
)
def test_a_run_of_one_host_is_heard_there_only(place):
  config = builders.config({'strategy.name': 'parameter_server'})
  with transport.Port(config, place._replace(secret=_SECRET), 'a test') as port:
    host, number = port.endpoint[0].split(':')
    assert host == '127.0.0.1'
    local = [
      line.split()[1]
      for name in ('tcp', 'tcp6')
      for line in open(f'/proc/net/{name}').readlines()[1:]
      if line.split()[1].endswith(f':{int(number):04X}') and line.split()[3] == '0A'  # listening
    ]
    # gRPC's sockets are IPv6: this is ::ffff:127.0.0.1.
    assert local == [f'0000000000000000FFFF00000100007F:{int(number):04X}']
