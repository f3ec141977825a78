"""How the processes of a run find server 0: by a file in the workdir."""

import dataclasses
import json
import os
import secrets
import time

from anp_jax import cluster
from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.server import service as service_lib
from anp_jax.system import files

NAME = 'server0.json'


class RunEnded(OSError):
  """The run that was last in this workdir has ended.

  Attributes:
    failed: why it could not continue; '' if it ended well.
    when: it did, in seconds since 1970.
  """

  def __init__(self, failed: str, when: float):
    self.failed, self.when = failed, when
    super().__init__(
      f'the run in this workdir has ended{": " if failed else ""}{failed}'
    )


def launch_time() -> float:
  """Returns when this process's run was started, in seconds since 1970.

  A process that `scripts/again.sh` restarts belongs to the run of its first
  start.
  """
  return float(os.environ.get('ANP_LAUNCHED') or time.time())


@dataclasses.dataclass(frozen=True)
class Participant:
  """One process of a run, and how it reaches the others.

  Attributes:
    config: the run's config.
    workdir: that all processes see.
    env: of this process.
    process: this process, as server 0 compares it; see `cluster.process_info`.
    launched: see `launch_time`.
    secret: of the run, from `cluster.secret`.
  """

  config: object
  workdir: str
  env: cluster_env.ClusterEnv
  process: dict
  launched: float
  secret: str = dataclasses.field(repr=False)

  def open_service(self) -> service_lib.Service:
    """Opens this server's port; server 0 writes its address to the workdir.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    is_chief = self.env.index == 0
    session = (
      secrets.token_hex(8) if is_chief else read_address(self.workdir)[1]
    )
    service = service_lib.Service(
      self.config, self.env, transport.session_token(self.secret, session)
    )
    if is_chief:
      _write(self.workdir, {'address': service.address, 'session': session})
    return service

  def connect(self, address: str | None = None) -> transport.Client:
    """Returns a client of a server, by default of server 0.

    Raises:
      ConfigError: for an address that is not 'host:port'.
      OSError: where server 0 has not started yet.
    """
    chief, session = read_address(self.workdir)
    token = transport.session_token(self.secret, session)
    return transport.connect(self.config, address or chief, token)

  def is_over(self, error: Exception, has_joined: bool) -> bool:
    """Whether a call's error says that this process's run has ended.

    Args:
      error: of the call.
      has_joined: whether this process has met server 0. One that has just been
        started waits: the file may be of the run before.

    Raises:
      cluster.Failed: if that run could not continue.
    """
    since = 0 if has_joined else self.launched
    if not isinstance(error, RunEnded) or error.when < since:
      return False
    if error.failed:
      raise cluster.Failed(error.failed) from error
    return True


def announce_end(workdir: str, failed: str) -> None:
  """Leaves word for processes that return late that the run has ended.

  Args:
    workdir: of the run.
    failed: why it could not continue; '' if it ended well.
  """
  _write(workdir, {'over': failed, 'when': time.time()})


def read_address(workdir: str) -> tuple[str, str]:
  """Returns server 0's address, and a name that is new at each of its starts.

  Raises:
    OSError: where it has not started yet; RunEnded, which is one, where the run
      has ended.
  """
  with open(os.path.join(workdir, NAME)) as f:
    record = json.load(f)
  if 'over' in record:
    raise RunEnded(record['over'], record.get('when', 0.0))
  if 'session' not in record:
    raise OSError(f'{NAME} is that of an earlier version')
  return record['address'], record['session']


def _write(workdir, record):
  files.write_atomic(
    os.path.join(workdir, NAME), json.dumps(record), mode=0o600
  )
