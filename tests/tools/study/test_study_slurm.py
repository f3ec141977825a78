"""Studies whose processes are tasks of a Slurm job."""

import json
import os
import stat
import sys

import pytest

from anp_jax import config as config_lib
from anp_jax.tools.study import __main__ as study_main, launching, slurm
from tests import launching as test_launching, slurm_cluster

_SBATCH = """
echo "$@" >"$NOTES/submitted"
echo "$PROGRAM,$PYTHON,$JAX_NUM_CPU_DEVICES" >"$NOTES/environment"
echo 7
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
  """Makes stand-ins for programs of Slurm from their texts, by name."""
  notes = tmp_path / 'notes'
  notes.mkdir()
  monkeypatch.setenv('PATH', f'{notes}:{os.environ["PATH"]}')
  monkeypatch.setenv('NOTES', str(notes))

  def make(**texts):
    for name, text in texts.items():
      path = notes / name
      path.write_text(f'#!/usr/bin/env bash\n{text}\n')
      path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return notes

  return make


def test_a_program_is_one_job_with_a_task_a_node(tmp_path, programs):
  notes = programs(sbatch=_SBATCH, squeue=':', scontrol='echo JobId=7 ExitCode=0:0 X=1')
  folder = str(tmp_path / 'ring')
  slurm.launch(
    ['-m', 'a.b', 'main.py'],
    folder,
    3,
    [f'--workdir={folder}'],
    ['--gpus-per-node={devices}'],
    poll=0,
  )
  submitted = (notes / 'submitted').read_text().split()
  script = submitted.index('scripts/slurm/train.sbatch')
  assert submitted[script + 1 :] == [f'--workdir={folder}']
  assert {'--nodes=3', '--gpus-per-node=1', '--no-requeue'} <= set(submitted)
  assert (notes / 'environment').read_text().strip() == (f'-m a.b main.py,{sys.executable},1')


def test_a_job_that_fails_says_why(tmp_path, programs):
  programs(sbatch=_SBATCH, squeue=':', scontrol='echo JobId=7 ExitCode=2:0 X=1')
  folder = tmp_path / 'ring'
  folder.mkdir()
  (folder / 'study.log').write_text('job 7\n[1 node2] error: no such key\nend\n')
  with pytest.raises(launching.RunFailedError, match='ring: no such key$'):
    slurm.launch(['main.py'], str(folder), 2, [], poll=0)


def test_a_job_that_is_not_waited_for_is_cancelled(tmp_path, programs):
  notes = programs(sbatch=_SBATCH, squeue='echo 7', scancel='echo "$@" >"$NOTES/cancelled"')
  with pytest.raises(ValueError):  # in place of Ctrl-C, from `time.sleep`
    slurm.launch(['main.py'], str(tmp_path / 'ring'), 2, [], poll=-1)
  assert (notes / 'cancelled').read_text() == '7\n'


def test_a_refused_job_is_bad_input(tmp_path, programs):
  programs(sbatch='echo "sbatch: error: invalid partition" >&2; exit 1')
  with pytest.raises(config_lib.ConfigError, match='invalid partition'):
    slurm.launch(['main.py'], str(tmp_path / 'ring'), 2, [], poll=0)


# On a cluster of two nodes.


@pytest.fixture(scope='module')
def cluster():
  with slurm_cluster.open_cluster() as opened:
    yield opened


def _study(capsys, *arguments):
  """Runs a study; returns its last line, of JSON."""
  status = study_main.main([*arguments, '--slurm=--time=5'])
  out = capsys.readouterr()
  assert status == 0, out.err
  return json.loads(out.out.splitlines()[-1])


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_a_ring_on_two_nodes(tmp_path, capsys, cluster):
  ratios = _study(
    capsys,
    'model_ring',
    '--config=configs/model_ring_anp.py:tiny',
    f'--workdir={tmp_path}',
    '--baselines=ring',
    *(f'--config.{k}={v}' for k, v in test_launching.TINY.items()),
  )
  # 2 models, 2 stations, 2 laps: 2 * 2 + 2 - 1.
  assert (ratios['stations'], ratios['slots']) == (2, 5)
  spans = (tmp_path / 'ring/spans').iterdir()
  assert sorted(path.name for path in spans) == ['0.jsonl', '1.jsonl']
  hosts = {path.name.split('-')[0] for path in (tmp_path / 'ring/usage').iterdir()}
  assert len(hosts) == 2
  page = (tmp_path / 'study.md').read_text()
  assert 'MB sent are those of all interfaces of the nodes' in page


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_split_convolutions_on_two_nodes(tmp_path, capsys, cluster):
  _study(
    capsys,
    'channel_split',
    '--config=configs/channel_split_cifar10.py',
    f'--workdir={tmp_path}',
    '--batch_sizes=8',
    '--rounds=1',
    '--brief',
    '--config.model.kernels=(8, 16)',
    '--config.data.source=synthetic',
  )
  (run,) = json.loads((tmp_path / '0-2/measured.json').read_text())
  hosts = {name.partition('(')[2] for name in run['costs']['names']}
  assert len(hosts) == 2
  names = {step['name'] for step in run['steps']}
  assert {'plan', 'equal shares'} <= names
