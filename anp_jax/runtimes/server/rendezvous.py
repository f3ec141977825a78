"""How the processes of a run find server 0: by a file in the workdir."""

import json
import os
import secrets
import time

from anp_jax import cluster
from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.server import service as service_lib

NAME = 'server0.json'


class Over(OSError):
  """The run that was last in this workdir has ended.

  Attributes:
    failed: why it could not go on; '' if it ended well.
    when: it did, in seconds since 1970.
  """

  def __init__(self, failed: str, when: float):
    self.failed, self.when = failed, when
    super().__init__(
      f'the run in this workdir has ended{": " if failed else ""}{failed}'
    )


def launched() -> float:
  """When this process's run was started, in seconds since 1970.

  A process that `scripts/again.sh` starts again is of the run that it was of.
  """
  return float(os.environ.get('ANP_LAUNCHED') or time.time())


def is_over(error: Exception, since: float) -> bool:
  """Whether an error says that a run which was there at `since` is over.

  Args:
    error: of a call.
    since: seconds since 1970.

  Raises:
    cluster.Failed: if that run could not go on.
  """
  if not isinstance(error, Over) or error.when < since:
    return False
  if error.failed:
    raise cluster.Failed(error.failed) from error
  return True


def open_service(config, place: cluster_env.ClusterEnv, workdir: str):
  """Opens this server's port; server 0 writes down where it is.

  The file holds the run's token too, and only its owner may read it.

  Args:
    config: the run's config.
    place: of this process.
    workdir: that all processes see.

  Returns:
    `service.Service`.

  Raises:
    ConfigError: if the port cannot be opened.
  """
  token = read(workdir)[1] if place.index else secrets.token_hex(32)
  service = service_lib.Service(config, place, token)
  if not place.index:
    _write(workdir, {'address': service.address, 'token': token})
  return service


def close(workdir: str, failed: str) -> None:
  """Leaves word for those who come back late that the run has ended.

  Args:
    workdir: of the run.
    failed: why it could not go on; '' if it ended well.
  """
  _write(workdir, {'over': failed, 'when': time.time()})


def read(workdir: str) -> tuple[str, str]:
  """(address, token) of server 0.

  Raises:
    OSError: where it has not come yet; Over, which is one, where it has left.
  """
  with open(os.path.join(workdir, NAME)) as f:
    found = json.load(f)
  if 'over' in found:
    raise Over(found['over'], found.get('when', 0.0))
  return found['address'], found['token']


def connect(
  config, workdir: str, address: str | None = None
) -> transport.Client:
  """A client of a server, by default of server 0.

  Raises:
    OSError: where server 0 has not come yet.
  """
  first, token = read(workdir)
  return transport.connect(config, address or first, token)


def _write(workdir, content):
  path = os.path.join(workdir, NAME)
  new = f'{path}.{os.getpid()}'
  with open(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), 'w') as f:
    json.dump(content, f)
  os.replace(new, path)
