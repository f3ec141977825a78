"""Where the processes of a run are, for those that join it or ask, and whether it has ended."""

from collections.abc import Mapping
import contextlib
import itertools
import json
import os
import socket
import sys
import time

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env, connection as connection_lib, generation
from anp_jax.system import files

NAME = 'members.json'  # in a workdir
_ANSWERS_WITHIN = 5.0  # seconds, a host
_GREETS_WITHIN = 1.0  # seconds, who coordinates
_COORDINATOR, _ENDED = 'coordinator', 'ended'  # its keys, but for ranks


def newcomer(workdir: str | None, env: cluster_env.ClusterEnv) -> cluster_env.ClusterEnv:
  """Returns the place of a process that joins the run in a workdir, if that has not ended.

  Args:
    workdir: folder of the run.
    env: place by its launcher, which it takes where the run has not written down who
      takes part, or all who did are dead: then the others come back, too.

  Raises:
    ConfigError: if there is no such run.
  """
  if not workdir:
    raise config_lib.ConfigError('--join needs --workdir as well')
  addresses = read_addresses(workdir, env.coordinator_address)
  # A launch of one process joins: it was not one of several that were lost.
  all_lost = env.count > 1 and not any(map(_is_there, addresses.values()))
  if env.launcher and (not addresses or all_lost):
    if addresses:  # one of them may be opened again, by a process that comes back before others
      write(workdir, {})
    return env._replace(launcher=cluster_env.JOIN) if env.count > 1 else env
  if not addresses:
    raise config_lib.ConfigError(
      f'{workdir}/{NAME} names no process to join; expected the workdir of a run that goes on, '
      'with several processes and config.cluster.elastic=auto'
    )
  index = next(i for i in itertools.count() if i not in addresses)
  return cluster_env.ClusterEnv(cluster_env.JOIN, index, len(addresses) + 1)


def connect(workdir: str, secret: str, patience: float, seconds: float) -> socket.socket:
  """Connects to the coordinator of the run that goes on in a workdir.

  Its processes may be restarting, and write down where they are only then.

  Args:
    workdir: folder of the run.
    secret: the run's secret.
    patience: seconds until a process that does not answer is done without.
    seconds: time after which nobody is looked for any more.

  Raises:
    ConfigError: if none answers.
  """
  deadline = time.monotonic() + seconds
  while True:
    addresses, coordinator = _read(workdir)
    addresses = addresses or coordinator
    search = generation.FIRST._replace(rank=max(addresses, default=-1) + 1, addresses=addresses)
    if connected := connection_lib.find(search, secret, patience):
      return connected
    if time.monotonic() > deadline:
      raise config_lib.ConfigError(f'no process of the run in {workdir} answers')
    time.sleep(1)


def check(workdir: str) -> None:
  """Refuses a folder in which no run of several processes has begun.

  Raises:
    ConfigError: naming the file.
  """
  if not any(_read(workdir)):
    raise config_lib.ConfigError(
      f'{workdir}/{NAME} names no process; expected the workdir of a run of several processes'
    )


def write(
  workdir: str, addresses: Mapping[int, tuple], coordinator: str = '', ended: str | None = None
) -> None:
  """Writes where the processes of a run listen, or that it has ended.

  Args:
    workdir: folder of the run.
    addresses: host and port of each process by rank; {}: nobody may join.
    coordinator: host and port of the coordinator; '': the run has one process.
    ended: where its launcher had the processes of a run meet that has ended.
  """
  path = os.path.join(workdir, NAME)
  record: dict = dict(addresses) if ended is None else {_ENDED: ended}
  if coordinator:
    record[_COORDINATOR] = coordinator
  with contextlib.suppress(OSError):  # a full disk: nobody can join, and the run goes on
    if record or os.path.exists(path):
      files.write_atomic(path, json.dumps(record))


def forget_end(workdir: str) -> None:
  """Removes the record of an earlier end, before another run's processes meet."""
  if _ENDED in files.read_json_object(os.path.join(workdir, NAME)):
    write(workdir, {})


def read_addresses(workdir: str, meeting: str = '') -> dict[int, tuple[str, int]]:
  """Returns where the processes of the run in a workdir listen, by rank; {}: nobody may join.

  Where the run has ended, this process ends with status 0.

  Args:
    workdir: folder of the run.
    meeting: where the launcher has the processes meet: the end of a run that met
      elsewhere does not count; '': any does.
  """
  return _read(workdir, meeting)[0]


def _is_there(address):
  """Whether a process may live, as nothing refuses its port, which it keeps in a restart."""
  try:
    with socket.create_connection(address, _ANSWERS_WITHIN) as connection:
      connection.settimeout(_GREETS_WITHIN)
      connection.recv(1024)  # the challenge: who hangs up before it looks like a stranger
  except OSError as e:
    return not isinstance(e, ConnectionRefusedError)
  return True


def _read(workdir, meeting=''):
  """The addresses, and that of process 0 where the run has a coordinator."""
  path = os.path.join(workdir, NAME)
  record = files.read_json_object(path)
  ended, coordinator = record.pop(_ENDED, None), record.pop(_COORDINATOR, '')
  if ended is not None and meeting in ('', ended):
    print(f'the run in {workdir} has ended', flush=True)
    sys.exit(0)
  try:
    first = {0: cluster_env.split_address(coordinator)} if coordinator else {}
    addresses = generation.addresses(record)
    for address in addresses.values():
      cluster_env.split_address(cluster_env.joined(*address))
  except (TypeError, ValueError):
    raise config_lib.ConfigError(
      f'{path} is damaged: expected the host and port of each process'
    ) from None
  return addresses, first
