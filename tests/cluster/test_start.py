"""Processes that start: what ends all of them, and what is refused."""

import os
import socket
from unittest import mock

import pytest

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import (
  client,
  cluster_env,
  connection,
  generation as generation_lib,
  jax_processes,
  termination,
)
from anp_jax.config import command_line
from anp_jax.system import xla_flags
from tests import builders


class _Gone(Exception):
  pass


@pytest.fixture
def starting(monkeypatch, config, tmp_path):
  """Starts rank 1 of 2 with these errors of JAX; returns the failure sent."""
  failures = []

  connected = mock.Mock(
    start=client.Start(1, [0, 1], ('node0', 'node1')),
    is_elastic=False,
    generation=generation_lib.FIRST,
    fail=lambda *failure: failures.append(failure),
  )

  def start(error, is_elastic=False):
    connected.is_elastic = is_elastic
    monkeypatch.setattr(jax_processes, 'join', mock.Mock(side_effect=error))
    with pytest.raises(_Gone):
      env = cluster_env.ClusterEnv('flags', 1, 2, 'node0:99')
      cluster.start(config, env, workdir=str(tmp_path))
    return failures.pop()

  monkeypatch.setattr(client, 'CoordinatorClient', lambda *_: connected)
  monkeypatch.setattr(connection, 'connect', lambda *_: socket.create_server(('127.0.0.1', 0)))
  monkeypatch.setattr(termination, 'end_process', mock.Mock(side_effect=_Gone))
  return start


def test_an_error_while_jax_starts_ends_all(starting, capsys):
  """JAX's own exit handler would wait for the others, and they for it."""
  error = RuntimeError('CUDA_ERROR_NO_DEVICE: no\nmore')
  assert starting(error) == (1, 'RuntimeError: CUDA_ERROR_NO_DEVICE: no')
  assert 'Traceback' in capsys.readouterr().err
  assert starting(config_lib.ConfigError('devices')) == (2, 'devices')
  assert 'Traceback' not in capsys.readouterr().err


def test_a_broken_connection_of_an_elastic_run_is_no_failure_of_this_process(starting, capsys):
  """Another process is lost: a restart cut the traceback off that was printed meanwhile."""
  error = RuntimeError('Gloo all-reduce failed: Connection closed by peer [10.0.0.2]:99')
  for is_elastic in (True, False):
    starting(error, is_elastic)
    assert ('Traceback' in capsys.readouterr().err) == (not is_elastic)
  for text in ('a shape is wrong', '/data/igloo/x cannot be read'):
    starting(RuntimeError(text), is_elastic=True)
    assert 'Traceback' in capsys.readouterr().err


@pytest.mark.parametrize(
  'least, more, is_refused',
  [
    (2, {}, False),
    (5, {}, True),
    (5, {'launcher': cluster_env.JOIN, 'coordinator_address': None}, False),
  ],
)
def test_a_run_needs_as_many_processes_as_it_may_not_lose(
  monkeypatch, config, tmp_path, least, more, is_refused
):
  """One that joins does not know how many there are."""
  monkeypatch.setattr(cluster, '_meet', mock.Mock(side_effect=_Gone))
  config = config_lib.replaced(config, {'cluster.min_processes': least})
  env = cluster_env.ClusterEnv('flags', 1, 2, 'node0:99')._replace(**more)
  arguments = config, env, {'--mode': 'train'}, str(tmp_path)
  if is_refused:
    words = '^config.cluster.min_processes=5: expected at most the number of processes, 2$'
    builders.assert_refused(words, cluster.start, *arguments)
  else:
    with pytest.raises(_Gone):
      cluster.start(*arguments)


def test_without_nvidias_tool_a_start_says_what_is_not_checked(starting, monkeypatch, capsys):
  says = 'nvidia-smi lists no GPU here: shared ones cannot be detected\n'
  monkeypatch.setattr(xla_flags, 'platform', lambda environment=None: 'gpu')
  for uuids, want in (([], says), (['GPU-1a2b'], '')):
    monkeypatch.setattr(cluster.process_info, 'gpus', lambda _, uuids=uuids: uuids)
    starting(cluster.RunFailedError('enough'))
    assert capsys.readouterr().out == want


def test_one_process_is_told_of_gpus_that_jax_does_not_see(monkeypatch, config):
  """In a batch shell too, where no step says that this is Slurm."""
  monkeypatch.setattr(cluster.process_info, 'startup_problem', lambda: 'no driver')
  builders.assert_refused(['no driver'], cluster.start, config, cluster_env.ALONE)


@pytest.mark.parametrize('name', ['gpu', 'tpu'])
def test_an_accelerator_that_jax_drops_is_refused(monkeypatch, config, name):
  """JAX warns of a plug-in that fails, and computes on the CPU."""
  monkeypatch.setattr(xla_flags, 'platform', lambda environment=None: name)
  with pytest.raises(config_lib.ConfigError, match=f'has a {name}, but JAX computes on cpu'):
    cluster.start(config, cluster_env.ALONE)


def test_a_process_for_which_no_gpu_is_free_is_refused():
  words = ['other processes of this host use all GPUs']
  builders.assert_refused(words, jax_processes.start_alone, [], lambda phase: None)


@pytest.mark.parametrize('dedicated, platforms', [(False, 'gpu gpu gpu'), (True, 'gpu cpu gpu')])
def test_a_server_that_does_nothing_else_computes_on_the_cpu(
  monkeypatch, config, tmp_path, dedicated, platforms
):
  """But for the first one, which evaluates; its GPU is for others."""
  monkeypatch.setattr(xla_flags, 'platform', lambda e=os.environ: e['JAX_PLATFORMS'] or 'gpu')
  infos = []

  def meet(env, info, *_):
    infos.append(info)
    raise _Gone

  monkeypatch.setattr(cluster, '_meet', meet)
  names = {'strategy.name': 'parameter_server', 'strategy.servers': 2}
  config = config_lib.replaced(config, {**names, 'strategy.dedicated': dedicated})
  for rank in range(3):
    monkeypatch.setenv('JAX_PLATFORMS', '')
    with pytest.raises(_Gone):
      env = cluster_env.ClusterEnv('flags', rank, 3, 'node0:99')
      cluster.start(config, env, {'--mode': 'train'}, str(tmp_path))
  assert [info['platform'] for info in infos] == platforms.split()


@pytest.mark.parametrize('processes', [1, 2])
def test_a_sealed_workdir_is_found_out_together(tmp_path, monkeypatch, processes):
  """One of several that ended before it has come would keep the others."""
  monkeypatch.setattr(os, 'access', lambda *_: False)
  flags = command_line.main_flags(
    ['--config=configs/resnet_anp.py:tiny', f'--workdir={tmp_path}'], '', ''
  )
  if processes == 1:
    builders.assert_refused(['cannot be written to'], command_line.from_flags, flags, {}, processes)
  else:
    command_line.from_flags(flags, {}, processes)
