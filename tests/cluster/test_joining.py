"""A process joins a run: its place there, and the runs that take nobody."""

from concurrent import futures
import json
import socket
import time
import types
from unittest import mock

import pytest

from anp_jax import __main__ as main, cluster
from anp_jax.cluster import cluster_env, coordinator, generation, joining
from tests import builders, launching

_ALONE = cluster_env.ALONE
_THIRD = cluster_env.ClusterEnv('Slurm', 2, 3, 'node1:20480', token='7.0.0')


def _dead():
  """An address of this host at which nobody listens."""
  return '127.0.0.1', launching.free_port()


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path)


def test_a_newcomer_gets_the_first_free_rank(workdir):
  with socket.create_server(('127.0.0.1', 0)) as listening:
    addresses = dict.fromkeys((0, 1), _dead()) | {3: listening.getsockname()}
    joining.write(workdir, addresses)
    for place in (_ALONE, _THIRD):
      assert joining.newcomer(workdir, place) == cluster_env.ClusterEnv('join', 2, 4)
    assert joining.read_addresses(workdir) == addresses


@pytest.mark.parametrize('error, is_alone', [(ConnectionRefusedError, True), (TimeoutError, False)])
def test_of_a_run_without_a_process_it_is_the_launchers(workdir, monkeypatch, error, is_alone):
  """A host that does not answer may only be slow."""
  monkeypatch.setattr(joining.socket, 'create_connection', mock.Mock(side_effect=error))
  joining.write(workdir, {0: _dead(), 1: _dead()})
  want = _THIRD._replace(launcher='join') if is_alone else cluster_env.ClusterEnv('join', 2, 3)
  assert joining.newcomer(workdir, _THIRD) == want
  assert bool(joining.read_addresses(workdir)) != is_alone


def test_a_lone_process_takes_no_run_over(workdir):
  joining.write(workdir, {0: _dead(), 1: _dead()})
  lone = cluster_env.ClusterEnv('Slurm', num_hosts=1, local_index=0)
  assert joining.newcomer(workdir, lone) == cluster_env.ClusterEnv('join', 2, 3)
  assert len(joining.read_addresses(workdir)) == 2


def test_who_looks_for_a_process_reads_its_challenge(workdir):
  """Else the connection is reset, as by a stranger, of whom the run would write a line."""

  def served(listening):
    connection, _ = listening.accept()
    with connection:
      connection.sendall(b'0' * 64 + b'\n')
      time.sleep(0.1)  # in which a reset would come
      connection.sendall(b'\n')
      return connection.recv(1)

  with socket.create_server(('127.0.0.1', 0)) as listening, futures.ThreadPoolExecutor() as pool:
    joining.write(workdir, {0: listening.getsockname()})
    end = pool.submit(served, listening)
    assert joining.newcomer(workdir, _THIRD) == cluster_env.ClusterEnv('join', 1, 2)
    assert end.result(10) == b''


def test_before_the_run_has_begun_it_is_the_launchers(workdir):
  """The others still wait for a process that was lost so early, maybe for more epochs."""
  assert joining.newcomer(workdir, _THIRD) == _THIRD._replace(launcher='join')
  joining.write(workdir, {}, ended='node1:20481')  # the end of a run that met elsewhere
  assert joining.newcomer(workdir, _THIRD) == _THIRD._replace(launcher='join')
  joining.write(workdir, {})
  lone = cluster_env.ClusterEnv('Slurm', num_hosts=1, local_index=0)
  assert joining.newcomer(workdir, lone) == lone  # it resumes by itself
  builders.assert_refused(['members.json names no process'], joining.newcomer, workdir, _ALONE)


def test_a_run_that_takes_nobody_can_be_asked(workdir):
  with socket.create_server(('127.0.0.1', 0)) as listening:
    host, port = listening.getsockname()
    joining.write(workdir, {}, f'{host}:{port}')
    joining.check(workdir)
    words = ['no process to join; ', 'cluster.elastic=auto']
    builders.assert_refused(words, joining.newcomer, workdir, _ALONE)
    with futures.ThreadPoolExecutor() as pool:
      asking = pool.submit(joining.connect, workdir, '5a' * 32, 1, 0.1)
      listening.accept()[0].close()
      builders.assert_refused(['answers'], asking.result)
  joining.write(workdir, {})
  words = ['expected the workdir of a run of several']
  builders.assert_refused(words, joining.check, workdir)


@pytest.mark.parametrize(
  'record',
  [
    {'coordinator': 5},
    {'coordinator': 'node1'},
    {'x': ['node1', 1]},
    {'0': None},
    {'0': ['node1']},
    {'0': [5, 1]},
    {'0': ['node1', 'x']},
  ],
)
def test_a_record_of_another_form_is_named(workdir, tmp_path, record):
  (tmp_path / joining.NAME).write_text(json.dumps(record))
  words = [f'{workdir}/members.json is damaged']
  builders.assert_refused(words, joining.newcomer, workdir, _ALONE)
  builders.assert_refused(words, joining.check, workdir)


def test_an_evaluation_joins_no_run(workdir, capsys):
  joining.write(workdir, {}, ended='node1:20481')
  assert main.main(f'main.py --join --mode=evaluate --workdir={workdir}'.split()) == 2
  assert '--join is for --mode=train' in capsys.readouterr().err


def test_a_run_that_ends_with_each_process_takes_nobody(workdir, capsys):
  """Another one than those with which the launcher began it."""
  joining.write(workdir, {0: _dead()})
  command = f'main.py --join --workdir={workdir} --config=configs/resnet_anp.py:tiny'
  assert main.main(f'{command} --config.cluster.elastic=off'.split()) == 2
  assert 'cluster.elastic=off does not go on without a process' in capsys.readouterr().err


def test_a_process_that_comes_back_after_the_end_leaves_at_once(workdir, capsys):
  """Also while it looks for the others."""
  address = f'127.0.0.1:{launching.free_port()}'
  place = _THIRD._replace(launcher='join', coordinator_address=address, secret='5a' * 32)
  settings = types.SimpleNamespace(rendezvous_timeout=300)
  joining.write(workdir, {}, ended=address)
  for come in (
    lambda: joining.newcomer(workdir, place),
    lambda: joining.newcomer(workdir, _ALONE),
    lambda: joining.connect(workdir, place.secret, 300, 300),
    lambda: cluster._meet(place, {'elastic': False}, settings, generation.FIRST, workdir),
  ):
    with pytest.raises(SystemExit) as caught:
      come()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f'the run in {workdir} has ended\n'


def test_another_run_forgets_the_end_of_an_earlier_one(workdir, monkeypatch):
  """Before it listens, and so before any of its processes can come."""
  joining.write(workdir, {}, ended=_THIRD.coordinator_address)
  monkeypatch.setattr(coordinator, 'Coordinator', mock.Mock(side_effect=InterruptedError))
  settings, first = types.SimpleNamespace(rendezvous_timeout=300), _THIRD._replace(index=0)
  with pytest.raises(InterruptedError):
    cluster._meet(first, {'elastic': False}, settings, generation.FIRST, workdir)
  assert joining.newcomer(workdir, _THIRD) == _THIRD._replace(launcher='join')
  addresses = {0: ('10.0.0.1', 1000)}
  joining.write(workdir, addresses)
  joining.forget_end(workdir)  # of a run that goes on
  assert joining.read_addresses(workdir) == addresses


def test_nobody_answers_any_more(workdir):
  joining.write(workdir, {0: _dead()})
  words = ['no process of the run in ', ' answers']
  builders.assert_refused(words, joining.connect, workdir, '5a' * 32, 300, 0.1)
