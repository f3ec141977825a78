"""scripts/slurm/parameter_server.sbatch as it stands, on a real cluster."""

import subprocess
import sys

import pytest

from anp_jax.runtimes.parameter_server import log as log_lib
from tests import launching, slurm_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope='module')
def cluster():
  with slurm_cluster.open_cluster() as slurm:
    yield slurm
    slurm.cancel_all()


def test_two_nodes_and_their_replay(cluster, tmp_path):
  arguments = launching.arguments(
    tmp_path / 'run',
    **{
      'duration': '100 steps',
      'strategy.servers': '2',
      'eval.every': '100 steps',
      'checkpoint.every': '50 steps',
    },
  )
  job = cluster.submit(
    'scripts/slurm/parameter_server.sbatch', ['--nodes=2'], arguments, tmp_path / 'job.log'
  )
  cluster.wait(job)
  logs = tmp_path / 'run' / 'logs'
  text = (logs / f'{job}-0.log').read_text()
  assert 'async: 2 workers, 2 of them servers' in text, text
  records = log_lib.read(str(tmp_path / 'run'))
  tickets = [r['parts'][0]['ticket'][0] for r in records if 'order' in r]
  assert sorted(tickets) == list(range(100))
  result = subprocess.run(
    [sys.executable, '-m', 'anp_jax.tools.trials.replay', str(tmp_path / 'run'), '--trust'],
    cwd=launching.ROOT,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stdout + result.stderr
