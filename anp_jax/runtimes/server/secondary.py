"""The servers after the first: each keeps a slice, in server 0's order."""

import contextlib
import threading
import time

import jax
from pyarrow import flight

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.server import parameter_store as keeper_lib
from anp_jax.runtimes.server import rendezvous
from anp_jax.runtimes.server import service as service_lib
from anp_jax.runtimes.server import worker as worker_lib

_RETRY = 0.3  # seconds between two attempts to reach server 0


class Follower:
  """Server k > 0: gets its slice from server 0, and then the order.

  Attributes:
    done: answers heard: while it grows, this server lives.
  """

  def __init__(
    self, index: int, config, workdir: str, place, card: dict, launched: float
  ):  # fmt: skip
    """Makes it; `run` opens the port.

    Args:
      index: of the server.
      config: the run's config.
      workdir: of the run.
      place: of this process.
      card: of this process, see `cluster.process_info`.
      launched: see `meeting.launched`.
    """
    self.done = 0
    self._index = index
    self._config = config
    self._workdir = workdir
    self._place = place
    self._card = card
    self._launched = launched
    self._closed = threading.Event()
    self._shard = None

  def close(self) -> None:
    """Serves no more."""
    self._closed.set()

  def run(self, connect, prepare) -> None:
    """Serves until the run is over.

    Args:
      connect: () -> `wire.Client` of server 0.
      prepare: what server 0 says -> `setup.Setup`.

    Raises:
      ConfigError: if this process does not go with server 0.
      cluster.Lost: if server 0 has not answered for
        config.cluster.rendezvous_timeout.
      cluster.Failed: if the run has failed.
    """
    # However this ends: who called a port that is left open while Python shuts
    # down would take the process down.
    with contextlib.ExitStack() as ports:
      self._follow(connect, prepare, ports)

  def _follow(self, connect, prepare, ports):
    """Term after term."""
    service, token = None, None
    patience = self._config.cluster.rendezvous_timeout
    heard = time.monotonic()
    while not self._closed.is_set():
      try:
        desk = connect()
        current = rendezvous.read(self._workdir)[1]
        if token != current:  # server 0 has been started again
          ports.close()
          service = rendezvous.open_service(
            self._config, self._place, self._workdir
          )
          ports.callback(service.shutdown)
          token = current
        said = desk.ask(
          'join', server=self._index, address=service.address, card=self._card
        )
        heard = time.monotonic()
        self.done += 1
        if 'problem' in said:
          raise config_lib.ConfigError(said['problem'])
        if 'term' in said:
          self._serve(service, desk, said, prepare)
          return
      except worker_lib.BROKEN as e:
        # One that has just been started waits: that was the run before.
        if rendezvous.is_over(e, 0 if self._shard else self._launched):
          return
        if time.monotonic() - heard > patience:
          raise cluster.Lost(
            f'server {self._index}: nothing from server 0 for {patience:g} s: '
            f'{worker_lib.line(e)}'
          ) from e
      time.sleep(_RETRY)

  def _serve(self, service, desk, said, prepare):
    """One term; raises when it is broken off."""
    name = said['term']
    if self._shard is None:
      self._shard = prepare(said).shards[self._index]
    like = self._shard.like
    _, data = desk.get('start', term=name, server=self._index)
    leaves = transport.split(data, jax.tree.leaves(like))
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    keeper = keeper_lib.Keeper(
      self._shard,
      jax.device_put(state, self._shard.device),
      service_lib.is_due(said),
      said['most'],
    )
    service.term = service_lib.Term(name, self._shard, keeper)
    version = keeper.version
    try:
      while not self._closed.is_set():
        found = self._entries(desk, name, version)
        self.done += 1
        for order, parts in found['entries']:
          keeper.submit(order, parts)
          version = order + 1
        if keeper.error:
          desk.ask('fail', term=name, text=keeper.error)
        if found['ended']:
          return
    finally:
      service.term = None
      keeper.close()

  def _entries(self, desk, name, version):
    """What follows; a moment's silence of server 0 is not its end."""
    deadline = time.monotonic() + 5
    while True:
      try:
        return desk.ask('entries', term=name, since=version, server=self._index)
      except flight.FlightUnavailableError as e:
        if 'another term' in str(e) or time.monotonic() > deadline:
          raise
        time.sleep(_RETRY)
