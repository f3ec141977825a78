"""Where a process stands, told by flags, Slurm or a TPU pod."""

import socket

import pytest

from anp_jax.cluster import cluster_env, launchers, tpu_metadata
from tests import builders, environments, http_server

_STEP, _MPI, _TPU = environments.STEP, environments.OPEN_MPI_4, environments.TPU
# What a batch script's own shell has: task 0 of the job, and no step.
_BATCH = {k: v for k, v in _STEP.items() if 'STEP' not in k} | {'SLURM_PROCID': '0'}
_ONE_HOST = {**_STEP, 'SLURM_STEP_NUM_NODES': '1'}


def _detect(environment=None, *flags):
  return cluster_env.detect(*flags, environment=environment or {})


def _refused(text, environment=None, *flags):
  builders.assert_refused([text], _detect, environment, *flags)


@pytest.mark.parametrize(
  'environment', [{}, _BATCH, {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}]
)
def test_nobody_tells(environment):
  assert _detect(environment) == cluster_env.ALONE
  assert (cluster_env.ALONE.count, cluster_env.ALONE.index) == (1, 0)


@pytest.mark.parametrize('variables', [{}, _STEP, _MPI, _TPU, {**_STEP, **_MPI}])
def test_flags_come_first(variables):
  assert _detect(variables, 'node1:1234', 8, 7)[:4] == ('flags', 7, 8, 'node1:1234')
  for coordinator in (None, 'node1:1234'):  # nobody to meet
    assert _detect(variables, coordinator, 1, 0)[:4] == ('flags', 0, 1, '')


@pytest.mark.parametrize(
  'environment, launcher',
  [
    ({**_TPU, **_MPI, **_STEP}, 'Slurm'),
    ({**_TPU, **_MPI}, 'Open MPI'),
    ({**_BATCH, **_MPI}, 'Open MPI'),
    # In srun's shell, or below mpirun's daemons, which srun has started.
    ({**_STEP, **_MPI, 'SLURM_STEP_NUM_TASKS': '1'}, 'Open MPI'),
    ({**_STEP, **_MPI, 'SLURM_STEP_NUM_TASKS': '2'}, 'Open MPI'),
    (_TPU, 'TPU'),
  ],
)
def test_the_order_of_launchers(environment, launcher):
  assert _detect(environment).launcher == launcher


@pytest.mark.parametrize(
  'flags, text',
  [
    ((None, 2, None), '--num_processes needs --process_id as well'),
    ((None, None, 1), '--process_id needs --num_processes as well'),
    (('a:1', None, None), '--coordinator=a:1 needs --num_processes and'),
    ((None, 2, 0), '2 processes need --coordinator=HOST:PORT'),
    (('a:1', 0, 0), '--num_processes=0: expected 1 or more'),
    (('a:1', 2, 2), '--process_id=2: expected a number from 0 to 1'),
    (('a:1', 2, -1), '--process_id=-1: expected a number from 0 to 1'),
    (('a', 2, 0), "coordinator 'a': expected HOST:PORT"),
    (('a:0', 2, 0), "coordinator 'a:0': expected HOST:PORT"),
    (('a:65536', 2, 0), "coordinator 'a:65536'"),
    (('a:b', 2, 0), "coordinator 'a:b'"),
    (('::1:99', 2, 0), "coordinator '::1:99'"),
    (('node1..x:99', 2, 1), "coordinator 'node1..x:99': expected HOST:PORT"),
    ((f'{"n" * 64}:99', 2, 1), "coordinator 'nnn"),
  ],
)
def test_flags_at_fault(flags, text):
  _refused(text, {}, *flags)


def test_a_slurm_step():
  env = _detect(_STEP)
  assert (env.launcher, env.index, env.count) == ('Slurm', 3, 4)
  assert (env.local_index, env.num_hosts) == (1, 2)
  host, port = cluster_env.split_address(env.coordinator_address)
  ports = [port, *env.other_ports]
  # Below 32768, Linux's ephemeral ports, and 60001, those of srun.
  assert host == 'gpu03' and len(set(ports)) == 8 and all(20480 <= p <= 28671 for p in ports)
  single_task = {'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'}
  env = _detect({**_STEP, **single_task})
  assert (env.launcher, env.count, env.index) == ('Slurm', 1, 0)


def test_all_tasks_of_a_step_meet_and_no_others():
  env = _detect(_STEP)
  first = _detect({**_STEP, 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'})
  assert first._replace(index=3, local_index=1) == env
  for key in ('SLURM_JOB_ID', 'SLURM_STEP_ID'):
    other = _detect({**_STEP, key: '7'})
    assert other.token != env.token and other.coordinator_address != env.coordinator_address
  # Processes of the start before this one may still be there.
  assert _detect({**_STEP, 'SLURM_RESTART_COUNT': '1'}).token != env.token


@pytest.mark.parametrize('launcher', [_STEP, _MPI, _TPU])
def test_a_coordinator_or_port_of_ones_own(launcher):
  assert len(_detect(launcher).other_ports) == 7
  env = _detect(launcher, 'mine:99')
  assert (env.coordinator_address, env.other_ports) == ('mine:99', ())  # that port is meant
  env = _detect({**launcher, 'JAX_COORDINATOR_PORT': '99'})
  assert env.coordinator_address.endswith(':99') and not env.other_ports


@pytest.mark.parametrize(
  'environment, flags, address',
  [
    (_ONE_HOST, (), '127.0.0.1:'),
    (_ONE_HOST, ('gpu03:99',), '127.0.0.1:99'),
    ({**_ONE_HOST, 'SLURM_STEP_NODELIST': 'localhost'}, (), 'localhost:'),
    ({}, ('127.0.0.1:99', 2, 1), '127.0.0.1:99'),
  ],
)
def test_processes_of_one_host_meet_at_loopback(environment, flags, address):
  assert _detect(environment, *flags).coordinator_address.startswith(address)


@pytest.mark.parametrize(
  'changes, text',
  [
    ({'SLURM_PROCID': '4'}, 'SLURM_PROCID=4: expected a number from 0 to 3'),
    ({'SLURM_PROCID': 'x'}, "SLURM_PROCID='x': expected a number"),
    ({'SLURM_PROCID': '--1'}, "SLURM_PROCID='--1': expected a number"),
    ({'SLURM_PROCID': '²'}, "SLURM_PROCID='²': expected a number"),
    ({'SLURM_STEP_NUM_TASKS': '0'}, 'SLURM_STEP_NUM_TASKS=0: expected 1'),
    ({'SLURM_STEP_NUM_TASKS': None}, 'SLURM_STEP_NUM_TASKS is not set, though others'),
    ({'JAX_COORDINATOR_PORT': 'x'}, "coordinator 'gpu03:x': expected HOST"),
    ({'SLURM_STEP_NODELIST': 'localhost'}, 'is a loopback address'),
  ],
)
def test_slurm_at_fault(changes, text):
  _refused(text, {k: v for k, v in {**_STEP, **changes}.items() if v is not None})


@pytest.mark.parametrize(
  'host, is_loopback',
  [
    *(
      (host, True)
      for host in (
        'localhost localhost4 localhost6 localhost6.localdomain6 localhost.localdomain LOCALHOST '
        'ip6-localhost ip6-loopback ::1 :: 127.0.0.1 127.0.1.1 127.1 ::ffff:127.0.0.1 '
        '::FFFF:127.3.2.1 0.0.0.0'
      ).split()
    ),
    *(
      (host, False)
      for host in 'node1 localhost7 ip6-loopbacks ::ffff:10.0.0.1 128.0.0.1 localhosts'.split()
    ),
  ],
)
def test_a_loopback_coordinator_of_several_hosts(host, is_loopback):
  assert cluster_env.is_loopback_name(host) == is_loopback
  address = f'[{host}]:99' if ':' in host else f'{host}:99'
  for launcher in (_STEP, _TPU):
    if is_loopback:
      _refused('is a loopback address', launcher, address)
    else:
      assert _detect(launcher, address).coordinator_address == address


def test_a_tpu_pod():
  env = _detect(_TPU)
  assert (env.launcher, env.index, env.count) == ('TPU', 1, 3)
  assert env.coordinator_address == 't1k-w-0.svc:20480'
  assert _detect({**_TPU, 'MEGASCALE_NUM_SLICES': '1'}) == env
  _refused('MEGASCALE_NUM_SLICES=2', {**_TPU, 'MEGASCALE_NUM_SLICES': '2'})


class _Metadata(http_server.Handler):
  """A TPU VM's metadata server, as Google documents it."""

  def do_GET(self):
    assert self.headers['Metadata-Flavor'] == 'Google'
    key = self.path.removeprefix('/computeMetadata/v1/instance/attributes/')
    self.store.requests.append(key)
    value = self.store.attributes.get(key)
    # Not ready at first.
    status = 503 if len(self.store.requests) < 3 else 200 if value else 404
    self.reply(status, {}, value.encode() if status == 200 else b'')


_TRIPLES = 'unknown:unknown:10.0.0.4,unknown:unknown:10.0.0.5'
_POD = {'agent-worker-number': '1', 'worker-network-endpoints': _TRIPLES}
_TPU_ENV = "ACCELERATOR_TYPE: 'v4-16'\nMEGASCALE_NUM_SLICES: '{}'\nZONE: 'a'\n"


@pytest.fixture
def tpu_vm(monkeypatch):
  """(attributes, more) -> the ClusterEnv that a TPU VM detects."""
  monkeypatch.setattr(cluster_env.xla_flags, 'platform', lambda _: 'tpu')
  monkeypatch.setattr(tpu_metadata, '_RETRY', 0.01)
  with http_server.Server(_Metadata) as server:

    def detect(attributes, more=None):
      server.attributes, server.requests = attributes, []
      return _detect({'GCE_METADATA_IP': server.url.removeprefix('http://'), **(more or {})})

    detect.server = server
    yield detect


@pytest.mark.parametrize('workers, first', [(_TRIPLES, '10.0.0.4'), ('w-0,w-1', 'w-0')])
@pytest.mark.parametrize('slices', [None, '', '1'])
def test_a_tpu_vm_asks_its_metadata_server(tpu_vm, workers, first, slices):
  attributes = {
    'agent-worker-number': '1',
    'worker-network-endpoints': workers,
    'tpu-env': slices and _TPU_ENV.format(slices),
  }
  env = tpu_vm(attributes)
  assert (env.launcher, env.index, env.count) == ('TPU', 1, 2)
  assert env.coordinator_address == f'{first}:20480' and env.num_hosts == 2


def test_a_tpu_vm_of_its_own(tpu_vm):
  alone = {'agent-worker-number': '0', 'worker-network-endpoints': 'a:b:10.1.1.1'}
  assert tpu_vm(alone) == tpu_vm({}) == cluster_env.ALONE
  with socket.socket() as deaf:  # bound, and deaf
    deaf.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{deaf.getsockname()[1]}'
    assert tpu_vm({}, {'GCE_METADATA_IP': address}) == cluster_env.ALONE


def test_who_does_not_ask_the_metadata_server(tpu_vm, monkeypatch):
  assert tpu_vm(_POD, _TPU).coordinator_address == 't1k-w-0.svc:20480'
  assert tpu_vm(_POD, {'TPU_SKIP_MDS_QUERY': '1'}) == cluster_env.ALONE
  assert tpu_vm(_POD, _STEP).launcher == 'Slurm'
  monkeypatch.setattr(cluster_env.xla_flags, 'platform', lambda _: 'cpu')
  assert tpu_vm(_POD) == cluster_env.ALONE
  assert not tpu_vm.server.requests


@pytest.mark.parametrize(
  'changes, text',
  [
    ({'tpu-env': _TPU_ENV.format(2)}, 'MEGASCALE_NUM_SLICES=2: expected 1'),
    ({'worker-network-endpoints': 'a:b,c:d'}, "has 'a:b': expected HOST or"),
    ({'agent-worker-number': '2'}, 'TPU_WORKER_ID=2: expected a number from 0'),
  ],
)
def test_what_a_metadata_server_may_not_say(tpu_vm, changes, text):
  builders.assert_refused([text], tpu_vm, {**_POD, **changes})


@pytest.mark.parametrize(
  'address, parts',
  [
    ('node1:61440', ('node1', 61440)),
    ('node1.cluster:1', ('node1.cluster', 1)),
    ('10.0.0.1:65535', ('10.0.0.1', 65535)),
    ('[fd00::3]:99', ('fd00::3', 99)),
    ('[fe80::1%eth0]:99', ('fe80::1%eth0', 99)),
  ],
)
def test_addresses(address, parts):
  assert cluster_env.split_address(address) == parts
  assert _detect({}, address, 2, 0).coordinator_address == address


@pytest.mark.parametrize(
  'nodes, first',
  [
    ('login', 'login'),
    ('node1,node2', 'node1'),
    ('gpu[03-05,9],login', 'gpu03'),
    ('login,gpu[03-05,9]', 'login'),
    ('rack[1-2]n[1-4]', 'rack1n1'),
    ('a[2,4]-ib,b', 'a2-ib'),
    ('dgx-[001-128].pod', 'dgx-001.pod'),
  ],
)
def test_first_of_a_node_list(nodes, first):
  assert launchers.first_host(nodes) == first
