"""A server's port: what it carries, and what it refuses without harm."""

import json
import subprocess
import time
import types

import jax
import numpy as np
import pyarrow as pa
from pyarrow import flight
import pytest

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env
from anp_jax.cluster import process_info
from anp_jax.runtimes import transport
from anp_jax.runtimes.server import log as log_lib
from anp_jax.runtimes.server import parameter_store as keeper_lib
from anp_jax.runtimes.server import readings
from anp_jax.runtimes.server import rendezvous
from anp_jax.runtimes.server import run as server_run
from anp_jax.runtimes.server import scheduler as desk_lib
from anp_jax.runtimes.server import service as service_lib
from anp_jax.runtimes.server import setup as setup_lib
from tests import serving

# Of a commit, as a worker makes it of its first ticket.
_PART = {
  'ticket': [0, 0], 'reads': [0], 'weight': 16.0,
  'values': {
    'loss': 1.5, 'anp_top1': 2.0, 'grad_norm': 1.0, 'damaged': 0.0,
    'waited': 0.0, 'bytes': 8.0,
  },
}  # fmt: skip


class _Server:
  """Server 0 of a run of one server, on zeros."""

  def __init__(self, config, folder):
    self.setup = setup = setup_lib.create(config, 0.0)
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), setup.parts.like)
    start = setup.shards[0].start(zeros)
    place = cluster_env.ClusterEnv('test', 0, 1)
    self.card = process_info.collect(place, config, {})
    self.keeper = keeper_lib.Keeper(setup.shards[0], start, lambda v: False, 9)
    self.log = log_lib.Log(str(folder), 0, {})
    self.service = rendezvous.open_service(config, place, str(folder))
    self.term = self.service.term = service_lib.Lead(
      'now', setup.shards[0], self.keeper,
      desk_lib.Desk(config, 5, 0, set()), self.log, [start],
      self.service.address,
      self.card, {'batch_size': 16, 'shards': 1},
      readings.measured(setup.objective),

    )  # fmt: skip
    self.client = rendezvous.connect(config, str(folder))
    self.address, self.token = rendezvous.read(str(folder))

  @property
  def sizes(self):
    return [flat.size for flat in self.setup.flats]

  def arrays(self, value=1.0):
    return [np.full(size, value, np.float32) for size in self.sizes]

  def push(self, arrays, **more):
    request = {
      'term': 'now', 'worker': 'a', 'ticket': (0, 0), 'dtype': 'float32',
    }  # fmt: skip
    self.client.put({**request, **more}, arrays)

  def close(self):
    self.client.close()
    self.keeper.close()
    self.log.close()
    self.service.shutdown()

  def unchanged(self):
    assert self.keeper.version == 0
    assert not self.keeper._staged
    _, state = self.keeper.read(0, 0)
    assert not np.concatenate(self.setup.shards[0].weights(state)).any()
    assert self.term.desk.version == 0
    assert self.term.failed == ''


@pytest.fixture
def server(config, tmp_path, monkeypatch):
  serving.on_devices(monkeypatch, 1)
  config = serving.config_of(
    config,
    **{
      'model.name': 'tests.user_network:SmallNet',
      'schedule.warmup': '0 steps',
    },
  )
  made = _Server(config, tmp_path)
  yield made
  made.close()


def _update(server, worker='a'):
  """One update, as a worker makes it; what its commit was answered."""
  ask = server.client.ask
  ticket = ask('take', term='now', worker=worker)['ticket']
  said = {}
  while 'version' not in said:  # the first update is being compiled
    said, data = server.client.get(
      'weights', term='now', worker=worker, ticket=ticket
    )
  weights, _ = transport.split(data, server.arrays())
  server.push(server.arrays(), ticket=ticket, worker=worker)
  part = {**_PART, 'ticket': ticket, 'reads': [said['version']]}
  return weights, ask('commit', term='now', worker=worker, part=part)


def test_an_update_goes_round(server):
  hello = server.client.ask('hello', worker='a', card=server.card, devices=1)
  assert hello['term'] == 'now' and hello['batch_size'] == 16
  weights, answer = _update(server)
  assert answer == {} and not weights.any()
  # The next reader waits until it is applied.
  weights, _ = _update(server)
  assert weights.any()
  assert server.term.updates[0][2][0]['values'] == _PART['values']


def test_wrong_token_is_refused(server):
  stranger = transport.Client(server.address, 'guessed')
  for call in (
    lambda: stranger.ask('take', term='now', worker='a'),
    lambda: stranger.get('weights', term='now', worker='a', ticket=(0, 0)),
    lambda: stranger.put({'term': 'now'}, server.arrays()),
  ):
    with pytest.raises(flight.FlightUnauthenticatedError, match='token'):
      call()
  stranger.close()
  server.unchanged()


def test_token_is_the_owners_alone(server, tmp_path):
  assert (tmp_path / rendezvous.NAME).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda a: [a[0][:-1], a[1]], 'bytes, expected'),
    (lambda a: [a[0], a[1], a[1]], 'bytes, expected'),
    (lambda a: [a[0] * np.nan, a[1]], 'not finite'),
    (lambda a: [a[0], a[1] + np.inf], 'not finite'),
  ],
  ids=['short', 'long', 'nan', 'inf'],
)
def test_unfit_gradient_changes_nothing(server, change, message):
  with pytest.raises(flight.FlightError, match=f'refused: .*{message}'):
    server.push(change(server.arrays()))
  server.unchanged()
  assert _update(server)[1] == {}


def test_large_finite_gradient_is_fit(server):
  server.push(server.arrays(3e38))
  assert len(server.keeper._staged) == 1


def test_other_dtype_and_term_are_refused(server):
  with pytest.raises(flight.FlightError, match='in float64, expected float32'):
    server.push(server.arrays(), dtype='float64')
  with pytest.raises(flight.FlightUnavailableError, match='another term'):
    server.push(server.arrays(), term='before')
  server.unchanged()


def test_bytes_that_lie_are_refused(server):
  """A stream that holds more, or other things, than it announces."""
  size = sum(a.nbytes for a in server.arrays())
  descriptor = flight.FlightDescriptor.for_command(
    json.dumps({
      'term': 'now', 'worker': 'a', 'ticket': (0, 0), 'dtype': 'float32',
      'bytes': size,
    })
  )  # fmt: skip
  options = flight.FlightCallOptions(
    timeout=20,
    headers=[(b'authorization', f'Bearer {server.token}'.encode())],
  )
  plain = flight.FlightClient(server.address)
  for column in (
    pa.array(np.zeros(size + 1, np.uint8)),
    pa.array(np.zeros(size - 1, np.uint8)),
    pa.array(np.zeros(size // 8, np.float64)),
    pa.array(['x'] * size),
  ):
    schema = pa.schema([('bytes', column.type)])
    with pytest.raises(flight.FlightError, match='refused'):
      writer, reader = plain.do_put(descriptor, schema, options)
      with writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=schema))
        writer.done_writing()
        reader.read()
  plain.close()
  server.unchanged()


@pytest.mark.parametrize(
  'name, request_',
  [
    ('take', {}),
    ('commit', {'worker': 'a', 'part': 3}),
    ('commit', {'worker': 'a', 'part': {**_PART, 'reads': [7]}}),
    ('commit', {'worker': 'a', 'part': {**_PART, 'weight': -1.0}}),
    ('commit', {'worker': 'a', 'part': {**_PART, 'ticket': 'x'}}),
    ('commit', {'worker': 'a', 'part': {**_PART, 'values': {}}}),
    ('commit', {'worker': 'a', 'part': {
      **_PART, 'values': {**_PART['values'], 'damaged': float('nan')}}}),
    # Another's ticket, for which this one has pushed nothing.
    ('commit', {'worker': 'b', 'part': _PART}),
    ('finish', {}),
    ('__init__', {}),
  ],
)  # fmt: skip
def test_senseless_request_is_refused(server, name, request_):
  ticket = server.client.ask('take', term='now', worker='a')['ticket']
  server.client.get('weights', term='now', worker='a', ticket=ticket)
  with pytest.raises(flight.FlightError, match='refused'):
    server.client.ask(name, term='now', **request_)
  server.unchanged()


def test_ticket_nobody_gave_is_dropped(server):
  server.push(server.arrays(), ticket=(3, 0))
  part = {**_PART, 'ticket': (3, 0)}
  answer = server.client.ask('commit', term='now', worker='a', part=part)
  assert answer == {'drop': True}
  assert server.term.desk.version == 0


def test_worker_of_another_config_is_named(server):
  other = {**server.card, 'config': {**server.card['config'], 'seed': '7'}}
  said = server.client.ask('hello', worker='b', card=other, devices=1)
  assert 'seed' in said['problem']


def test_server_of_another_config_is_named(server):
  other = {**server.card, 'config': {**server.card['config'], 'seed': '7'}}
  said = server.client.ask('join', server=1, address='grpc://x:1', card=other)
  assert 'config.seed 7' in said['problem']
  assert server.term.failed == said['problem']


def test_server_may_compute_on_other_devices(server):
  other = {**server.card, 'index': 1, 'platform': 'gpu', 'gpus': ['x']}
  said = server.client.ask('join', server=1, address='grpc://x:1', card=other)
  assert said['term'] == 'now'


def test_stop_is_asked_for_until_the_run_ends(server, monkeypatch):
  """Of a server 0 without a term yet, and again when it begins another."""
  monkeypatch.setattr(server_run, '_REPEAT', 0.1)
  server.service.term = None
  asked, stopped, end = [], [], time.monotonic() + 10

  def connect():
    asked.append(server.service.term)
    if len(asked) == 2:
      server.service.term = server.term
    return transport.Client(server.address, server.token)

  def done():
    assert time.monotonic() < end, f'stopped {len(stopped)} times'
    if server.term.desk.limit == 0:
      stopped.append(server.term.desk)
      server.term.desk = desk_lib.Desk(server.setup.config, 5, 0, set())
    return len(stopped) == 2

  processes = types.SimpleNamespace(vote=lambda: 1, heartbeat=lambda *_: None)
  jobs = [types.SimpleNamespace(done=done)]
  server_run._attend(processes, jobs, types.SimpleNamespace(done=0), connect)
  assert asked[0] is None


def test_snapshot_can_be_fetched_again(server):
  """An answer may be lost on its way."""
  server.keeper._is_due = lambda version: True
  for _ in range(2):
    assert _update(server)[1] == {}
  server.keeper.read(2, 10)

  def fetched(version):
    return server.client.get('snapshot', term='now', version=version)[1]

  assert server.keeper.due() == 1
  first = fetched(1)
  assert server.keeper.due() == 2  # the one that was fetched is not in the way
  assert _update(server)[1] == {}
  server.keeper.read(3, 10)
  np.testing.assert_array_equal(fetched(1), first)
  assert (fetched(2) != first).any()
  with pytest.raises(
    flight.FlightError, match='refused: version 1 is not kept'
  ):
    fetched(1)
  assert server.keeper.due() == 3


def test_devices_must_be_alike(server):
  server.client.ask('hello', worker='a', card=server.card, devices=1)
  said = server.client.ask('hello', worker='b', card=server.card, devices=2)
  assert said['problem'].startswith('2 devices')


def test_gradients_that_wait_are_bounded(server):
  for step in range(9):
    server.push(server.arrays(), ticket=(step, 0))
  with pytest.raises(flight.FlightError, match='9 gradients wait'):
    server.push(server.arrays(), ticket=(9, 0))


class _Shard:
  """Counts updates; takes any gradient."""

  def apply(self, state, gradients, terms, weights, staleness):
    return types.SimpleNamespace(step=state.step + 1), True


def test_gradients_of_used_tickets_do_not_pile_up():
  """Neither what waits when its ticket is used nor what comes later."""
  start = types.SimpleNamespace(step=0)
  keeper = keeper_lib.Keeper(_Shard(), start, lambda version: False, 3)
  arrays = np.ones(2, np.float32), np.ones(1, np.float32)
  for step in range(5):
    for worker in ('quick', 'spare', 'late'):
      keeper.stage((step, 0), worker, *arrays)
    part = {'ticket': (step, 0), 'worker': 'quick', 'reads': [step]}
    keeper.submit(step, [{**part, 'weight': 1.0}])
    assert keeper.read(step + 1, 10)[0] == step + 1
    for worker in ('quick', 'spare', 'late', 'later'):
      keeper.stage((step, 0), worker, *arrays)
      assert keeper.holds((step, 0), worker)
  for worker in 'abc':  # there is room for as many as before
    keeper.stage((5, 0), worker, *arrays)
  with pytest.raises(keeper_lib.Unfit, match='3 gradients wait'):
    keeper.stage((5, 0), 'd', *arrays)
  keeper.close()


def test_poisoned_update_is_not_applied(server):
  """Finite on its way, infinite once applied."""
  server.client.ask('take', term='now', worker='a')
  server.client.get('weights', term='now', worker='a', ticket=(0, 0))
  server.push([np.full(s, 3e38, np.float32) for s in server.sizes])
  # Statistics grow beyond what a float holds.
  state = server.keeper._state
  server.keeper._state = state.replace(stats=state.stats + 3e38)
  server.client.ask('commit', term='now', worker='a', part=_PART)
  assert 'update 0 is not finite' in _error(server)
  assert server.keeper.version == 0


def test_update_that_cannot_be_applied_is_told(server, monkeypatch):
  def apply(*_):
    raise MemoryError('out of it')

  monkeypatch.setattr(server.setup.shards[0], 'apply', apply)
  assert _update(server)[1] == {}
  assert _error(server) == 'update 0 cannot be applied: MemoryError: out of it'
  assert server.keeper.version == 0


def _error(server):
  """Why the keeper applies no more updates."""
  end = time.monotonic() + 10
  while not server.keeper.error and time.monotonic() < end:
    time.sleep(0.02)
  return server.keeper.error


def test_tls(config, tmp_path, monkeypatch):
  serving.on_devices(monkeypatch, 1)
  key, certificate = tmp_path / 'key.pem', tmp_path / 'certificate.pem'
  made = subprocess.run(
    ['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt',
     'ec_paramgen_curve:prime256v1', '-nodes', '-keyout', str(key), '-out',
     str(certificate), '-days', '2', '-subj', '/CN=localhost', '-addext',
     'subjectAltName=IP:127.0.0.1'],
    capture_output=True,
  )  # fmt: skip
  if made.returncode:
    pytest.skip('openssl cannot make a certificate here')
  config = serving.config_of(
    config,
    **{
      'model.name': 'tests.user_network:SmallNet',
      'strategy.tls_certificate': str(certificate),
      'strategy.tls_key': str(key),
    },
  )
  server = _Server(config, tmp_path)
  assert server.address.startswith('grpc+tls://')
  assert _update(server)[1] == {}
  naked = transport.Client(server.address.replace('+tls', ''), server.token)
  with pytest.raises(flight.FlightError):
    naked.ask('take', term='now', worker='a')
  naked.close()
  server.close()


def test_interface_by_name():
  place = cluster_env.ClusterEnv('test', 0, 2, 'far:1234')
  assert transport.own_address('lo', place) == '127.0.0.1'
  assert transport.own_address('10.1.2.3', place) == '10.1.2.3'


def test_address_that_is_not_here_is_named(config, tmp_path):
  config = serving.config_of(config, **{'strategy.bind': '203.0.113.7'})
  with pytest.raises(config_lib.ConfigError, match='strategy.bind'):
    rendezvous.open_service(
      config, cluster_env.ClusterEnv('test', 0, 1), str(tmp_path)
    )
