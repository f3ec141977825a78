"""Which offload devices of other processes there are, and which are lost."""

import threading

import pytest

from anp_jax import cluster
from anp_jax.cluster import cluster_env
from anp_jax.runtimes.offload import pool as pool_lib
from tests import builders, splitting


class _Processes:
  """Process 0's view of other processes, which a test plays.

  Attributes:
    sent: (rank, value) of all mail.
  """

  index, env = 0, cluster_env.ALONE._replace(secret=32 * 'a1')

  def __init__(self, *hosts):
    self.hosts, self.count = hosts, len(hosts)
    self.sent, self.phases = [], []
    self.heartbeat_each = self.handling_signals = None
    self._is_open = threading.Event()

  def receive_mail(self, on_mail):
    self._on_mail = on_mail
    self._is_open.set()

  def send(self, rank, value):
    self.sent.append((rank, value))

  def heartbeat(self, phase, step=0):
    self.phases.append(phase)

  def vote(self):
    return 0

  def come(self, rank, address=None):
    """Has a process of host b tell its address, where nobody answers."""
    self._is_open.wait()
    device = {'kind': 'CPU', 'platform': 'cpu', 'target': 'cpu'}
    endpoint = [address or f'127.0.0.1:{rank}', 's']
    self._on_mail(rank, {'endpoint': endpoint, 'host': 'b', 'devices': [device]}, '')

  def go(self, rank, why='gone'):
    self._is_open.wait()
    self._on_mail(rank, None, why)


def _pool(processes, *ranks, address=None, **overrides):
  """A pool that has met some processes."""
  meetings = [threading.Thread(target=processes.come, args=(rank, address)) for rank in ranks]
  for meeting in meetings:
    meeting.start()
  config = splitting.two_convolutions(**{'strategy.offload_to': "('processes',)", **overrides})
  try:
    return pool_lib.DevicePool(config, processes)
  finally:
    for meeting in meetings:
      meeting.join()


def _names(pool):
  return [(device.name, device.is_lost) for device in pool.devices]


def test_devices_are_in_the_order_of_their_processes():
  processes = _Processes('a', 'b', 'b')
  pool = _pool(processes, 2, 1)
  names = 'CPU (rank 1 on b)', 'CPU (rank 2 on b)'
  assert _names(pool) == [(name, False) for name in names]
  assert not pool.news() and processes.phases
  processes.go(1, 'rank 1 on b has gone')
  assert _names(pool) == [(names[0], True), (names[1], False)]
  assert pool.news() == ['rank 1: rank 1 on b has gone']
  assert not pool.news() and not processes.sent


def test_a_process_that_comes_later_or_again_is_left_to_the_next_run():
  processes = _Processes('a', 'b', '')
  pool = _pool(processes, 1)
  processes.come(2)
  assert not pool.news() and processes.sent == [(2, 'late')]
  processes.go(1)
  processes.come(1)
  assert pool.news() == ['rank 1: gone'] and processes.sent[1:] == [(1, 'late')]
  assert _names(pool) == [('CPU (rank 1 on b)', True)]


def test_processes_that_have_not_come_are_not_waited_for():
  processes = _Processes('a', '', 'b', 'b')
  threading.Thread(target=processes.go, args=(3,)).start()
  pool = _pool(processes, 2)
  assert _names(pool) == [('CPU (rank 2 on b)', False)]


def test_an_address_with_a_scheme_is_refused():
  """It could have weights and activations sent without TLS."""
  address = 'grpc://127.0.0.1:1'
  builders.assert_refused([address], lambda: _pool(_Processes('a', 'b'), 1, address=address))


def test_shares_count_on_all_processes():
  processes = _Processes('a', '', 'b')
  words = 'expected 2, of the device that trains and of each offload device'
  builders.assert_refused([words], _pool, processes, 2, **{'strategy.shares': '(1, 1, 1)'})


def test_a_process_that_does_not_answer_is_told():
  processes = _Processes('a', 'b')
  pool = _pool(processes, 1)
  (device,) = pool.devices
  device.lose()
  assert pool.news() == ['rank 1: does not answer']
  assert processes.sent == [(1, 'dropped')]
  assert not pool.news()


def test_those_that_are_there_are_told_of_the_end():
  processes = _Processes('a', 'b', 'b')
  with _pool(processes, 1, 2) as pool:
    processes.go(2)
  assert processes.sent == [(1, 'ended')]
  assert len(pool.devices) == 2


def test_an_error_of_a_device_is_that_of_the_run():
  processes = _Processes('a', 'b')

  def run():
    with _pool(processes, 1) as pool:
      (device,) = pool.devices
      device._device.error = MemoryError('no room')
      raise RuntimeError('a callback failed')

  words = r'offload device CPU \(rank 1 on b\): no room'
  with pytest.raises(cluster.RunFailedError, match=words):
    run()
  assert not processes.sent
