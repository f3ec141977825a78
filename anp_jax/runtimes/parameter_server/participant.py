"""A process of a run with parameter servers, and what server 0 tells it.

Each process but the first sends server 0 who it is. When the port of every server is
known, server 0 invites all of them, and those that come later as they come; at the end
it tells them that the run is over. All of that goes through the run's coordinator.
"""

from concurrent import futures
import contextlib
import dataclasses
import threading
import time
from typing import Any

import jax
import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport

RETRY = 0.3  # seconds between two attempts to reach a server
OVER = 'over'
_STARTED = time.time_ns()


@dataclasses.dataclass(frozen=True)
class Participant:
  """One process of a run, and how it reaches the servers.

  Attributes:
    config: the run's config.
    workdir: folder of the run.
    env: environment of this process, with the run's secret.
    over: set when the run is over, or this process fails.
    invited: settings from server 0, see `Chief`; None where the run is over before.
  """

  config: ml_collections.ConfigDict
  workdir: str
  env: cluster_env.ClusterEnv
  over: threading.Event = dataclasses.field(default_factory=threading.Event)
  invited: futures.Future = dataclasses.field(default_factory=futures.Future)

  @property
  def name(self) -> str:
    """Name of this start of the process; others take over when that is gone."""
    return f'{self.env.index}.{_STARTED:x}'

  def worker(self) -> list:
    """Describes this process as a worker: its name, its devices and their platform."""
    return [self.name, jax.local_device_count(), jax.default_backend()]

  def on_mail(self, rank: int, value: Any, why_lost: str = '') -> None:
    """Receives what server 0 tells."""
    del rank, why_lost
    if value == OVER:
      self.leave()
    else:
      self._answer(value)

  def leave(self) -> None:
    """Makes all that this process runs end soon."""
    self.over.set()
    self._answer(None)

  def invitation(self) -> dict | None:
    """Waits for the servers' endpoints and settings; None where the run is over.

    Raises:
      ConfigError: if server 0 cannot use this process.
    """
    value = self.invited.result()
    if value and 'problem' in value:
      raise config_lib.ConfigError(value['problem'])
    return value

  def connect(self, endpoint: list[str]) -> transport.Client:
    """Returns a client of a server, whose calls are made again before the watchdog ends all.

    Raises:
      ConfigError: for an address that is not 'host:port'.
    """
    timeout = self.config.cluster.stall_timeout / 2 or 600.0
    return transport.Client(self.config, endpoint, self.env.secret, timeout)

  def _answer(self, value):
    with contextlib.suppress(futures.InvalidStateError):  # it was invited before
      self.invited.set_result(value)
