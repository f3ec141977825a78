"""The servers after the first: each keeps a slice, in server 0's order."""

from collections.abc import Callable
import threading
import time

import jax
from pyarrow import flight

from anp_jax import config as config_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  parameter_store,
  rendezvous,
  service as service_lib,
  session as session_lib,
  setup as setup_lib,
  slice_optimizer,
)

_SILENCE = 5.0  # seconds without server 0 before its session counts as lost


class SecondaryServer:
  """Server k > 0: gets its slice from server 0, and then the order.

  Attributes:
    progress: requests made; grows while this server lives.
  """

  def __init__(
    self, participant: rendezvous.Participant, prepare: Callable[[dict], setup_lib.Setup]
  ):
    """Prepares the server; `run` opens the port.

    Args:
      participant: this process; its index is the server's.
      prepare: server 0's settings -> setup.
    """
    self.progress = 0
    self._index = participant.env.index
    self._participant = participant
    self._prepare = prepare
    self._closed = threading.Event()
    self._optimizer: slice_optimizer.SliceOptimizer | None = None
    self._service: service_lib.Service | None = None
    self._start = ''  # name of server 0's start that the port belongs to

  def close(self) -> None:
    """Makes `run` return soon."""
    self._closed.set()

  def run(self) -> None:
    """Serves until the run is over; raises as `Participant.admit`."""
    name = f'server {self._index}'
    try:
      while admitted := self._participant.admit(name, self._request, self._closed, True):
        try:
          self._serve(*admitted)
          return
        except transport.CONNECTION_ERRORS:
          time.sleep(rendezvous.RETRY)
    finally:
      # A caller of a port that is left open while Python shuts down would take
      # the process down.
      self._close_port()

  def _request(self):
    self.progress += 1
    start = rendezvous.read_address(self._participant.workdir)[1]
    if self._start != start:  # server 0 has been restarted
      self._close_port()
      self._service, self._start = self._participant.open_service(), start
    return 'join', {'server': self._index, 'address': self._service.address}

  def _close_port(self):
    if self._service:
      self._service.shutdown()
    self._service, self._start = None, ''

  def _serve(self, chief, settings):
    """Serves one session; raises when it is broken off."""
    session = settings['session']
    if self._optimizer is None:
      try:
        self._optimizer = self._prepare(settings).optimizers[self._index]
      except config_lib.ConfigError as e:
        chief.ask('fail', session=session, text=str(e))  # it needs this server
        raise
    _, data = chief.get('start', session=session, server=self._index)
    start = service_lib.unpack_state(self._optimizer, data)
    store = parameter_store.ParameterStore(
      self._optimizer,
      jax.device_put(start, self._optimizer.device),
      session_lib.snapshot_test(settings),
      settings['max_pending'],
    )
    self._service.session = session_lib.Session(session, store)
    version = store.version
    try:
      while not self._closed.is_set():
        answer = self._fetch_updates(chief, session, version)
        for order, contributions in answer['updates']:
          store.submit(order, contributions)
          version = order + 1
        if store.error:
          chief.ask('fail', session=session, text=store.error)
        if answer['ended']:
          return
    finally:
      self._service.session = None
      store.close()

  def _fetch_updates(self, chief, session, version):
    """The updates from a version on; server 0 may be silent for a moment."""
    deadline = time.monotonic() + _SILENCE
    while True:
      try:
        self.progress += 1
        return chief.ask('updates', session=session, since=version, server=self._index)
      except flight.FlightUnavailableError as e:
        if 'another session' in str(e) or time.monotonic() > deadline:
          raise
        time.sleep(rendezvous.RETRY)
