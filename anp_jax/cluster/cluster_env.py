"""This process among those of a run, as its launcher describes it."""

from collections.abc import Mapping
import os
import re
from typing import NamedTuple
import zlib

from anp_jax import config as config_lib
from anp_jax.cluster import launchers, tpu_metadata
from anp_jax.system import xla_flags

# Below the ports that systems hand out by themselves, and those of srun.
_FIRST_PORT, _PORTS = 20480, 8192
# Ports that process 0 tries in turn, so far apart that those of another job
# rarely follow on one.
_CANDIDATES, _STRIDE = 8, 1021


class ClusterEnv(NamedTuple):
  """One process among those of a run.

  Attributes:
    launcher: 'flags', 'TPU', one of `launchers`, JOIN or '' (one process).
    index: rank of this process.
    count: number of processes.
    coordinator_address: 'host:port' of process 0; '' for one process.
    local_index: rank among the processes of this host; -1 where unknown.
    num_hosts: lower bound on the number of hosts; 0 where unknown.
    token: identifier of this launch, the same in all of its processes.
    secret: the run's secret, see `secret.for_run`; '' for one process.
    other_ports: ports that process 0 tries in turn if the first is taken.
  """

  launcher: str = ''
  # Names of tuple's methods, which nobody calls here.
  index: int = 0  # type: ignore[assignment]
  count: int = 1  # type: ignore[assignment]
  coordinator_address: str = ''
  local_index: int = -1
  num_hosts: int = 0
  token: str = ''
  secret: str = ''
  other_ports: tuple[int, ...] = ()


ALONE = ClusterEnv()
JOIN = 'join'  # the launcher of a process that comes to a run


def detect(
  coordinator: str | None = None,
  count: int | None = None,
  index: int | None = None,
  environment: Mapping[str, str] = os.environ,
) -> ClusterEnv:
  """Reads flags, else a launcher's variables, else it is one process.

  Args:
    coordinator: 'host:port'; alone, it replaces what a launcher would choose.
    count: number of processes.
    index: rank of this process.
    environment: variables.

  Returns:
    The ClusterEnv; its values are checked, nothing was connected.

  Raises:
    ConfigError: naming the flag or variable at fault.
  """
  if (count is None) != (index is None):
    names = ['process_id', 'num_processes']
    present, missing = names if count is None else reversed(names)
    raise config_lib.ConfigError(f'--{present} needs --{missing} as well')
  if count is not None and index is not None:
    return _checked(
      ClusterEnv('flags', index, count, coordinator or ''),
      '--num_processes',
      '--process_id',
      '--coordinator=HOST:PORT',
    )
  if env := _launched(environment, coordinator) or _tpu(environment, coordinator):
    return env
  if coordinator:
    raise config_lib.ConfigError(
      f'--coordinator={coordinator} needs --num_processes and --process_id '
      '(no launcher that is known here started this process)'
    )
  return ALONE


def split_address(address: str) -> tuple[str, int]:
  """Splits 'host:port'; IPv6 is '[::1]:port'.

  Raises:
    ConfigError: if it is not of that form.
  """
  match = re.fullmatch(r'(?:\[([^\]]+)\]|([^:\s]+)):([0-9]{1,5})', address)
  if not match or not 0 < int(match[3]) < 65536 or not _is_host(match[1] or match[2]):
    raise config_lib.ConfigError(
      f'coordinator {address!r}: expected HOST:PORT, such as node1:20480'
    )
  return match[1] or match[2], int(match[3])


def joined(host: str, port: int) -> str:
  """Joins what `split_address` splits."""
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def _is_host(name):
  """Whether a name can be looked up: none of its labels is empty or too long."""
  try:
    name.encode('idna')
  except UnicodeError:
    return False
  return True


def _launched(environment, coordinator):
  """Reads the variables of one of `launchers`."""
  launcher = launchers.find(environment)
  if launcher is None:
    return None
  count = _number(environment, launcher.size)
  if count == 1:
    return ClusterEnv(launcher.name, num_hosts=1, local_index=0)
  job = [environment[name] for name in launcher.job if environment.get(name)]
  num_hosts = 0
  if launcher.num_hosts:
    num_hosts = _number(environment, launcher.num_hosts)
  elif local_count := environment.get(launcher.local_size):
    num_hosts = 1 if local_count == str(count) else 2
  address, other_ports = coordinator or environment.get(launcher.address), ()
  if not address:
    host, port = launchers.first_process(launcher, environment, num_hosts == 1)
    address, other_ports = _address(environment, '', host, *job, port=port)
  has_local = launcher.local_rank in environment
  return _checked(
    ClusterEnv(
      launcher.name,
      _number(environment, launcher.rank),
      count,
      address,
      _number(environment, launcher.local_rank) if has_local else -1,
      num_hosts,
      '.'.join(job),
      other_ports=other_ports,
    ),
    launcher.size,
    launcher.rank,
    '--coordinator',
  )


def _tpu(environment, coordinator):
  """Reads what GKE sets on each worker, or else the metadata server."""
  if (
    'TPU_WORKER_HOSTNAMES' not in environment
    and 'TPU_SKIP_MDS_QUERY' not in environment
    and xla_flags.platform(environment) == 'tpu'
  ):
    environment = {**tpu_metadata.variables(environment), **environment}
  names = environment.get('TPU_WORKER_HOSTNAMES', '')
  hosts = [n.strip() for n in names.split(',') if n.strip()]
  slices = environment.get('MEGASCALE_NUM_SLICES') or '1'
  if slices != '1':
    raise config_lib.ConfigError(
      f'MEGASCALE_NUM_SLICES={slices}: expected 1 slice of TPUs; over several, '
      'give --coordinator, --num_processes and --process_id'
    )
  if len(hosts) < 2:
    return None
  address, other_ports = _address(environment, coordinator, hosts[0])
  return _checked(
    ClusterEnv(
      'TPU',
      _number(environment, 'TPU_WORKER_ID'),
      len(hosts),
      address,
      0,
      len(hosts),
      environment.get('TPU_NAME', ''),
      other_ports=other_ports,
    ),
    'TPU_WORKER_HOSTNAMES',
    'TPU_WORKER_ID',
    '--coordinator',
  )


def _address(environment, coordinator, host, *job, port=''):
  """The address of process 0, and the ports that it tries if that one is taken."""
  if coordinator:
    return coordinator, ()
  ports = [port or environment.get('JAX_COORDINATOR_PORT')]
  if not ports[0]:
    # Derived from the job, so that jobs on one host rarely collide.
    number = zlib.crc32(os.fsencode('.'.join(job)))
    ports = [_FIRST_PORT + (number + i * _STRIDE) % _PORTS for i in range(_CANDIDATES)]
  return joined(host, ports[0]), tuple(ports[1:])


def _checked(env, count_name, index_name, address_name):
  if env.count < 1:
    raise config_lib.ConfigError(f'{count_name}={env.count}: expected 1 or more processes')
  if not 0 <= env.index < env.count:
    raise config_lib.ConfigError(
      f'{index_name}={env.index}: expected a number from 0 to '
      f'{env.count - 1}, as there are {env.count} processes'
    )
  if env.count == 1:
    return env._replace(coordinator_address='')
  if not env.coordinator_address:
    raise config_lib.ConfigError(
      f'{env.count} processes need {address_name}, where process 0 is met'
    )
  host, port = split_address(env.coordinator_address)
  if env.num_hosts > 1 and is_loopback_name(host):
    raise config_lib.ConfigError(
      f'coordinator {env.coordinator_address!r} is a loopback address: of '
      'several hosts, each would only find itself'
    )
  if env.num_hosts == 1 and not is_loopback_name(host):
    # No other host needs to reach it.
    return env._replace(coordinator_address=f'127.0.0.1:{port}')
  return env


def is_loopback_name(host: str) -> bool:
  """Whether a name or address means the host itself; nothing is resolved."""
  host = host.lower().removeprefix('::ffff:')  # IPv4 in IPv6's form
  return bool(
    re.fullmatch(r'(ip6-)?localhost[46]?(\..*)?|ip6-loopback|127(\.[0-9]+){1,3}', host)
    # To connect to no address is to connect to oneself.
    or host in ('::1', '::', '0.0.0.0')
  )


def _number(environment, name):
  text = environment.get(name)
  if text is None:
    raise config_lib.ConfigError(f'{name} is not set, though others of its launcher are')
  if not re.fullmatch(r'\s*-?[0-9]+\s*', text):
    raise config_lib.ConfigError(f'{name}={text!r}: expected a number')
  return int(text)
