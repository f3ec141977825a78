"""What processes show each other, and what keeps them from starting."""

import json
import os
import types

import jax
import pytest

from anp_jax.cluster import cluster_env, generation, process_info
from anp_jax.system import xla_flags
from tests import builders, coordinating

_GPUS = ('GPU-1a2b', 'GPU-1c3d', 'GPU-5e6f', 'GPU-7a8b')


def _info(index, host='a', **values):
  return coordinating.info(
    index,
    2,
    {
      'host': host,
      'local_index': -1,
      'versions': {'Python': '3.11', 'jax': '0.10.2'},
      'modules': {'mine.nets': 'd16e57'},
      'config': {'seed': '0', 'optimizer.learning_rate': '0.1'},
      'command': {'--mode': 'train'},
      **values,
    },
  )


def _with_gpus(*sets, hosts='aaaa', order=None):
  order = order or range(len(sets))
  return [
    _info(i, hosts[i], platform='gpu', gpus=list(gpus), local_index=local)
    for i, (gpus, local) in enumerate(zip(sets, order))
  ]


def test_what_agrees_starts():
  assert process_info.mismatch_with_first([_info(0, 'a'), _info(1, 'b')]) == ''


@pytest.mark.parametrize(
  'change, text',
  [
    ({'versions': {'Python': '3.11', 'jax': '1'}}, 'has jax 1, but rank 0 on a has 0.10.2'),
    (
      {'config': {'seed': '1', 'optimizer.learning_rate': '0.1'}},
      'has config.seed 1, but rank 0 on a has 0',
    ),
    ({'config': {'seed': '0'}}, 'has config.optimizer.learning_rate None, but rank 0 on a has 0.1'),
    ({'command': {'--mode': 'evaluate'}}, 'has --mode evaluate, but rank 0 on a has train'),
    (
      {'cpu_library': 'XLA alone'},
      'would compute with XLA alone, rank 0 on a with : expected the same, for the same bits; '
      '--config.model.cpu_library=xla computes with XLA alone everywhere',
    ),
    ({'code': 'beef'}, 'runs other code than rank 0 on a'),
    ({'modules': {'mine.nets': 'beef'}}, 'has another mine.nets than rank 0 on a: the files of'),
    ({'modules': {}}, 'has another mine.nets than rank 0 on a'),
    ({'platform': 'gpu'}, 'would compute on gpu, rank 0 on a on cpu'),
  ],
)
def test_what_differs_is_named(change, text):
  infos = [_info(0, 'a'), _info(1, 'b', **change)]
  assert process_info.mismatch_with_first(infos).startswith(f'rank 1 on b {text}')


@pytest.mark.parametrize(
  'rank, change, text',
  [
    (1, {'problem': 'no driver'}, 'rank 1 on b: no driver'),
    (0, {'problem': 'no driver', 'code': 'beef'}, 'rank 0 on a: no driver'),
    (1, {'loopback': '127.0.1.1'}, 'rank 1 on b: its own name resolves to 127.0.1.1'),
  ],
)
def test_a_problem_of_one_is_told(rank, change, text):
  infos = [_info(0, 'a'), _info(1, 'b')]
  infos[rank].update(change)
  assert process_info.mismatch_with_first(infos).startswith(text)


def test_a_loopback_name_is_no_matter_on_one_host():
  infos = [_info(i, 'a', loopback='127.0.1.1') for i in range(2)]
  assert process_info.mismatch_with_first(infos) == ''


def test_equal_sets_are_divided():
  infos = _with_gpus(_GPUS, _GPUS)
  assert process_info.devices(infos) == ([[0, 1], [2, 3]], '')
  # By the place on the host, which need not follow the rank.
  infos = _with_gpus(_GPUS, _GPUS, order=[1, 0])
  assert process_info.devices(infos) == ([[2, 3], [0, 1]], '')
  infos = _with_gpus(_GPUS, _GPUS, _GPUS, _GPUS, hosts='abab')
  assert process_info.devices(infos) == ([[0, 1], [0, 1], [2, 3], [2, 3]], '')


def test_sets_of_their_own_are_taken_whole():
  infos = _with_gpus(_GPUS[:1], _GPUS[1:2], _GPUS[2:])
  assert process_info.devices(infos) == ([[0], [0], [0, 1]], '')
  assert process_info.devices(_with_gpus(_GPUS)) == ([[0, 1, 2, 3]], '')


@pytest.mark.parametrize(
  'sets, text',
  [
    ((_GPUS[:2], _GPUS[1:3]), 'rank 1 on a sees GPU GPU-1c3d of rank 0 on a too'),
    ((_GPUS[:1], _GPUS[1:2], _GPUS[:1]), 'rank 2 on a sees GPU GPU-1a2b of rank 0 on a too'),
    (
      (_GPUS[:3], _GPUS[:3]),
      'rank 0 on a and 1 more processes there all see the same 3 GPUs, which do not divide by 2',
    ),
    ((_GPUS[:1], _GPUS[:1]), 'rank 0 on a and 1 more processes there all'),
    ((_GPUS[:1], ()), 'rank 1 on a sees no GPU, though rank 0 on a does'),
    (((), _GPUS[:1]), 'rank 0 on a sees no GPU, though rank 1 on a does'),
  ],
)
def test_gpus_that_cannot_be_shared(sets, text):
  infos = _with_gpus(*sets)
  assert process_info.devices(infos)[1].startswith(text)


def test_a_process_without_gpus_helps_one_that_trains_on_them():
  mixed = {'mixes_platforms': True, 'count': 3}
  infos = [
    _info(0, 'a', platform='gpu', gpus=_GPUS[:2], **mixed),
    _info(1, 'a', **mixed),
    _info(2, 'b', platform='gpu', gpus=_GPUS[2:], **mixed),
  ]
  assert process_info.devices(infos) == ([[0, 1], None, [0, 1]], '')
  assert process_info.mismatch_with_first(infos) == ''


def test_where_nothing_is_known_jax_decides():
  assert process_info.devices(_with_gpus((), ())) == ([None, None], '')


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
  """A machine whose nvidia-smi lists four GPUs."""
  lines = ''.join(f'{g}\n' for g in _GPUS)
  ask = '[ "$*" = "--query-gpu=uuid --format=csv,noheader" ] || exit 2'
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  return builders.write_program(tmp_path / 'nvidia-smi', f"{ask}\nprintf '{lines}'")


@pytest.mark.parametrize(
  'visible, want',
  [
    (None, _GPUS),
    ('0,1,2,3', _GPUS),
    ('2', _GPUS[2:3]),
    ('3, 1', (_GPUS[3], _GPUS[1])),
    ('GPU-5e6f', _GPUS[2:3]),
    ('GPU-5,GPU-7a', _GPUS[2:]),
    # CUDA sees nothing from the first one on that is not there.
    ('1,9,0', _GPUS[1:2]),
    ('0,-1,1', _GPUS[:1]),
    ('-1', ()),
    ('', ()),
    ('GPU-ffff', ()),
    ('MIG-1111,MIG-2222', ('MIG-1111', 'MIG-2222')),
  ],
)
def test_gpus_that_a_process_sees(nvidia, visible, want):
  environment = {} if visible is None else {'CUDA_VISIBLE_DEVICES': visible}
  assert process_info.gpus(environment) == list(want)


def test_without_nvidias_tool_nothing_is_known(nvidia, monkeypatch, tmp_path):
  nvidia.write_text('#!/bin/sh\necho no driver\nexit 9\n')
  assert process_info.gpus({}) == []
  monkeypatch.setenv('PATH', str(tmp_path / 'nowhere'))
  assert process_info.gpus({}) == []


@pytest.fixture
def here(monkeypatch):
  """Says what JAX would compute on."""

  def pretend(name):
    monkeypatch.setattr(xla_flags, 'platform', lambda environment: name)

  monkeypatch.setattr(xla_flags, 'missing_plugin', lambda environment: '')
  pretend('cpu')
  return pretend


@pytest.mark.parametrize(
  'variables',
  [
    {'SLURM_GPUS_ON_NODE': '4'},
    {'SLURM_JOB_GPUS': '0'},  # the index of the first
    {'SLURM_STEP_GPUS': '0', 'SLURM_GPUS_ON_NODE': '0'},
    {'SLURM_JOB_GPUS': '2,3'},
  ],
)
def test_gpus_of_slurm_that_jax_does_not_see(here, variables):
  text = process_info.startup_problem(variables)
  key, value = next(iter(variables.items()))
  assert f'Slurm gave this job GPUs ({key}={value})' in text
  assert 'compute on cpu: JAX has no CUDA here' in text
  for hidden in ('', '-1'):
    text = process_info.startup_problem({**variables, 'CUDA_VISIBLE_DEVICES': hidden})
    assert f'CUDA_VISIBLE_DEVICES={hidden!r} hides them' in text


@pytest.mark.parametrize(
  'variables, platform',
  [
    ({'SLURM_JOB_ID': '1'}, 'cpu'),
    ({'SLURM_GPUS_ON_NODE': '0'}, 'cpu'),
    ({'SLURM_JOB_GPUS': ''}, 'cpu'),
    ({'SLURM_GPUS_ON_NODE': '4', 'JAX_PLATFORMS': 'cpu'}, 'cpu'),
    ({'SLURM_GPUS_ON_NODE': '4'}, 'gpu'),
  ],
)
def test_no_problem_with_gpus_of_slurm(here, variables, platform):
  here(platform)
  assert process_info.startup_problem(variables) == ''


@pytest.mark.parametrize('copies', [(0, 0), (9, 0), (0, 9)])
def test_whether_a_process_has_a_copy_of_the_state(config, here, copies):
  """In either of two files; each may be empty."""
  files = {str(i): os.memfd_create('copy') for i in range(len(copies))}
  for file, size in zip(files.values(), copies):
    os.truncate(file, size)
  now = generation.Generation(1, descriptors=files)
  environment = {generation.VARIABLE: json.dumps(now._asdict())}
  info = process_info.collect(cluster_env.ALONE, config, {}, environment)
  for file in files.values():
    os.close(file)
  assert info['has_state'] == any(copies)


def test_what_a_process_tells(config, here):
  env = cluster_env.ClusterEnv('flags', 1, 2, 'a:1', token='job')
  info = process_info.collect(env, config, {'--mode': 'train'}, {})
  assert json.loads(json.dumps(info)) == info
  assert (info['index'], info['count'], info['token']) == (1, 2, 'job')
  assert info['versions']['jax'] == jax.__version__
  assert info['config']['optimizer.learning_rate'] == repr(config.optimizer.learning_rate)
  assert process_info.name(info) == f'rank 1 on {info["host"]}'


def test_other_code_is_seen(monkeypatch, tmp_path):
  def code():
    monkeypatch.setattr(process_info, '__file__', str(tmp_path / 'anp_jax/cluster/process_info.py'))
    return process_info._code()

  (tmp_path / 'anp_jax/training').mkdir(parents=True)
  (tmp_path / 'anp_jax/training/train_step.py').write_text('x = 1')
  before = code()
  (tmp_path / 'anp_jax/notes.txt').write_text('nothing')
  assert code() == before
  (tmp_path / 'anp_jax/training/train_step.py').write_text('x = 2')
  assert code() != before


def test_a_gpu_of_this_host_that_jax_has_no_plugin_for(monkeypatch):
  monkeypatch.setattr(xla_flags, 'missing_plugin', lambda environment: 'line')
  assert process_info.startup_problem({}) == 'line'


@pytest.mark.parametrize(
  'strategy, cpu_library, text',
  [
    ('invariant', 'auto', 'oneDNN 3.2.0, AVX512_CORE'),
    ('invariant', 'xla', 'XLA alone'),
    ('sync', 'auto', ''),
  ],
)
def test_what_bits_depend_on_is_shown(monkeypatch, strategy, cpu_library, text):
  library = types.SimpleNamespace(version='3.2.0', isa='AVX512_CORE')
  monkeypatch.setattr(process_info.onednn, 'find', lambda: library)
  monkeypatch.setattr(xla_flags, 'platform', lambda environment: 'cpu')
  config = builders.config({'strategy.name': strategy, 'model.cpu_library': cpu_library})
  env = cluster_env.ALONE
  info = process_info.collect(env, config, {}, {})
  assert info['cpu_library'] == text
