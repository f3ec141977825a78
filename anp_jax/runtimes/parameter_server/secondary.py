"""The servers after the first: each keeps a slice, in server 0's order."""

from collections.abc import Callable

import jax

from anp_jax import cluster
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  parameter_store,
  participant as participant_lib,
  service as service_lib,
  session as session_lib,
  setup as setup_lib,
)
from anp_jax.system import error_lines


class SecondaryServer:
  """Server k > 0: gets its slice from server 0, and then the order.

  Attributes:
    progress: requests made; grows while this server lives.
    version: updates applied to its slice.
  """

  def __init__(
    self,
    participant: participant_lib.Participant,
    service: service_lib.Service,
    prepare: Callable[[dict], setup_lib.Setup],
  ):
    """Prepares the server.

    Args:
      participant: this process; its index is the server's.
      service: port of the server, which `run` closes.
      prepare: server 0's settings -> setup.
    """
    self.progress = self.version = 0
    self._participant = participant
    self._service = service
    self._prepare = prepare

  def run(self) -> None:
    """Serves until the run is over.

    Raises:
      ConfigError: if this process's data are not server 0's.
      cluster.PeerLostError: if server 0 does not answer.
    """
    try:
      if settings := self._participant.invitation():
        self._serve(settings)
    finally:
      # A caller of a port that is left open while Python shuts down would take
      # the process down.
      self._service.shutdown()

  def _serve(self, settings):
    participant, index = self._participant, self._participant.env.index
    optimizer = self._prepare(settings).optimizers[index]
    chief = participant.connect(settings['servers'][0])
    try:
      _, data = chief.get('start', server=index)
    except transport.CONNECTION_ERRORS as e:
      raise cluster.PeerLostError(f'server 0: {error_lines.typed_line(e)}') from e
    start = transport.split(data, optimizer.abstract_state)
    store = parameter_store.ParameterStore(
      optimizer,
      jax.device_put(start, optimizer.device),
      session_lib.snapshot_test(settings),
      settings['max_pending'],
    )
    self._service.opened.set_result(session_lib.Session(store))
    version = store.version
    while not participant.over.is_set():
      self.version = store.version
      self.progress += 1
      try:
        for order, contributions in chief.ask('updates', server=index, since=version)['updates']:
          store.submit(order, contributions)
          version = order + 1
        if store.error:
          chief.ask('fail', text=store.error)
      except transport.CONNECTION_ERRORS:  # if it is lost, so is this process soon
        participant.over.wait(participant_lib.RETRY)
    store.close()
    chief.close()
