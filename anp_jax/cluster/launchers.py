"""Launchers that number their processes by variables and know no hosts.

These are torchrun, JAX's own variables, MVAPICH, PALS, MPICH and Intel MPI. A
process that one of them started is never taken for a lone one.
"""

from collections.abc import Mapping
from typing import NamedTuple

from anp_jax import config as config_lib


class Launch(NamedTuple):
  """A launcher, and the names of its variables.

  Attributes:
    launcher: its name.
    index: variable of this process's number.
    count: variable of the number of processes.
    local_index: variable of this process's number on its host; '' for none.
    local_count: variable of the number of processes on its host; '' for none.
    address: variable of 'host:port' of process 0; '' for none.
  """

  launcher: str
  index: str
  count: str
  local_index: str = ''
  local_count: str = ''
  address: str = ''


# PALS sets the variables of PMI too, and none of its own for the number of all.
_LAUNCHES = (
  Launch('torchrun', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'),
  Launch('JAX', 'JAX_PROCESS_ID', 'JAX_NUM_PROCESSES', address='JAX_COORDINATOR_ADDRESS'),
  Launch(
    'MVAPICH',
    'MV2_COMM_WORLD_RANK',
    'MV2_COMM_WORLD_SIZE',
    'MV2_COMM_WORLD_LOCAL_RANK',
    'MV2_COMM_WORLD_LOCAL_SIZE',
  ),
  Launch('PALS', 'PALS_RANKID', 'PMI_SIZE', 'PALS_LOCAL_RANKID', 'PALS_LOCAL_SIZE'),
  Launch('MPICH or Intel MPI', 'PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID', 'MPI_LOCALNRANKS'),
)
_TYPE = 'give main.py --coordinator=HOST:PORT, --num_processes and --process_id'


def find(environment: Mapping[str, str]) -> Launch | None:
  """The first launcher whose variables are set; None: there is none.

  Raises:
    ConfigError: if some of its variables are set and others are missing.
  """
  for launch in _LAUNCHES:
    names = [launch.index, launch.count]
    present = [name for name in names if name in environment]
    if len(present) == 2:
      return launch
    # RANK alone may be anybody's, and the number of all is that of PMI, too.
    is_started = launch.index in environment or launch.address in environment
    if is_started and launch.launcher != 'torchrun':
      missing = ' and '.join(n for n in names if n not in environment)
      raise config_lib.ConfigError(
        f'{launch.launcher} started this process, but {missing} is not set: {_TYPE}'
      )
  return None


def first_address(launch: Launch, environment: Mapping[str, str], port: int) -> str:
  """'host:port' of process 0.

  Args:
    launch: that has started this process.
    environment: variables.
    port: for a host whose port the variables do not tell.

  Raises:
    ConfigError: if the variables do not tell the host.
  """
  if address := environment.get(launch.address):
    return address
  host = environment.get('MASTER_ADDR')
  count, local_count = launch.count, launch.local_count
  if not host and environment[count] == environment.get(local_count):
    host = '127.0.0.1'
  if not host:
    raise config_lib.ConfigError(
      f'{launch.launcher} does not tell where process 0 runs: give main.py --coordinator=HOST:PORT'
    )
  # At MASTER_PORT torchrun itself listens.
  chosen = environment.get('MASTER_PORT', port)
  if 'TORCHELASTIC_RUN_ID' in environment:
    chosen = port
  return f'[{host}]:{chosen}' if ':' in host else f'{host}:{chosen}'


def job_names(environment: Mapping[str, str]) -> list[str]:
  """What tells this launch from others on its hosts, as far as it is known."""
  names = (
    'TORCHELASTIC_RUN_ID',
    'TORCHELASTIC_RESTART_COUNT',
    'MASTER_PORT',
    'PALS_APID',
    'PBS_JOBID',
    'LSB_JOBID',
    'SLURM_JOB_ID',
    'SLURM_STEP_ID',
  )
  return [environment[name] for name in names if environment.get(name)]
