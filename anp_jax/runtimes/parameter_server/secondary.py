"""The servers after the first: each keeps a slice, in server 0's order."""

import contextlib
import threading
import time

import jax
from pyarrow import flight

from anp_jax import cluster, config as config_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  parameter_store,
  rendezvous,
  service as service_lib,
  session as session_lib,
)

_RETRY = 0.3  # seconds between two attempts to reach server 0
_SILENCE = 5.0  # seconds without server 0 before its session counts as lost


class SecondaryServer:
  """Server k > 0: gets its slice from server 0, and then the order.

  Attributes:
    progress: answers received; grows while this server lives.
  """

  def __init__(self, participant: rendezvous.Participant, prepare):
    """Prepares the server; `run` opens the port.

    Args:
      participant: this process; its index is the server's.
      prepare: server 0's settings -> `setup.Setup`.
    """
    self.progress = 0
    self._index = participant.env.index
    self._participant = participant
    self._prepare = prepare
    self._closed = threading.Event()
    self._optimizer = None

  def close(self) -> None:
    """Makes `run` return soon."""
    self._closed.set()

  def run(self) -> None:
    """Serves until the run is over.

    Raises:
      ConfigError: if this process's config or code is not server 0's.
      cluster.PeerLostError: if server 0 has not answered for
        config.cluster.rendezvous_timeout.
      cluster.RunFailedError: if the run has failed.
    """
    # However this ends: a caller of a port that is left open while Python shuts
    # down would take the process down.
    with contextlib.ExitStack() as ports:
      self._run(ports)

  def _run(self, ports):
    """Serves session after session."""
    service, start = None, None
    participant = self._participant
    timeout = participant.config.cluster.rendezvous_timeout
    last_answer = time.monotonic()
    while not self._closed.is_set():
      try:
        chief = participant.connect()
        current = rendezvous.read_address(participant.workdir)[1]
        if start != current:  # server 0 has been restarted
          ports.close()
          service = participant.open_service()
          ports.callback(service.shutdown)
          start = current
        answer = chief.ask(
          'join',
          server=self._index,
          address=service.address,
          process=participant.process,
          launch=participant.launch,
        )
        last_answer = time.monotonic()
        self.progress += 1
        if 'problem' in answer:
          raise config_lib.ConfigError(answer['problem'])
        if 'session' in answer:
          self._serve(service, chief, answer)
          return
      except transport.CONNECTION_ERRORS as e:
        if participant.is_over(e, f'server {self._index}'):
          return
        if time.monotonic() - last_answer > timeout:
          raise cluster.PeerLostError(
            f'server {self._index}: nothing from server 0 for {timeout:g} s: '
            f'{transport.describe_error(e)}'
          ) from e
      time.sleep(_RETRY)

  def _serve(self, service, chief, settings):
    """Serves one session; raises when it is broken off."""
    session = settings['session']
    if self._optimizer is None:
      try:
        self._optimizer = self._prepare(settings).optimizers[self._index]
      except config_lib.ConfigError as e:
        chief.ask('fail', session=session, text=str(e))  # it needs this server
        raise
    store = parameter_store.ParameterStore(
      self._optimizer,
      self._fetch_start(chief, session),
      session_lib.snapshot_test(settings),
      settings['max_pending'],
    )
    service.session = session_lib.Session(session, store)
    version = store.version
    try:
      while not self._closed.is_set():
        answer = self._fetch_updates(chief, session, version)
        self.progress += 1
        for order, contributions in answer['updates']:
          store.submit(order, contributions)
          version = order + 1
        if store.error:
          chief.ask('fail', session=session, text=store.error)
        if answer['ended']:
          return
    finally:
      service.session = None
      store.close()

  def _fetch_start(self, chief, session):
    """The SliceState that server 0 begins the session with."""
    _, data = chief.get('start', session=session, server=self._index)
    state = service_lib.unpack_state(self._optimizer, data)
    return jax.device_put(state, self._optimizer.device)

  def _fetch_updates(self, chief, session, version):
    """The updates from a version on; server 0 may be silent for a moment."""
    deadline = time.monotonic() + _SILENCE
    while True:
      try:
        return chief.ask('updates', session=session, since=version, server=self._index)
      except flight.FlightUnavailableError as e:
        if 'another session' in str(e) or time.monotonic() > deadline:
          raise
        time.sleep(_RETRY)
