"""Nodes of a job are lost, and come: a real cluster of four."""

import functools
import json
import os
import random
import re

import pytest

from anp_jax.reporting import telemetry
from tests import builders, launching, slurm_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

_TRAIN = 'scripts/slurm/train.sbatch'
_INVARIANT = {
  'strategy.name': 'invariant',
  'strategy.logical_shards': '12',
  'batch_size': '24',
  'model.norm_group': '2',
  'schedule.name': 'constant',
  'data.synthetic_examples': '240',
}


@pytest.fixture(scope='module')
def cluster():
  with slurm_cluster.open_cluster(nodes=4) as slurm:
    yield slurm
    slurm.cancel_all()


@pytest.fixture
def three_nodes(cluster):
  """A cluster without its fourth node; returns what brings it back."""
  cluster.fault('node-kill', 'node4')
  # Slurm would see that by itself after half a minute.
  cluster.update('nodename=node4', 'state=down', 'reason=test')
  mend = functools.partial(cluster.fault, 'node-start', 'node4')
  yield mend
  cluster.cancel_all()
  mend()


def _resize(cluster, job, nodes, tasks):
  """Resizes a job while it waits, with the command of docs/clusters.md."""
  cluster.wait(job, 'PENDING', timeout=60)
  cluster.update(
    f'jobid={job}', f'numnodes={nodes}', f'numtasks={nodes * tasks}', f'numcpus={nodes * tasks}'
  )


def _restarts(workdir):
  return telemetry.of_kind(str(workdir), 'restart')


@pytest.mark.timeout(3000)
def test_a_run_outlives_its_nodes_with_the_same_bits(cluster, tmp_path):
  """One node after another dies, never the first, and comes back; nobody but the script joins."""
  workdir, chance = tmp_path / 'run', random.Random(0)
  keys = {
    **_INVARIANT,
    'cluster.heartbeat_timeout': '5',
    'cluster.mirror_every': '1',
    'eval.every': '100 steps',
    'checkpoint.every': '100 steps',
  }
  pause = {'ANP_PAUSE': '0.02', **slurm_cluster.PHASED}
  arguments = launching.arguments(workdir, **keys, duration='1000000 steps')
  options = ['--nodes=4', '--exclusive']  # whatever joins has a node of its own
  job = cluster.submit(_TRAIN, options, arguments, tmp_path / 'job.log', **pause)
  slurm_cluster.until(workdir / 'metrics.jsonl', '"step": 20,', 120)
  lost = []
  for number in range(int(os.environ.get('ANP_NODES', '1'))):
    node = f'node{chance.choice([2, 3, 4])}'
    cluster.fault('node-kill', node)
    before = len(_restarts(workdir))
    launching.wait_until(lambda before=before: len(_restarts(workdir)) > before, 60)
    assert _restarts(workdir)[-1]['processes'] == 3
    cluster.update(f'nodename={node}', 'state=down', 'reason=test')
    if node not in lost:  # else Slurm starts its job again
      slurm_cluster.until(tmp_path / 'job.log', rf'{node} is lost: job \d+ joins')
    lost.append(node)
    cluster.fault('node-start', node)
    launching.wait_until(lambda: _restarts(workdir)[-1]['processes'] == 4, 120)
    print(f'round {number}: {node}', _restarts(workdir)[-2:])
  assert cluster.field(job, 'Restarts') == '0'
  replacing = re.findall(r'is lost: job (\d+) joins', (tmp_path / 'job.log').read_text())
  for each in (job, *replacing):
    cluster.signal(each, 'TERM')
  slurm_cluster.until(workdir / 'stopped.json', '"step"')
  step = json.loads((workdir / 'stopped.json').read_text())['step']
  slurm_cluster.until(tmp_path / 'job.log', f'at step {step}: starting job {job} again')
  cluster.cancel_all()
  alone = tmp_path / 'alone'
  launching.run(tmp_path, 1, launching.arguments(alone, **keys, duration=f'{step} steps'))
  lines = [
    {r['step']: r['loss'] for r in telemetry.of_kind(str(folder), 'train')}
    for folder in (workdir, alone)
  ]
  assert list(lines[0]) == list(range(1, step + 1)) and lines[0] == lines[1]


@pytest.mark.soak  # scripts with stand-ins for the program are in CI
def test_a_run_on_two_nodes_of_four_and_on_all(cluster, three_nodes, tmp_path):
  workdir, steps = tmp_path / 'run', 100
  # With elastic=auto a process that is told to end would leave the run to the others.
  keys = {'cluster.elastic': 'off', 'duration': f'{steps} steps', 'eval.every': f'{steps} steps'}
  job = cluster.submit(
    _TRAIN,
    ['--nodes=4'],
    launching.arguments(workdir, **keys),
    tmp_path / 'job.log',
    **slurm_cluster.PHASED,
    ANP_KILL='1 step 10 TERM',
    ANP_KILL_LOG=str(tmp_path / 'kills'),
  )
  _resize(cluster, job, 2, 1)
  slurm_cluster.until(tmp_path / 'job.log', f'starting job {job} again')
  three_nodes()
  _resize(cluster, job, 4, 1)
  cluster.wait(job)
  text = (tmp_path / 'job.log').read_text()
  nodes = re.findall(r'start \d, on (\S+);', text)
  assert nodes == ['node[1-2]', 'node[1-4]'], text
  log = (workdir / f'logs/{job}-0.log').read_text()
  assert re.findall(r'devices  (\d) x cpu', log) == ['2', '4']
  lines = telemetry.of_kind(str(workdir), 'train')
  assert [r['step'] for r in lines] == list(range(1, steps + 1))


def test_two_tasks_a_node(cluster, three_nodes, tmp_path):
  """They are lost on two nodes, and run on four."""
  program = builders.write_program(
    tmp_path / 'python',
    'echo "$SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME"\n'
    'sleep 1\n'
    '[ "$SLURM_RESTART_COUNT" = 1 ] || exit 75',
  )
  job = cluster.submit(
    _TRAIN,
    ['--nodes=4', '--ntasks-per-node=2'],
    [f'--workdir={tmp_path}/run'],
    tmp_path / 'job.log',
    PYTHON=str(program),
  )
  _resize(cluster, job, 2, 2)
  slurm_cluster.until(tmp_path / 'job.log', f'starting job {job} again')
  three_nodes()
  _resize(cluster, job, 4, 2)
  cluster.wait(job)
  for rank in range(8):
    text = (tmp_path / f'run/logs/{job}-{rank}.log').read_text()
    assert f'{rank} of 8 on node{rank // 2 + 1}\n' in text
    assert (f'{rank} of 4 on node{rank // 2 + 1}\n' in text) == (rank < 4)
