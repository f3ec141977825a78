"""Launchers that number their processes by variables of their own.

A process that one of them started is never taken for a lone one.
"""

from collections.abc import Mapping
import re
from typing import NamedTuple

from anp_jax import config as config_lib

# Variables that tell a launch from others on its hosts.
_JOB = (
  'TORCHELASTIC_RUN_ID',
  'TORCHELASTIC_RESTART_COUNT',
  'MASTER_PORT',
  'PALS_APID',
  'PBS_JOBID',
  'LSB_JOBID',
  'SLURM_JOB_ID',
  'SLURM_STEP_ID',
)
_FLAGS = 'give main.py --coordinator=HOST:PORT, --num_processes and --process_id'


class Launcher(NamedTuple):
  """A launcher, and the names of its variables; '' for none.

  Attributes:
    name: launcher's name.
    rank: variable of this process's number.
    size: variable of the number of processes.
    local_rank: variable of this process's number on its host.
    local_size: variable of the number of processes on its host.
    num_hosts: variable of the number of hosts.
    address: variable of 'host:port' of process 0.
    job: variables that identify a launch.
  """

  name: str
  rank: str
  size: str
  local_rank: str = ''
  local_size: str = ''
  num_hosts: str = ''
  address: str = ''
  job: tuple[str, ...] = _JOB


_SLURM = Launcher(
  'Slurm',
  'SLURM_PROCID',
  'SLURM_STEP_NUM_TASKS',
  'SLURM_LOCALID',
  num_hosts='SLURM_STEP_NUM_NODES',
  job=('SLURM_JOB_ID', 'SLURM_RESTART_COUNT', 'SLURM_STEP_ID'),
)
_TORCHRUN = Launcher('torchrun', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
_LAUNCHERS = (
  Launcher(
    'Open MPI',
    'OMPI_COMM_WORLD_RANK',
    'OMPI_COMM_WORLD_SIZE',
    'OMPI_COMM_WORLD_LOCAL_RANK',
    'OMPI_COMM_WORLD_LOCAL_SIZE',
    # Below Slurm, its daemons on other hosts run in another step than mpirun.
    job=('PMIX_NAMESPACE', 'OMPI_MCA_ess_base_jobid'),
  ),
  _TORCHRUN,
  Launcher('JAX', 'JAX_PROCESS_ID', 'JAX_NUM_PROCESSES', address='JAX_COORDINATOR_ADDRESS'),
  Launcher(
    'MVAPICH',
    'MV2_COMM_WORLD_RANK',
    'MV2_COMM_WORLD_SIZE',
    'MV2_COMM_WORLD_LOCAL_RANK',
    'MV2_COMM_WORLD_LOCAL_SIZE',
  ),
  # PALS sets the variables of PMI too, and none of its own for the number of all.
  Launcher('PALS', 'PALS_RANKID', 'PMI_SIZE', 'PALS_LOCAL_RANKID', 'PALS_LOCAL_SIZE'),
  Launcher('MPICH or Intel MPI', 'PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),
)


def _is_torchrun(environment):
  """Whether torchrun itself started this process, maybe within another launcher."""
  return 'TORCHELASTIC_RUN_ID' in environment


def _is_slurm_step(environment):
  """Whether srun started this process, and not a launcher within its step."""
  # A batch script's own shell has the job's variables and no step: a command
  # started there without srun is one process, whatever the job asked for.
  if 'SLURM_STEP_ID' not in environment or 'SLURM_PROCID' not in environment:
    return False
  # mpirun's processes have the variables of the step in which it, or its
  # daemon on their host, runs: those tell of the daemons.
  sizes = ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'MV2_COMM_WORLD_SIZE')
  tasks = environment.get(_SLURM.size)
  return all(environment.get(name, '1') in ('1', tasks) for name in sizes)


def find(environment: Mapping[str, str]) -> Launcher | None:
  """The first launcher whose variables are set; None: there is none.

  Raises:
    ConfigError: if some of its variables are set and others are missing.
  """
  if not _is_torchrun(environment) and _is_slurm_step(environment):
    return _SLURM
  for launcher in (_TORCHRUN,) if _is_torchrun(environment) else _LAUNCHERS:
    missing = [name for name in (launcher.rank, launcher.size) if name not in environment]
    if not missing:
      return launcher
    # RANK alone may be anybody's, and the number of all is that of PMI, too.
    is_started = launcher.rank in environment or (
      # On a TPU this address alone is enough: the pod tells the rest.
      launcher.address in environment and 'TPU_WORKER_HOSTNAMES' not in environment
    )
    if is_started and launcher is not _TORCHRUN:
      raise config_lib.ConfigError(
        f'{launcher.name} started this process without {" and ".join(missing)}: {_FLAGS}'
      )
  return None


def first_process(
  launcher: Launcher, environment: Mapping[str, str], is_one_host: bool
) -> tuple[str, str]:
  """Returns the host of process 0, and its port or ''.

  Args:
    launcher: launcher of this process.
    environment: variables.
    is_one_host: whether all processes run on this host.

  Raises:
    ConfigError: if the variables do not tell the host.
  """
  if launcher is _SLURM:
    return first_host(environment.get('SLURM_STEP_NODELIST', '')), ''
  # mpirun's own address (Open MPI 4): process 0 runs where mpirun was typed,
  # unless a host file says otherwise. It counts before MASTER_ADDR, which mpirun
  # hands to this host only.
  if match := re.search(r'tcp://([0-9.]+)', environment.get('OMPI_MCA_orte_hnp_uri', '')):
    return '127.0.0.1' if is_one_host else match[1], ''
  if host := environment.get('MASTER_ADDR'):
    # At MASTER_PORT torchrun itself listens.
    return host, '' if _is_torchrun(environment) else environment.get('MASTER_PORT', '')
  if is_one_host:
    return '127.0.0.1', ''
  raise config_lib.ConfigError(
    f'{launcher.name} does not tell where process 0 runs: give main.py --coordinator=HOST:PORT'
  )


def first_host(node_list: str) -> str:
  """The first host of Slurm's short form: 'gpu[03-05,9],login' -> 'gpu03'."""
  # A comma within brackets does not end the first name.
  match = re.match(r'(?:[^,\[]|\[[^\]]*\])*', node_list)
  assert match  # at least ''
  return re.sub(r'\[([^\],-]*)[^\]]*\]', r'\1', match[0])
