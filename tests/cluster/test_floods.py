"""Connections of strangers, by the thousand, take nothing from a run."""

import contextlib
import pathlib
import socket

import pytest

from anp_jax.cluster import handshake
from anp_jax.system import descriptors
from tests import coordinating, launching

_COORDINATOR = """
import resource, sys
from anp_jax import config
from anp_jax.cluster import cluster_env, coordinator

limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
env = cluster_env.ClusterEnv(
  'flags', 0, 2, f'127.0.0.1:{sys.argv[1]}', token='job', secret=sys.argv[2]
)
coordinator.Coordinator(env, config.base().cluster)
print('open', flush=True)
for line in sys.stdin:  # as a checkpoint would
  open('/dev/null').close()
  print('opened', flush=True)
"""


@pytest.fixture(scope='module')
def other():
  """A process 0 with 256 descriptors, and its port."""
  descriptors.raise_limit()  # this process holds the other ends
  port = launching.free_port()
  with launching.start('-c', _COORDINATOR, port, coordinating.SECRET, 256) as process:
    process.hears('open')
    yield process, port


def _opens_a_file(process):
  print(file=process.stdin, flush=True)
  lines = iter(process.stdout.readline, '')
  return 'opened\n' in (line for line in lines if 'connection from' not in line)


def _megabytes(process):
  status = pathlib.Path(f'/proc/{process.pid}/status').read_text()
  return int(status.split('VmRSS:')[1].split()[0]) / 1024


def test_idle_connections_do_not_use_up_the_descriptors(other):
  process, port = other
  with contextlib.ExitStack() as stack:
    for _ in range(1100):
      connection = socket.create_connection(('127.0.0.1', port))
      stack.enter_context(connection)
    # A process of the run comes through, as the oldest are closed for it.
    with socket.create_connection(('127.0.0.1', port)) as connection:
      assert coordinating.introduce(connection)
    assert _opens_a_file(process)
    # Unproved, the run's, its own; it may still be closing the oldest.
    folder = pathlib.Path(f'/proc/{process.pid}/fd')
    launching.wait_until(
      lambda: len(list(folder.iterdir())) <= 64 + 2 + 20, 20, lambda: list(folder.iterdir())
    )


def test_long_lines_of_strangers_are_not_kept(other):
  process, port = other
  before = _megabytes(process)
  with contextlib.ExitStack() as stack:
    for _ in range(60):
      connection = socket.create_connection(('127.0.0.1', port))
      stack.enter_context(connection)
      connection.settimeout(1)
      with contextlib.suppress(OSError):  # it hangs up
        connection.sendall(b'x' * 4_000_000)
    with socket.create_connection(('127.0.0.1', port)) as connection:
      assert coordinating.introduce(connection)
    assert _megabytes(process) - before < 20


def test_one_that_says_nothing_is_sent_away(monkeypatch):
  monkeypatch.setattr(handshake, 'WITHIN', 0.3)
  run = coordinating.Run(2)
  with run.raw(b'') as connection:
    connection.settimeout(coordinating.SOON)
    lines = connection.makefile('rb')
    assert len(lines.readline()) == 65
    assert lines.read() == b''
  run.join(0, 1).started()
  assert not run.errors


def test_the_limit_on_descriptors_is_raised():
  code = (
    'import resource\nfrom anp_jax.system import descriptors\n'
    'resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n'
    'descriptors.raise_limit()\n'
    'print(resource.getrlimit(resource.RLIMIT_NOFILE))'
  )
  assert launching.python('-c', code).stdout == '(200, 200)\n'
