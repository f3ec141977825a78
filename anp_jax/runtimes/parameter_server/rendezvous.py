"""How the processes of a run find server 0: by a file in the workdir."""

from collections.abc import Callable
import dataclasses
import json
import os
import secrets
import threading
import time

import ml_collections

from anp_jax import cluster, config as config_lib
from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import service as service_lib
from anp_jax.system import files

NAME = 'server0.json'
RETRY = 0.3  # seconds between two attempts to reach server 0


class RunEndedError(OSError):
  """The run that was last in this workdir has ended.

  Attributes:
    record: what stands in the workdir, see `Participant.announce_end`.
  """

  def __init__(self, record: dict):
    self.record = record
    failed = record['over']
    super().__init__(f'the run in this workdir has ended{": " if failed else ""}{failed}')


def launch_id(env: cluster_env.ClusterEnv) -> str:
  """Returns a name that no other launch has; '' if nobody gave it one.

  The processes of one launch share it, except where `scripts/restart_on_failure.sh` gives
  each its own; a process that is restarted keeps it.
  """
  return env.token or os.environ.get('ANP_LAUNCHED', '')


def last_record(workdir: str) -> dict:
  """Returns what the last server 0 of a workdir left there; {} if nothing."""
  try:
    with open(os.path.join(workdir, NAME)) as f:
      return json.load(f)
  except (FileNotFoundError, PermissionError, ValueError):
    return {}


@dataclasses.dataclass(frozen=True)
class Participant:
  """One process of a run, and how it reaches the others.

  Attributes:
    config: the run's config.
    workdir: folder that all processes see.
    env: environment of this process.
    process: this process, as server 0 compares it; see `cluster.process_info`.
    launch: name of its launch, see `launch_id`.
    before: `last_record` when this process started.
    secret: the run's secret, from `cluster.secret`.
    launches: launches of the processes that took part, as server 0 knows them.
  """

  config: ml_collections.ConfigDict
  workdir: str
  env: cluster_env.ClusterEnv
  process: dict
  launch: str
  before: dict
  secret: str = dataclasses.field(repr=False)
  launches: set = dataclasses.field(default_factory=set)

  def open_service(self) -> service_lib.Service:
    """Opens this server's port; server 0 writes its address to the workdir.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    is_chief = self.env.index == 0
    session = secrets.token_hex(8) if is_chief else read_address(self.workdir)[1]
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

  def admit(
    self,
    name: str,
    request: Callable[[], tuple[str, dict]],
    closed: threading.Event,
    is_server: bool = False,
  ) -> tuple[transport.Client, dict] | None:
    """Asks server 0 to let this process take part, until a session begins.

    Args:
      name: name of this member, for people.
      request: () -> name and arguments of the request; it may raise OSError.
      closed: set where nobody waits any more.
      is_server: whether to wait for as long as server 0 answers: it may evaluate.

    Returns:
      A client of server 0, and its answer; None where this member is to leave.

    Raises:
      ConfigError: if this process's config or code is not server 0's.
      cluster.PeerLostError: if no session has begun within
        config.cluster.rendezvous_timeout.
      cluster.RunFailedError: if the run has failed.
    """
    timeout = self.config.cluster.rendezvous_timeout
    deadline, reason = time.monotonic() + timeout, ''
    while time.monotonic() < deadline:
      if closed.is_set():
        return None
      try:
        action, arguments = request()
        chief = self.connect()
        answer = chief.ask(action, process=self.process, launch=self.launch, **arguments)
        if 'problem' in answer:
          raise config_lib.ConfigError(answer['problem'])
        if 'session' in answer:
          return chief, answer
        chief.close()
        reason = 'not all servers are there'
        if is_server:
          deadline = time.monotonic() + timeout
      except transport.CONNECTION_ERRORS as e:
        if self.is_over(e, name):
          return None
        reason = transport.describe_error(e)
      time.sleep(RETRY)
    raise cluster.PeerLostError(f'{name}: no session has begun within {timeout:g} s: {reason}')

  def is_over(self, error: Exception, name: str) -> bool:
    """Whether a call's error says that this process's run has ended.

    No clock decides: those of two hosts differ. A record of the end is of this
    process's run if its launch took part, or if it was not there when this
    process started. Else it is of a run before, and this one is waited for.

    Args:
      error: error of the call.
      name: name of the member that leaves then, for people.

    Raises:
      cluster.RunFailedError: if that run could not continue.
    """
    if not isinstance(error, RunEndedError):
      return False
    record = error.record
    took_part = self.launch and self.launch in record.get('launches', ())
    if not took_part and record == self.before:
      return False
    if record['over']:
      raise cluster.RunFailedError(record['over']) from error
    print(f'{name}: {error}: leaving')
    return True

  def announce_end(self, failed: str) -> None:
    """Leaves word for processes that return late that the run has ended.

    Args:
      failed: why it could not continue; '' if it ended well.
    """
    record = {
      'over': failed,
      'launches': sorted({self.launch, *self.launches} - {''}),
      # Tells it from the end of another run, which may have gone alike.
      'id': secrets.token_hex(8),
    }
    _write(self.workdir, record)


def read_address(workdir: str) -> tuple[str, str]:
  """Returns server 0's address, and a name that is new at each of its starts.

  Raises:
    OSError: where it has not started yet; RunEndedError, which is one, where the run
      has ended.
  """
  with open(os.path.join(workdir, NAME)) as f:
    record = json.load(f)
  if 'over' in record:
    raise RunEndedError(record)
  return record['address'], record['session']


def _write(workdir, record):
  files.write_atomic(os.path.join(workdir, NAME), json.dumps(record), mode=0o600)
