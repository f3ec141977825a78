"""A job that waits is given another number of nodes: a real cluster of four."""

import functools
import re
import sys

import pytest

from anp_jax.reporting import telemetry
from tests import launching, slurm_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

_TRAIN = 'scripts/slurm/train.sbatch'


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


@pytest.mark.soak  # scripts with stand-ins for the program are in CI
def test_a_run_on_two_nodes_of_four_and_on_all(cluster, three_nodes, tmp_path):
  workdir, steps = tmp_path / 'run', 100
  keys = {'duration': f'{steps} steps', 'eval.every': f'{steps} steps'}
  job = cluster.submit(
    _TRAIN,
    ['--nodes=4'],
    launching.arguments(workdir, **keys),
    tmp_path / 'job.log',
    PYTHON=str(launching.ROOT / 'tests/phased_python.sh'),
    PHASED_PYTHON=sys.executable,
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
  logs = [(workdir / f'logs/{job}-{i}.log').read_text() for i in range(4)]
  assert re.findall(r'devices  (\d) x cpu', logs[0]) == ['2', '4']
  lines = [r for r in telemetry.read(str(workdir)) if r['kind'] == 'train']
  assert [r['step'] for r in lines] == list(range(1, steps + 1))
  assert all(f'[{i} node{i + 1}] ' in log for i, log in enumerate(logs))


def test_two_tasks_a_node(cluster, three_nodes, tmp_path):
  """They are lost on two nodes, and run on four."""
  program = tmp_path / 'python'
  program.write_text("""#!/bin/sh
echo "$SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME"
sleep 1
[ "$SLURM_RESTART_COUNT" = 1 ] || exit 75
""")
  program.chmod(0o755)
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
