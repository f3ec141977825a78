"""A process joins a run: its place there, and the runs that take nobody."""

from concurrent import futures
import socket
import types

import pytest

from anp_jax import __main__ as main, cluster, config as config_lib
from anp_jax.cluster import cluster_env, coordinator, generation, joining
from tests import launching

_ALONE = cluster_env.ALONE
_THIRD = cluster_env.ClusterEnv('Slurm', 2, 3, 'node1:20480', token='7.0.0')


def test_a_newcomer_gets_the_first_free_rank(tmp_path):
  addresses = {rank: ('10.0.0.1', 1000 + rank) for rank in (0, 1, 3)}
  joining.write(str(tmp_path), addresses)
  assert joining.read_addresses(str(tmp_path)) == addresses
  for place in (_ALONE, _THIRD):
    assert joining.newcomer(str(tmp_path), place) == cluster_env.ClusterEnv('join', 2, 4)


def test_before_the_run_has_begun_it_is_the_launchers(tmp_path):
  """The others still wait for a process that was lost so early, maybe for more epochs."""
  assert joining.newcomer(str(tmp_path), _THIRD) == _THIRD._replace(launcher='join')
  joining.write(str(tmp_path), {}, ended='node1:20481')  # the end of a run that met elsewhere
  assert joining.newcomer(str(tmp_path), _THIRD) == _THIRD._replace(launcher='join')
  joining.write(str(tmp_path), {})
  lone = cluster_env.ClusterEnv('Slurm', num_hosts=1, local_index=0)
  assert joining.newcomer(str(tmp_path), lone) == lone  # it resumes by itself
  with pytest.raises(config_lib.ConfigError, match='members.json names no process'):
    joining.newcomer(str(tmp_path), _ALONE)


def test_a_run_that_takes_nobody_can_be_asked(tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as listening:
    host, port = listening.getsockname()
    joining.write(str(tmp_path), {}, f'{host}:{port}')
    joining.check(str(tmp_path))
    with pytest.raises(config_lib.ConfigError, match='no process to join; .*elastic=auto'):
      joining.newcomer(str(tmp_path), _ALONE)
    with futures.ThreadPoolExecutor() as pool:
      asking = pool.submit(joining.connect, str(tmp_path), '5a' * 32, 1, 0.1)
      listening.accept()[0].close()
      with pytest.raises(config_lib.ConfigError, match='answers'):
        asking.result()
  joining.write(str(tmp_path), {})
  with pytest.raises(config_lib.ConfigError, match='expected the workdir of a run of several'):
    joining.check(str(tmp_path))


def test_a_run_that_ends_with_each_process_takes_nobody(tmp_path, capsys):
  command = f'main.py --join --workdir={tmp_path} --config=configs/resnet_anp.py:tiny'
  flags = '--coordinator=127.0.0.1:9 --num_processes=2 --process_id=1 --config.cluster.elastic=off'
  assert main.main(f'{command} {flags}'.split()) == 2
  assert 'cluster.elastic=off does not go on without a process' in capsys.readouterr().err


def test_a_process_that_comes_back_after_the_end_leaves_at_once(tmp_path, capsys):
  """Also while it looks for the others."""
  workdir, address = str(tmp_path), f'127.0.0.1:{launching.free_port()}'
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


def test_another_run_forgets_the_end_of_an_earlier_one(tmp_path, monkeypatch):
  """Before it listens, and so before any of its processes can come."""
  joining.write(str(tmp_path), {}, ended=_THIRD.coordinator_address)

  def listen(*_):
    raise InterruptedError

  monkeypatch.setattr(coordinator, 'Coordinator', listen)
  settings, first = types.SimpleNamespace(rendezvous_timeout=300), _THIRD._replace(index=0)
  with pytest.raises(InterruptedError):
    cluster._meet(first, {'elastic': False}, settings, generation.FIRST, str(tmp_path))
  assert joining.newcomer(str(tmp_path), _THIRD) == _THIRD._replace(launcher='join')
  addresses = {0: ('10.0.0.1', 1000)}
  joining.write(str(tmp_path), addresses)
  joining.forget_end(str(tmp_path))  # of a run that goes on
  assert joining.read_addresses(str(tmp_path)) == addresses


def test_nobody_answers_any_more(tmp_path):
  joining.write(str(tmp_path), {0: ('127.0.0.1', launching.free_port())})
  with pytest.raises(config_lib.ConfigError, match='no process of the run in .* answers'):
    joining.connect(str(tmp_path), '5a' * 32, 300, 0.1)
