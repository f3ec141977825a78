"""Each process of a run is held up by each cause, and the verdict names it."""

import contextlib
import json
import signal
import time

import pytest

from anp_jax.cluster import joining, lateness, secret
from scripts.bench import _quota
from tests import builders, launching, network_hosts

pytestmark = pytest.mark.multiprocess

_COUNT, _WITHIN = 4, 10.0  # processes, seconds
_CORE = 10  # per cent of a core, for a slow one
_KEYS = {
  'data.source': 'folder',
  'duration': '1000000 steps',
  'schedule.name': 'constant',
  'log.every': '20 steps',
  'checkpoint.every': '60 steps',  # of some 0.25 s: a save takes under a tenth of the time
  'eval.every': '1000000 steps',
  'cluster.heartbeat_timeout': '100',
}
# What each cause is called.
_VERDICTS = {
  'disk': 'is late in input',
  'loader': 'has been waiting for input',
  'save': 'has been saving',
  'core': 'is late in computing',
  'stop': 'has been silent',
  'link': 'is late in the network',
}
_SLOW = 'tbf rate 100kbit burst 2kb latency 500ms'


class _Run:
  """Processes that train, on a host or each on one of its own, and what their coordinator says."""

  def __init__(self, folder, stack, count, host='127.0.0.1', **environment):
    self._workdir, self._trouble = folder / 'run', folder / 'trouble'
    self._trouble.write_text('')
    keys = {**_KEYS, 'data.path': str(builders.photographs(folder / 'tree', 160))}
    environment |= {'ANP_PAUSE': '0.2', 'ANP_TROUBLE': str(self._trouble)}
    place = f'--coordinator={host}:{launching.free_port()}'
    arguments = launching.arguments(self._workdir, place, **keys)
    self.ranks = launching.Ranks(folder, count, arguments, environment=environment)
    stack.callback(self.ranks.end)
    self.wait_until(lambda: '"train"' in self._metrics(), 150)
    key = secret.for_run(str(self._workdir))
    connection = stack.enter_context(joining.connect(str(self._workdir), key, 10, 10))
    self._stream = stack.enter_context(connection.makefile('rw'))

  def _metrics(self):
    path = self._workdir / 'metrics.jsonl'
    return path.read_text() if path.exists() else ''

  def wait_until(self, condition, seconds):
    """Returns the seconds that it took; None if it did not come true."""
    start = time.monotonic()
    while time.monotonic() < start + seconds:
      if condition():
        return time.monotonic() - start
      time.sleep(0.1)
    return None

  def verdict(self):
    self._stream.write('{"ask": "rows"}\n')
    self._stream.flush()
    answer = json.loads(self._stream.readline())
    self.rows = answer['rows']
    return answer['verdict']

  def phases(self):
    self.verdict()
    return [row[1] for row in self.rows]

  def goes_on(self):
    """Whether no trouble before is seen any more."""
    is_free = self.verdict() == lateness.NOBODY or 'wait for the network' in self.verdict()
    return is_free and {*self.phases()} <= {'input', 'step'}

  @contextlib.contextmanager
  def suffers(self, rank, cause):
    pid = self.ranks.processes[rank].pid
    with contextlib.ExitStack() as stack:
      if cause == 'stop':
        self.ranks.processes[rank].send_signal(signal.SIGSTOP)
        stack.callback(self.ranks.processes[rank].send_signal, signal.SIGCONT)
      elif cause == 'core':
        stack.enter_context(_quota.group(_CORE)).write_text(str(pid))
        stack.callback(_quota.outside().write_text, str(pid))
      elif cause == 'link':
        device = f'-n {network_hosts.PREFIX}{rank} qdisc {{}} dev eth0 root'
        network_hosts.call(f'tc {device.format("add")} {_SLOW}')
        stack.callback(network_hosts.call, f'tc {device.format("del")}')
      else:
        self._trouble.write_text(f'{rank} {cause}')
        stack.callback(self._trouble.write_text, '')
      yield


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  with contextlib.ExitStack() as stack:
    host = stack.enter_context(network_hosts.open_hosts(_COUNT))
    prefix = network_hosts.PREFIX
    yield _Run(tmp_path_factory.mktemp('late'), stack, _COUNT, host, ANP_HOSTS=prefix)


# The coordinator of rank 0 cannot tell that it is stopped itself.
_CASES = [
  (cause, rank) for cause in _VERDICTS for rank in range(_COUNT) if (cause, rank) != ('stop', 0)
]


def _is_right(text, rank, cause):
  return text.startswith(f'rank {rank} on ') and _VERDICTS[cause] in text


def test_a_dead_loader_is_named(tmp_path):
  with contextlib.ExitStack() as stack:
    run = _Run(tmp_path, stack, 2)
    with run.suffers(1, 'loader'):
      assert run.wait_until(lambda: _is_right(run.verdict(), 1, 'loader'), 60), run.verdict()
    assert run.wait_until(lambda: not _is_right(run.verdict(), 1, 'loader'), 60), run.verdict()


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize('cause, rank', _CASES)
def test_the_verdict_names_rank_and_cause(run, cause, rank):
  """Within seconds, and no other process for long enough that it is logged."""
  assert run.wait_until(run.goes_on, 60), run.verdict()
  logged = []
  judge = lateness.Judge(logged.append)

  def is_right(text):
    return _is_right(text, rank, cause)

  def look():
    text = run.verdict()
    judge.look([lateness.Row(*row) for row in run.rows], time.monotonic())
    return is_right(text)

  with run.suffers(rank, cause):
    if cause == 'save':  # it holds the others up once the next one is due
      assert run.wait_until(lambda: 'committing' in run.phases(), 90)
    seconds = run.wait_until(look, 3 * _WITHIN)
    run.wait_until(lambda: look() and any(map(is_right, logged)), _WITHIN)
  print(f'{cause}, rank {rank}: {seconds} s; {logged}')
  assert seconds and seconds < _WITHIN
  assert [text for text in logged if is_right(text)]
  assert all(text.startswith((f'rank {rank} on ', lateness.NOBODY)) for text in logged)
