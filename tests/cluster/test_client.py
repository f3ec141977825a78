"""Processes meet at process 0's hub, hear of each other and end together."""

import asyncio
import contextlib
import json
import linecache
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.cluster import client as link_lib
from anp_jax.cluster import cluster_env
from anp_jax.cluster import coordinator as hub_lib
from anp_jax.system import xla_flags

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_links = []
_SOON = 10  # seconds: until a test fails that waits for nothing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  """All waits but those under test are short."""
  for module, name, seconds in (
    (hub_lib, 'PULSE', 0.05),
    (hub_lib, 'SAY_EVERY', 0.1),
    (hub_lib, '_HEAR_ALL', 0.1),
    (hub_lib, '_SEE_LOSS', 0.3),
    (link_lib, '_RETRY', 0.02),
  ):
    monkeypatch.setattr(module, name, seconds)
  yield
  while _links:  # their threads end
    link = _links.pop()
    link._over = (0, '')
    with contextlib.suppress(OSError):
      link._socket.shutdown(socket.SHUT_RDWR)


def _card(index, count, values):
  return {
    'index': index, 'count': count, 'token': 'job', 'host': f'node{index}',
    'local_index': 0, 'platform': 'cpu', 'problem': '', 'gpus': [],
    'loopback': '', 'versions': {'jax': '1'}, 'code': '', 'config': {},
    'command': {}, **values,
  }  # fmt: skip


def _free_port():
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


class _Clock:
  """A hub's time, which only a test moves."""

  def __init__(self):
    self._now = 1000.0
    self._sleepers = []

  def __call__(self):
    return self._now

  async def sleep(self, seconds):
    loop = asyncio.get_running_loop()
    waking = loop.create_future()
    self._sleepers.append((self._now + seconds, loop, waking))
    await waking

  def move(self, seconds):
    _wait(lambda: self._sleepers)  # the hub has seen the move before
    self._now += seconds
    for sleeper in self._sleepers[:]:
      end, loop, waking = sleeper
      if end <= self._now:
        self._sleepers.remove(sleeper)
        loop.call_soon_threadsafe(waking.set_result, None)


class _Run:
  """A hub and its links, each made in a thread of its own."""

  def __init__(
    self, count, rendezvous=_SOON, heartbeat=_SOON, leave=_SOON, clock=None
  ):
    self.count = count
    self.clock = clock
    self.said = []
    self.links, self.errors, self.ended = {}, {}, {}
    self.port = _free_port()
    self._threads = []
    self.hub = hub_lib.Coordinator(
      self.port, count, 'job', rendezvous_timeout=rendezvous,
      heartbeat_timeout=heartbeat, leave_timeout=leave, say=self.said.append,
      **({'clock': clock, 'sleep': clock.sleep} if clock else {}),
    )  # fmt: skip

  def join(self, *indices, **values):
    """Begins to connect these ranks."""
    for index in indices:
      thread = threading.Thread(target=self._join, args=(index, values))
      thread.start()
      self._threads.append(thread)
    return self

  def started(self):
    """Waits until the ranks that were begun are in, or refused."""
    for thread in self._threads:
      thread.join(_SOON)
      assert not thread.is_alive()
    return self

  def _join(self, index, values):
    env = cluster_env.ClusterEnv(
      'flags', index, self.count, f'127.0.0.1:{self.port}', token='job'
    )
    settings = types.SimpleNamespace(
      rendezvous_timeout=_SOON, heartbeat_timeout=_SOON
    )

    def leave(code, text, stacks):
      self.ended[index] = (code, text, stacks)

    card = _card(index, self.count, values)
    try:
      link = link_lib.CoordinatorClient(env, card, settings, leave)
      self.links[index] = link
      _links.append(link)
    except (config_lib.ConfigError, link_lib.Lost) as e:
      self.errors[index] = e

  def raw(self, text):
    """A connection that sends bytes, and then only what a test sends."""
    connection = socket.create_connection(('127.0.0.1', self.port), _SOON)
    connection.sendall(text)
    return connection

  def raw_rank(self, index, **values):
    card = json.dumps(_card(index, self.count, values))
    return self.raw(card.encode() + b'\n')

  def pulse(self, count, silent=()):
    """Moves the clock by some pulses; all ranks but the silent answer each."""
    for _ in range(count):
      self.clock.move(hub_lib.PULSE)
      _wait(lambda: self.ended or self._are_heard(silent))

  def _are_heard(self, silent):
    members = self.hub._members.items()
    return all(m.heard == self.clock() for i, m in members if i not in silent)

  def wait_for_end(self, *indices):
    """What each of these ranks was told when it had to end."""
    _wait(lambda: set(indices) <= self.ended.keys())
    return [self.ended[i] for i in indices]


def _wait(condition):
  deadline = time.monotonic() + _SOON
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def _started(count, **values):
  run = _Run(count, **values).join(*range(count)).started()
  assert not run.errors
  return run


def _at_once(calls):
  threads = [threading.Thread(target=c) for c in calls]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_SOON)
    assert not thread.is_alive()


@pytest.mark.parametrize('count', [1, 3, 128])
def test_all_start_gather_and_leave(count):
  run = _started(count)
  hosts = tuple(f'node{i}' for i in range(count))
  assert all(link.hosts == hosts for link in run.links.values())
  assert len({link.port for link in run.links.values()}) == 1
  found = {}

  def gather(index):
    link = run.links[index]
    found[index] = [link.gather({'rank': index}), link.gather(index == 0)]
    link.close()

  _at_once([lambda i=i: gather(i) for i in range(count)])
  want = [[{'rank': i} for i in range(count)], [i == 0 for i in range(count)]]
  assert found == {i: want for i in range(count)}
  time.sleep(0.2)
  assert not run.ended


def test_each_is_told_which_gpus_are_its_own():
  run = _Run(2)
  values = {'host': 'a', 'platform': 'gpu', 'gpus': ['x', 'y']}
  run.join(0, 1, **values).started()
  assert [run.links[i].devices for i in range(2)] == [[0], [1]]


@pytest.mark.parametrize(
  'odd, text',
  [
    (
      {'versions': {'jax': '2'}},
      'rank 1 on node1 has jax 2, but rank 0 on node0 has 1',
    ),
    ({'count': 4}, 'rank 1 on node1 expects 4 processes, rank 0 3'),
    ({'index': 7}, 'rank 7 on node1 is none of 3'),
    ({'index': 2}, 'rank 2 came twice: from node'),
  ],
)
def test_one_that_does_not_go_with_the_others_stops_all(odd, text):
  run = _Run(3).join(0, 2)
  _wait(lambda: len(run.hub._members) == 2)
  run.join(1, **odd).started()
  assert run.errors.keys() == {0, 1, 2}
  for error in run.errors.values():
    assert isinstance(error, config_lib.ConfigError)
    assert str(error).startswith(text)


@pytest.mark.parametrize('token', ['other', 'jobs', 'jo', 'joc', 'JOB', ''])
def test_one_of_another_job_is_sent_away_alone(token):
  run = _Run(2)
  run.join(1, token=token).started()
  text = 'rank 1 on node1 belongs to another job than rank 0'
  assert str(run.errors.pop(1)) == text
  run.join(0, 1).started()
  assert not run.errors


def test_a_missing_rank_is_named_while_waiting_and_after():
  run = _Run(3, rendezvous=9, clock=_Clock()).join(0, 2)
  _wait(lambda: len(run.hub._members) == 2)
  run.clock.move(3)
  _wait(lambda: run.said)
  assert run.said == [
    'waiting: rank 1 has not come yet (2 of 3 are here); 6 s left'
  ]
  run.clock.move(6.5)
  run.started()
  for index in (0, 2):
    assert isinstance(run.errors[index], link_lib.Lost)
    text = 'rank 1 has not come within 9 s (2 of 3 are here)'
    assert str(run.errors[index]).startswith(text)
  # One that comes now hears the same.
  run.join(1).started()
  assert str(run.errors[1]) == str(run.errors[0])


def test_many_missing_ranks_are_counted():
  run = _Run(64, rendezvous=9, clock=_Clock()).join(0)
  _wait(lambda: run.hub._members)
  run.clock.move(9.5)
  run.started()
  assert 'rank 7, rank 8 and 55 more have not come' in str(run.errors[0])


def test_nobody_at_the_coordinator(capsys):
  env = cluster_env.ClusterEnv('flags', 1, 2, f'127.0.0.1:{_free_port()}')
  settings = types.SimpleNamespace(rendezvous_timeout=0.5)
  with pytest.raises(link_lib.Lost) as caught:
    link_lib.CoordinatorClient(env, {}, settings)
  text = str(caught.value)
  assert (
    f'no answer from rank 0 at {env.coordinator_address} within 0.5 s' in text
  )
  assert f'rank 1 on {socket.gethostname()}' in text
  assert 'a loopback address reaches this host only' in text
  # And meanwhile.
  out = capsys.readouterr().out
  assert f'waiting: rank 0 at {env.coordinator_address} does not answer' in out
  assert ' yet; 0 s left' in out


def test_a_coordinator_that_does_not_resolve(monkeypatch):
  monkeypatch.setattr(link_lib, '_RESOLVES_WITHIN', 0.1)
  env = cluster_env.ClusterEnv('flags', 1, 2, 'no-such-host.invalid:99')
  with pytest.raises(config_lib.ConfigError) as caught:
    link_lib.CoordinatorClient(env, {}, None)
  text = "coordinator 'no-such-host.invalid:99' does not resolve on "
  assert str(caught.value).startswith(text + socket.gethostname())


def test_a_coordinator_that_resolves_late(monkeypatch):
  """A pod of Kubernetes has a name once it has started."""
  left = [socket.EAI_NONAME, socket.EAI_AGAIN]
  ask = socket.getaddrinfo

  def late(host, port, *more, **values):
    if left:
      raise socket.gaierror(left.pop(), 'not yet')
    return ask(host, port, *more, **values)

  monkeypatch.setattr(socket, 'getaddrinfo', late)
  run = _Run(1).join(0).started()
  assert not run.errors and not left


def test_a_rank_that_goes_while_waiting_may_come_again():
  run = _Run(2)
  run.raw_rank(1).close()
  _wait(lambda: not run.hub._members)
  run.join(0, 1).started()
  assert not run.errors


def test_a_dead_rank_ends_the_others():
  run = _Run(3).join(0, 2)
  with run.raw_rank(1):
    run.started()
  end = (75, 'rank 1 on node1 has gone: its process was ended, or its host')
  for told in run.wait_for_end(0, 2):
    assert told == (*end, False)


def test_a_silent_rank_ends_the_others():
  run = _Run(3, heartbeat=50.5 * hub_lib.PULSE, clock=_Clock()).join(0, 2)
  with run.raw_rank(1):
    run.started().pulse(50, silent=[1])
    assert not run.ended
    run.clock.move(hub_lib.PULSE)
    for code, text, _ in run.wait_for_end(0, 2):
      assert code == 75
      assert text.startswith('rank 1 on node1 has been silent for 3 s')


def test_a_rank_that_falls_silent_after_its_beats_ends_the_others():
  run = _Run(3, heartbeat=50.5 * hub_lib.PULSE, clock=_Clock()).join(0, 2)
  with run.raw_rank(1) as rank:
    run.started()
    for step in (1, 2):
      rank.sendall(json.dumps({'beat': _at('step', step)}).encode() + b'\n')
    _wait(lambda: run.hub._members[1].state.get('step') == 2)
    run.pulse(50, silent=[1])
    assert not run.ended
    run.clock.move(hub_lib.PULSE)
    for code, text, _ in run.wait_for_end(0, 2):
      assert code == 75
      assert text.startswith('rank 1 on node1 has been silent for 3 s')


def test_a_rank_that_only_waits_is_not_silent():
  """While JAX is imported and started nothing beats; it may take a minute."""
  run = _started(2, heartbeat=4.5 * hub_lib.PULSE, clock=_Clock())
  run.pulse(20)
  assert not run.ended


def test_a_pause_of_process_0_is_no_silence_of_the_others():
  run = _started(2, heartbeat=9.5 * hub_lib.PULSE, clock=_Clock())
  run.pulse(2)
  run.clock.move(1000)  # until the next pulse
  run.pulse(20)
  assert not run.ended


def test_process_0_is_told_last(monkeypatch):
  """It ends on being told, and the hub with it."""
  told, send = [], hub_lib._send

  def noted(writer, message):
    if 'end' in message:
      told.append(writer.get_extra_info('peername')[1])
    send(writer, message)

  monkeypatch.setattr(hub_lib, '_send', noted)
  run = _Run(3)
  with run.raw_rank(0) as zero, run.raw_rank(2) as two:
    _wait(lambda: len(run.hub._members) == 2)
    with run.raw_rank(1, count=4) as other:
      ports = [c.getsockname()[1] for c in (zero, two, other)]
      # The hub of a test before this one may have something to tell, too.
      _wait(lambda: set(ports) <= set(told))
    assert [port for port in told if port in ports][-1] == ports[0]


_OTHER = """
import json
import sys
import time
import types
from anp_jax.cluster import client
from anp_jax.cluster import cluster_env

card = json.loads(sys.argv[1])
env = cluster_env.ClusterEnv('flags', 1, 2, sys.argv[2])
settings = types.SimpleNamespace(rendezvous_timeout=9, heartbeat_timeout=9)
line = client.CoordinatorClient(env, card, settings)
time.sleep(0.5)
print(line.gather('one'), flush=True)
line.close()
"""


def test_a_process_that_is_stopped_for_a_moment_goes_on():
  run = _Run(2, heartbeat=60.5 * hub_lib.PULSE, clock=_Clock()).join(0)
  arguments = [json.dumps(_card(1, 2, {})), f'127.0.0.1:{run.port}']
  with subprocess.Popen(
    [sys.executable, '-c', _OTHER, *arguments], stdout=subprocess.PIPE,
    text=True, cwd=_ROOT, env={**os.environ, 'PYTHONPATH': '.'},
  ) as other:  # fmt: skip
    try:
      run.started()
      other.send_signal(signal.SIGSTOP)
      run.pulse(20, silent=[1])
      other.send_signal(signal.SIGCONT)
      assert run.links[0].gather('zero') == ['zero', 'one']
      run.links[0].close()
      assert other.wait(_SOON) == 0
    finally:
      other.kill()
  assert not run.ended


class _FakeHub:
  """Process 0's side of one connection, in the test's hands."""

  def __init__(self):
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.port = self._listener.getsockname()[1]

  def meet(self):
    with self._listener:
      self.connection, _ = self._listener.accept()
    self.connection.makefile('rb').readline()
    self.say({'go': {'port': 1, 'devices': None, 'hosts': ['node0', 'node1']}})

  def say(self, message):
    self.connection.sendall(json.dumps(message).encode() + b'\n')


@pytest.fixture
def lonely(request):
  """A link to a hub in the test's hands, and what the link was told."""
  hub, told = _FakeHub(), []
  env = cluster_env.ClusterEnv('flags', 1, 2, f'127.0.0.1:{hub.port}')
  settings = types.SimpleNamespace(
    rendezvous_timeout=_SOON,
    heartbeat_timeout=getattr(request, 'param', _SOON),
  )
  thread = threading.Thread(target=hub.meet)
  thread.start()
  link = link_lib.CoordinatorClient(
    env, {}, settings, lambda *told_: told.append(told_)
  )
  thread.join()
  yield hub, link, told
  hub.connection.close()


@pytest.mark.parametrize('lonely', [0.3], indirect=True)
def test_a_silent_process_0(lonely):
  hub, link, told = lonely
  _wait(lambda: told)
  ((code, text, _),) = told
  assert code == 75
  assert text.startswith('rank 0 on node0 has been silent for 0.3 s')


def test_a_dead_process_0(lonely):
  hub, link, told = lonely
  hub.connection.shutdown(socket.SHUT_RDWR)
  _wait(lambda: told)
  assert told[0][:2] == (
    75, 'rank 0 on node0 has gone: its process was ended, or its host',
  )  # fmt: skip


def test_process_0_may_go_once_all_have_come_to_the_end(lonely):
  """Though the main thread here has not yet read that they have."""
  hub, link, told = lonely
  hub.say({'gathered': ['leave', [0, 0]]})
  hub.connection.shutdown(socket.SHUT_RDWR)
  link.close()
  time.sleep(0.2)
  assert not told


def test_process_0_that_goes_before_all_came():
  hub = _FakeHub()
  hub.say = lambda message: hub.connection.shutdown(socket.SHUT_RDWR)
  thread = threading.Thread(target=hub.meet)
  thread.start()
  env = cluster_env.ClusterEnv('flags', 1, 2, f'127.0.0.1:{hub.port}')
  settings = types.SimpleNamespace(rendezvous_timeout=_SOON)
  with pytest.raises(link_lib.Lost, match='has gone before all came'):
    link_lib.CoordinatorClient(env, {}, settings)
  thread.join()


def _at(phase, step):
  return {'phase': phase, 'step': step, 'seconds': 130.0}


@pytest.mark.parametrize(
  'states, late',
  [
    ([_at('step', 9), _at('input', 9), _at('step', 9)], 'rank 1 on node1 is'),
    ([_at('step', 9), _at('step', 8), _at('step', 9)], 'rank 1 on node1 is'),
    (
      [_at('input', 9), _at('saving', 8), _at('saving', 8)],
      'rank 1 on node1, rank 2 on node2 are',
    ),
    (
      [_at('saving', 8), _at('evaluating', 8), _at('saving', 8)],
      'rank 1 on node1 is',
    ),
    (
      [_at('leaving', 9), _at('saving', 9), _at('leaving', 9)],
      'rank 1 on node1 is',
    ),
    (
      [_at('step', 1), _at('compiling', 0), _at('step', 1)],
      'rank 1 on node1 is',
    ),
    (
      [_at('joining', 0), _at('loading', 0), _at('opening', 0)],
      'rank 1 on node1 is',
    ),
    (
      [_at('starting', 0), _at('comparing', 0), _at('starting', 0)],
      'rank 1 on node1 is',
    ),
    ([_at('loading', 0), None, _at('loading', 0)], 'rank 1 on node1 is'),
    ([_at('step', 9)] * 3, 'all ranks are equally'),
    ([_at('step', 9), None, _at('step', 9)], 'rank 1 on node1 is'),
  ],
)
def test_a_stall_names_who_is_late(states, late):
  run = _Run(3, clock=_Clock())
  for index in (2, 1, 0):
    run.join(index)
    _wait(lambda there=3 - index: len(run.hub._members) == there)
  run.started()
  for index, state in enumerate(states):
    if state:
      run.links[index].heartbeat(state)
  _wait(lambda: [run.hub._members[i].state or None for i in range(3)] == states)
  run.links[0].stalled()
  _wait(lambda: run.hub._tasks)
  run.clock.move(hub_lib._HEAR_ALL)
  told = run.wait_for_end(0, 1, 2)
  assert len(set(told)) == 1
  code, text, stacks = told[0]
  assert code == 75 and stacks
  assert text.startswith(f'nothing has moved for 130 s: {late} late (rank: ')
  assert f'0: {states[0]["phase"]} {states[0]["step"] or ""}'.strip() in text


def test_a_failure_ends_all_with_its_status():
  run = _started(3)
  run.links[1].fail(2, 'config.mesh does not fit')
  assert run.links[1]._over  # not for want of an answer
  text = 'rank 1 on node1: config.mesh does not fit'
  assert set(run.wait_for_end(0, 1, 2)) == {(2, text, False)}


def test_an_error_ends_all_with_its_text():
  run = _started(2)
  run.links[0].fail(1, 'ValueError: no')
  text = 'rank 0 on node0: ValueError: no'
  assert set(run.wait_for_end(0, 1)) == {(1, text, False)}


def test_an_error_that_follows_from_a_loss_does_not_hide_it():
  """A collective fails at once; the dead rank is seen a moment later."""
  run = _Run(3, clock=_Clock()).join(0, 2)
  with run.raw_rank(1):
    run.started().links[2]._send({'fail': [1, 'ValueError: Gloo failed']})
    _wait(lambda: run.hub._tasks)
  for code, text, _ in run.wait_for_end(0, 2):
    assert code == 75 and text.startswith('rank 1 on node1 has gone')


def test_one_that_does_not_come_to_the_end_is_named():
  run = _started(3, leave=9, clock=_Clock())
  run.links[1].heartbeat(_at('saving', 8))
  _wait(lambda: run.hub._members[1].state)
  for index in (0, 2):
    threading.Thread(target=run.links[index].close, daemon=True).start()
  _wait(lambda: len(run.hub._gathered.get(hub_lib.LEAVE, {})) == 2)
  run.clock.move(9.5)
  for code, text, _ in run.wait_for_end(0, 1, 2):
    assert code == 75
    assert text.startswith(
      'rank 1 on node1 has not come to the end within 9 s of the others'
    )
    assert '1: saving 8' in text


def test_without_any_bound_the_end_is_still_waited_for(monkeypatch, config):
  seen = {}
  monkeypatch.setattr(
    hub_lib, 'Coordinator', lambda *a, **values: seen.update(values)
  )
  config.cluster.stall_timeout = config.cluster.stop_timeout = 0.0
  cluster._open_hub(
    cluster_env.ClusterEnv(coordinator_address='a:1'), config.cluster
  )
  assert seen['leave_timeout'] == config.cluster.rendezvous_timeout


@pytest.mark.parametrize(
  'rubbish',
  [
    b'',
    b'GET / HTTP/1.1\r\nHost: node0\r\n\r\n',
    b'\x16\x03\x01\x02\x00\xff\n',
    b'\n',
    b'{}\n',
    b'[]\n',
    b'{"index": 1}\n',
    b'{"index": [1], "token": "", "count": 2, "host": "x"}\n',
    b'[' * 200_000 + b'\n',
    b'x' * (hub_lib._MOST + 2**20),
  ],
)
def test_rubbish_on_the_port_harms_nothing(rubbish, caplog):
  run = _Run(2)

  def throw():
    try:
      run.raw(rubbish).close()
    except OSError:  # the hub has hung up
      pass

  throw()
  run.join(0, 1).started()
  throw()
  found = []
  _at_once([lambda i=i: found.append(run.links[i].gather(i)) for i in (0, 1)])
  assert found == [[0, 1]] * 2
  assert not run.errors and not run.ended and not caplog.records


def test_a_stranger_does_not_end_a_run_that_goes_on():
  """A second start by hand, at the port of the first."""
  run = _started(2)
  with run.raw_rank(1, host='node7') as stranger:
    told = json.loads(stranger.makefile('rb').readline())
  code, text = told['end']
  assert code == 2 and text.startswith('rank 1 on node7 found a run that has')
  found = []
  _at_once([lambda i=i: found.append(run.links[i].gather(i)) for i in (0, 1)])
  assert found == [[0, 1]] * 2 and not run.ended


def test_a_port_that_is_taken(config):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    env = cluster_env.ClusterEnv('flags', 0, 2, f'127.0.0.1:{port}')
    text = f'rank 0 cannot open port {port}'
    with pytest.raises(config_lib.ConfigError, match=text):
      cluster._open_hub(env, config.cluster)


class _Gone(Exception):
  pass


@pytest.fixture
def starting(monkeypatch, config):
  """Starts rank 1 of 2 with these errors of JAX; returns what it told."""
  told = []

  class Link:
    hosts = ('node0', 'node1')

    def __init__(self, *_):
      pass

    def heartbeat(self, state):
      pass

    def fail(self, code, text):
      told.append((code, text))

  def end(code, text):
    raise _Gone(code, text)

  def start(error):
    def fail(*_):
      raise error

    monkeypatch.setattr(cluster, '_start_jax', fail)
    with pytest.raises(_Gone):
      cluster.start(config, cluster_env.ClusterEnv('flags', 1, 2, 'node0:99'))
    return told.pop()

  monkeypatch.setattr(link_lib, 'CoordinatorClient', Link)
  monkeypatch.setattr(link_lib, 'end_process', end)
  monkeypatch.setattr(cluster.log_prefix, 'install', lambda mark: None)
  return start


def test_an_error_while_jax_starts_ends_all(starting, capsys):
  """Else JAX's own exit handler would wait for the others, and they for it."""
  error = RuntimeError('CUDA_ERROR_NO_DEVICE: no\nmore')
  assert starting(error) == (1, 'RuntimeError: CUDA_ERROR_NO_DEVICE: no')
  assert 'Traceback' in capsys.readouterr().err
  assert starting(config_lib.ConfigError('devices')) == (2, 'devices')
  assert 'Traceback' not in capsys.readouterr().err


def test_without_nvidias_tool_a_start_says_what_is_not_checked(
  starting, monkeypatch, capsys
):
  says = 'nvidia-smi lists no GPU here: none can be told to be shared\n'
  monkeypatch.setattr(xla_flags, 'platform', lambda environment=None: 'gpu')
  for found, want in (([], says), (['GPU-1a2b'], '')):
    monkeypatch.setattr(
      cluster.process_info, 'gpus', lambda _, found=found: found
    )
    starting(cluster.Failed('enough'))
    assert capsys.readouterr().out == want


def test_one_process_is_told_of_gpus_that_jax_does_not_see(monkeypatch, config):
  """In a batch shell too, where no step says that this is Slurm."""
  monkeypatch.setattr(
    cluster.process_info, 'startup_problem', lambda: 'no driver'
  )
  with pytest.raises(config_lib.ConfigError, match='no driver'):
    cluster.start(config, cluster_env.ALONE)


@pytest.mark.parametrize('name', ['gpu', 'tpu'])
def test_an_accelerator_that_jax_drops_is_refused(monkeypatch, config, name):
  """It warns of a plug-in that fails, and computes on the CPU."""
  monkeypatch.setattr(xla_flags, 'platform', lambda environment=None: name)
  with pytest.raises(
    config_lib.ConfigError, match=f'has a {name}, but JAX computes on cpu'
  ):
    cluster.start(config, cluster_env.ALONE)


@pytest.mark.parametrize('dedicated', [False, True])
@pytest.mark.parametrize('rank', [0, 1])
def test_a_worker_whose_accelerator_jax_drops_is_refused(
  monkeypatch, config, dedicated, rank
):
  """But not a server that does nothing else: it may be on the CPU."""
  monkeypatch.setattr(xla_flags, 'platform', lambda environment=None: 'gpu')
  monkeypatch.setattr(cluster.log_prefix, 'install', lambda text: None)
  config.strategy.name, config.strategy.dedicated = 'server', dedicated
  env = cluster_env.ALONE._replace(count=2, index=rank)

  def start():
    return cluster.start(config, env, {'--mode': 'train'})

  if dedicated and not rank:
    assert start().index == rank
  else:
    with pytest.raises(config_lib.ConfigError, match='computes on cpu'):
      start()


@pytest.mark.parametrize(
  'error, status',
  [
    (config_lib.ConfigError('a\nb'), (2, 'a')),
    (link_lib.Lost('rank 1 has gone'), (75, 'rank 1 has gone')),
    (cluster.Failed('not finite'), (1, 'not finite')),
    (ValueError('a\nb'), (1, 'ValueError: a')),
    (KeyError(), (1, 'KeyError: ')),
    (KeyboardInterrupt(), (130, 'interrupted')),
  ],
)
def test_exit_status(error, status):
  assert cluster.exit_status(error) == status


def test_stacks_of_all_threads(monkeypatch, capsys):
  """Without a look at a file: the file system may be what hangs."""
  monkeypatch.setattr(linecache, 'checkcache', pytest.fail)
  monkeypatch.setattr(linecache, 'getlines', pytest.fail)
  done = threading.Event()

  def waits_for_data():
    done.wait(_SOON)

  thread = threading.Thread(target=waits_for_data, name='feed')
  thread.start()
  link_lib.print_stacks()
  done.set()
  thread.join()
  text = capsys.readouterr().err
  feed = text[text.index('thread feed:') :].split('\n\n')[0]
  assert re.search(r'test_client.py", line \d+, in .*waits_for_d', feed)
  # The innermost call is last.
  assert feed.index('waits_for_data') < feed.rindex('wait')
  assert 'thread MainThread:' in text


_STUCK = """
import threading
from anp_jax.cluster import client
client._LAST_WORDS = 0.5

def leave():
  client.end_process(75, 'rank 1 has gone')

threading.Timer(0.5, leave).start()
print('x' * 2**24)
"""


def test_a_process_with_a_stuck_output_ends_too():
  environment = {**os.environ, 'PYTHONPATH': '.'}
  environment.pop('PYTHONUNBUFFERED', None)  # nothing to get stuck in
  child = subprocess.Popen(
    [sys.executable, '-c', _STUCK], stdout=subprocess.PIPE,
    stderr=subprocess.PIPE, cwd=_ROOT, env=environment,
  )  # fmt: skip
  with child:
    try:
      assert child.wait(_SOON) == 75
      assert child.stderr.read() == b'error: rank 1 has gone\n'
    finally:
      child.kill()
