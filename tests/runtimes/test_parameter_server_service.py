"""A server's port: what it carries, and what it refuses without harm."""

import json
import time
import types
from unittest import mock

from flax import struct
import jax
import numpy as np
import pyarrow as pa
from pyarrow import flight
import pytest

from anp_jax.cluster import cluster_env
from anp_jax.runtimes import addresses, transport
from anp_jax.runtimes.parameter_server import (
  log as log_lib,
  parameter_store,
  scheduler as scheduler_lib,
  service as service_lib,
  session as session_lib,
  threads,
)
from tests import builders, certificates, launching, serving

# A worker's commit of its first ticket.
_CONTRIBUTION = {'ticket': [0, 0], 'reads': [0], 'weight': 16.0, 'values': {'loss': 1.5}}


class _Server:
  """Server 0 of a run of one server, on zeros."""

  def __init__(self, config, folder, setup):
    participant = serving.participant(config, folder)
    self.setup = setup
    (optimizer,) = setup.optimizers
    start = optimizer.start(
      jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), setup.program.abstract_state)
    )
    self.store = parameter_store.ParameterStore(optimizer, start, lambda version: False, 9)
    self.log = log_lib.UpdateLog(str(folder), 0, {})
    scheduler = scheduler_lib.TicketScheduler(config, 5, 0, set())
    self.session = session_lib.ChiefSession(self.store, scheduler, self.log, [start])
    self.service = service_lib.Service(config, participant.env)
    self.service.opened.set_result(self.session)
    self.address, session = self.service.endpoint
    self.token = transport.session_token(participant.env.secret, session)
    self.secret = participant.env.secret
    self.client = participant.connect(self.service.endpoint)

  @property
  def sizes(self):
    layout = self.setup.layout
    return [layout.params.size, layout.stats.size]

  def arrays(self):
    return [np.ones(size, np.float32) for size in self.sizes]

  def push(self, arrays, **more):
    request = {'worker': 'a', 'ticket': (0, 0)}
    self.client.put({**request, **more}, arrays)

  def close(self):
    self.client.close()
    self.store.close()
    self.log.close()
    self.service.shutdown()

  def unchanged(self):
    assert self.store.version == 0
    assert not self.store._pending
    _, state = self.store.read(0, 0)
    assert not np.concatenate(self.setup.optimizers[0].weights(state)).any()
    assert self.session.scheduler.version == 0
    assert self.session.failed == ''


@pytest.fixture(scope='module')
def setup():
  """The setup of a tiny network, whose update is compiled once."""
  config = builders.load(str(launching.ROOT / 'configs' / 'resnet_anp.py:tiny'))
  with pytest.MonkeyPatch.context() as patch:
    serving.on_devices(patch, 1)
    return serving.small_setup(config, **{'schedule.warmup': '0 steps'})


@pytest.fixture
def server(config, tmp_path, monkeypatch, setup):
  serving.on_devices(monkeypatch, 1)
  server = _Server(serving.config_of(config), tmp_path, setup)
  yield server
  server.close()


def _update(server):
  """Makes one update as a worker does; returns the weights and the answer."""
  ask, worker = server.client.ask, 'a'
  ticket = ask('take', worker=worker)['ticket']
  answer = {}
  while 'version' not in answer:  # the first update is being compiled
    answer, data = server.client.get('weights', worker=worker, ticket=ticket)
  weights, _ = transport.split(data, server.arrays())
  server.push(server.arrays(), ticket=ticket, worker=worker)
  contribution = {**_CONTRIBUTION, 'ticket': ticket, 'reads': [answer['version']]}
  return weights, ask('commit', worker=worker, contribution=contribution)


def test_an_update_goes_round(server):
  weights, answer = _update(server)
  assert answer == {} and not weights.any()
  # The next reader waits until it is applied.
  weights, _ = _update(server)
  assert weights.any()
  assert server.session.applied[0][2] == [{**_CONTRIBUTION, 'worker': 'a'}]


@pytest.mark.parametrize('change', [lambda a: [a[0][:-1], a[1]], lambda a: [*a, a[1]]])
def test_invalid_gradient_changes_nothing(server, change):
  with pytest.raises(flight.FlightError, match='refused: .*bytes'):
    server.push(change(server.arrays()))
  server.unchanged()
  assert _update(server)[1] == {}


def test_updates_are_kept_until_each_server_has_them(config):
  scheduler = scheduler_lib.TicketScheduler(serving.config_of(config), 9, 0, set())
  session = session_lib.ChiefSession(mock.Mock(), scheduler, mock.Mock(), [None] * 3)

  def asked(server, since):
    return [order for order, _ in session.updates(server, since)['updates']]

  def update():
    ticket = session.take('a')['ticket']
    session.commit('a', {**_CONTRIBUTION, 'ticket': ticket, 'reads': [scheduler.version]})

  for _ in range(3):
    update()
  assert asked(1, 0) == [0, 1, 2] and asked(2, 0) == [0, 1, 2]
  update()
  assert asked(1, 3) == [3] and len(session._updates) == 4  # server 2 may have lost the answer
  assert asked(2, 1) == [1, 2, 3] and asked(2, 3) == [3] and len(session._updates) == 1
  assert asked(2, 1) == [3] and len(session._updates) == 1  # a call that its server gave up


def test_a_full_disk_ends_the_run(server):
  """Workers would connect again for ever."""
  server.log.append = mock.Mock(side_effect=OSError(28, 'No space left on device'))
  _update(server)
  text = 'the updates cannot be recorded: OSError: [Errno 28] No space left on device'
  assert server.session.failed == text and server.store.version == 0


def test_bytes_that_lie_are_refused(server):
  """A stream that holds more, or other things, than it announces."""
  size = sum(a.nbytes for a in server.arrays())
  descriptor = flight.FlightDescriptor.for_command(
    json.dumps({'worker': 'a', 'ticket': (0, 0), 'bytes': size})
  )
  options = flight.FlightCallOptions(
    timeout=20, headers=[(b'authorization', f'Bearer {server.token}'.encode())]
  )
  plain = flight.FlightClient(f'grpc://{server.address}')
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
    ('commit', {'worker': 'a', 'contribution': 3}),
    ('commit', {'worker': 'a', 'contribution': {**_CONTRIBUTION, 'ticket': 'x'}}),
    # Another's ticket, for which this one has pushed nothing.
    ('commit', {'worker': 'b', 'contribution': _CONTRIBUTION}),
    ('finish', {}),
  ],
)
def test_senseless_request_is_refused(server, name, request_):
  ticket = server.client.ask('take', worker='a')['ticket']
  server.client.get('weights', worker='a', ticket=ticket)
  with pytest.raises(flight.FlightError, match='refused'):
    server.client.ask(name, **request_)
  server.unchanged()


def test_ticket_nobody_gave_is_dropped(server):
  server.push(server.arrays(), ticket=(3, 0))
  contribution = {**_CONTRIBUTION, 'ticket': (3, 0)}
  answer = server.client.ask('commit', worker='a', contribution=contribution)
  assert answer == {'drop': True}
  assert server.session.scheduler.version == 0


def test_a_call_from_before_a_release_gets_no_ticket(server, monkeypatch):
  """Its answer reaches nobody: the worker's connection is lost, or its process."""
  monkeypatch.setattr(session_lib, 'PATIENCE', 0.5)
  session = server.session
  first = [session.take('lost')['ticket'] for _ in range(5)]
  call = threads.start(lambda: session.take('lost'), 'call')  # none is left
  time.sleep(0.1)
  answer = server.client.ask('release', worker='lost')
  number = answer['session']
  assert answer['version'] == server.store.version == 0
  assert call.result(10) == session.take('lost') == {'wait': True}
  tickets = [session.take('lost', number)['ticket'] for _ in range(2)]
  assert [*tickets, *(session.take('other')['ticket'] for _ in range(3))] == first


def test_a_call_that_waits_when_the_run_ends_changes_nothing(server):
  ticket = server.session.take('a')['ticket']
  server.push(server.arrays(), ticket=ticket)
  server.session.close()
  with pytest.raises(flight.FlightUnavailableError, match='the run is over'):
    server.session.commit('a', {**_CONTRIBUTION, 'ticket': ticket})
  assert server.session.scheduler.version == 0


def test_snapshot_can_be_fetched_again(server):
  """An answer may be lost on its way."""
  server.store._is_snapshot = lambda version: True
  for _ in range(2):
    assert _update(server)[1] == {}
  server.store.read(2, 10)

  def fetched(version):
    return server.client.get('snapshot', version=version)[1]

  assert server.store.next_snapshot() == 1
  first = fetched(1)
  assert server.store.next_snapshot() == 2  # the one that was fetched is not in the way
  assert _update(server)[1] == {}
  server.store.read(3, 10)
  np.testing.assert_array_equal(fetched(1), first)
  assert (fetched(2) != first).any()
  with pytest.raises(flight.FlightError, match='refused: version 1 is not kept'):
    fetched(1)
  assert server.store.next_snapshot() == 3


class _State(struct.PyTreeNode):
  """A server's state that counts updates, and holds nothing else."""

  step: int = 0
  momenta: tuple = ()


def _store(is_snapshot, max_pending):
  """A store that counts updates, and takes any gradient."""
  apply = lambda state, *_: (_State(state.step + 1), True)  # noqa: E731
  optimizer = types.SimpleNamespace(apply=apply)
  return parameter_store.ParameterStore(optimizer, _State(), is_snapshot, max_pending)


def test_gradients_of_used_tickets_do_not_pile_up():
  """Neither what waits when its ticket is used nor what comes later."""
  store = _store(lambda version: False, 3)
  arrays = np.ones(2, np.float32), np.ones(1, np.float32)
  for step in range(5):
    for worker in ('quick', 'spare', 'late'):
      store.enqueue_gradient((step, 0), worker, *arrays)
    serving.submit(store, step, 'quick')
    assert store.read(step + 1, 10)[0] == step + 1
    for worker in ('quick', 'spare', 'late', 'later'):
      store.enqueue_gradient((step, 0), worker, *arrays)
      assert store.has_gradient((step, 0), worker)
  for worker in 'abc':  # there is room for as many as before
    store.enqueue_gradient((5, 0), worker, *arrays)
  with pytest.raises(parameter_store.InvalidMessageError, match='3 gradients wait'):
    store.enqueue_gradient((5, 0), 'd', *arrays)
  store.close()


def test_updates_wait_while_two_snapshots_are_not_fetched():
  """Each is as large as the weights; the third one waits, and so each time."""
  store = _store(lambda version: True, 9)
  for step in range(5):
    store.enqueue_gradient((step, 0), 'a', np.ones(2), np.ones(1))
    serving.submit(store, step)
  for newest in (2, 3, 4):
    assert store.read(newest, 10)[0] == newest
    with pytest.raises(TimeoutError):
      store.read(newest + 1, 0.1)
    assert store.snapshot(newest - 1, 0).step == newest - 1
  assert store.read(5, 10)[0] == 5
  store.close()


@pytest.mark.parametrize('is_poisoned', [True, False])
def test_update_that_cannot_be_applied_is_told(server, monkeypatch, is_poisoned):
  if is_poisoned:
    monkeypatch.setattr(server, 'arrays', lambda: [np.full(n, np.inf, 'f4') for n in server.sizes])
  else:
    apply = mock.Mock(side_effect=MemoryError('out of it'))
    monkeypatch.setattr(server.setup.optimizers[0], 'apply', apply)
  assert _update(server)[1] == {}
  launching.wait_until(lambda: server.store.error, 10)
  text = 'is not finite; ' if is_poisoned else 'cannot be applied: MemoryError: out of it'
  assert server.store.error.startswith(f'update 0 {text}')
  assert server.store.version == 0


def test_tls(config, tmp_path, monkeypatch, setup):
  serving.on_devices(monkeypatch, 1)
  open_config, config = config, serving.config_of(config, **certificates.keys(tmp_path))
  server = _Server(config, tmp_path, setup)
  assert _update(server)[1] == {}
  naked = transport.Client(serving.config_of(open_config), server.service.endpoint, server.secret)
  with pytest.raises(flight.FlightError):
    naked.ask('take', worker='a')
  naked.close()
  server.close()


def test_interface_by_name():
  place = cluster_env.ClusterEnv('test', 0, 2, 'far:1234')
  assert addresses.own_address('lo', place) == '127.0.0.1'
  assert addresses.own_address('10.1.2.3', place) == '10.1.2.3'


def test_address_that_is_not_here_is_named(config):
  config = serving.config_of(config, **{'strategy.bind': '203.0.113.7'})
  place = serving.place(0, 1)
  builders.assert_refused(['strategy.bind'], service_lib.Service, config, place)
