"""Processes of launchers that number them by variables of their own."""

import re

import pytest

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env
from tests import builders, environments

_TORCHRUN, _EXPORTED, _JAX = environments.TORCHRUN, environments.EXPORTED, environments.JAX
_MPICH, _PALS, _MVAPICH = environments.MPICH, environments.PALS, environments.MVAPICH
_OPEN_MPI_4, _OPEN_MPI = environments.OPEN_MPI_4, environments.OPEN_MPI
_STEP = {**environments.STEP, 'SLURM_PROCID': '1', 'SLURM_STEP_NUM_TASKS': '2'}
# Those whose variables do not tell where process 0 is, and of the number on a host.
_MPI = [
  (_MPICH, 'MPI_LOCALNRANKS'),
  (_PALS, 'PALS_LOCAL_SIZE'),
  (_MVAPICH, 'MV2_COMM_WORLD_LOCAL_SIZE'),
  (_OPEN_MPI, 'OMPI_COMM_WORLD_LOCAL_SIZE'),
]


def _detect(environment, coordinator=None):
  return cluster_env.detect(coordinator, environment=environment)


@pytest.mark.parametrize(
  'environment, launcher, size, rank, local',
  [
    (_TORCHRUN, 'torchrun', 'WORLD_SIZE', 'RANK', 0),
    (_EXPORTED, 'torchrun', 'WORLD_SIZE', 'RANK', -1),
    (_JAX, 'JAX', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', -1),
    (_MPICH, 'MPICH or Intel MPI', 'PMI_SIZE', 'PMI_RANK', 0),
    (_PALS, 'PALS', 'PMI_SIZE', 'PALS_RANKID', 0),
    (_MVAPICH, 'MVAPICH', 'MV2_COMM_WORLD_SIZE', 'MV2_COMM_WORLD_RANK', 0),
    (_OPEN_MPI, 'Open MPI', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_RANK', 0),
  ],
)
def test_a_process_of_four(environment, launcher, size, rank, local):
  env = _detect(environment, 'mine:99')
  assert (env.launcher, env.index, env.count) == (launcher, 2, 4)
  assert (env.coordinator_address, env.local_index) == ('mine:99', local)
  env = _detect({**environment, size: '1', rank: '0'})
  assert (env.count, env.index, env.coordinator_address) == (1, 0, '')
  with pytest.raises(config_lib.ConfigError, match=f'{rank}=4: expected a num'):
    _detect({**environment, rank: '4'}, 'mine:99')


@pytest.mark.parametrize(
  'environment, address, count',
  [
    (_EXPORTED, 'job-master-0:23456', 0),
    ({**_EXPORTED, 'MASTER_ADDR': 'fd00::3'}, r'\[fd00::3\]:23456', 0),
    (_JAX, 'node1:1234', 0),
    (_TORCHRUN, 'gpu03:2[0-9]{4}', 7),  # torchrun itself listens at MASTER_PORT
    (_OPEN_MPI_4, r'10\.96\.0\.1:2[0-9]{4}', 7),
    # Of this host alone: mpirun passes no variables to others.
    ({**_OPEN_MPI_4, 'MASTER_ADDR': 'n1', 'MASTER_PORT': '7'}, r'10\.96\.0\.1:2[0-9]{4}', 7),
  ],
)
def test_where_variables_tell_of_process_0(environment, address, count):
  env = _detect(environment)
  assert re.fullmatch(address, env.coordinator_address) and len(env.other_ports) == count


@pytest.mark.parametrize(
  'environment, rank, job',
  [
    (_TORCHRUN, 'RANK', 'TORCHELASTIC_RESTART_COUNT'),
    (_OPEN_MPI_4, 'OMPI_COMM_WORLD_RANK', 'PMIX_NAMESPACE'),
  ],
)
def test_all_processes_of_a_launch_meet_and_no_others(environment, rank, job):
  env = _detect(environment)
  assert _detect({**environment, rank: '0'}) == env._replace(index=0)
  assert _detect({**environment, job: '1'}).token != env.token


@pytest.mark.parametrize('environment, local_size', _MPI)
def test_mpi_of_two_hosts_needs_a_coordinator(environment, local_size):
  text = 'does not tell where process 0 runs: give main.py --coordinator='
  builders.assert_refused([text], _detect, environment)
  exported = {**environment, 'MASTER_ADDR': 'n1', 'MASTER_PORT': '7'}
  assert _detect(exported).coordinator_address == 'n1:7'
  env = _detect({**environment, local_size: '4'})  # all on one host
  assert env.coordinator_address.startswith('127.0.0.1:') and env.num_hosts == 1


@pytest.mark.parametrize(
  'environment, missing',
  [
    ({'PMI_RANK': '1'}, 'PMI_SIZE'),
    ({'PALS_RANKID': '1'}, 'PMI_SIZE'),
    ({'MV2_COMM_WORLD_RANK': '1'}, 'MV2_COMM_WORLD_SIZE'),
    ({'JAX_PROCESS_ID': '1'}, 'JAX_NUM_PROCESSES'),
    ({'JAX_COORDINATOR_ADDRESS': 'a:1'}, 'JAX_PROCESS_ID and JAX_NUM_PROCESSES'),
  ],
)
def test_variables_that_say_too_little_are_refused(environment, missing):
  text = f'started this process without {missing}: give main.py'
  builders.assert_refused([text], _detect, environment)


@pytest.mark.parametrize('name', ['RANK', 'WORLD_SIZE', 'LOCAL_RANK'])
def test_a_common_name_alone_says_nothing(name):
  assert _detect({name: '1'}) == cluster_env.ALONE


@pytest.mark.parametrize('environment', [_TORCHRUN, _MPICH, _MVAPICH])
def test_a_launcher_within_a_slurm_step_tells_more(environment):
  """Step variables tell of its daemons, one on each node."""
  assert _detect({**_STEP, **environment}, 'mine:99')[:3] == (_detect(environment, 'mine:99')[:3])


def test_srun_that_speaks_pmi_is_slurm():
  step = {**_STEP, 'PMI_RANK': '1', 'PMI_SIZE': '2'}
  assert _detect(step).launcher == 'Slurm'
