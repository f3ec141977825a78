"""A server's port: Flight calls onto its session."""

from concurrent import futures
from typing import Any

import jax
import ml_collections
import numpy as np

from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import parameter_store, session as session_lib

_ACTIONS = ('release', 'take', 'check', 'commit', 'updates', 'fail')


class Service(transport.Port):
  """The Flight calls of one server.

  Attributes:
    opened: session of the server, once it has its slice.
  """

  def __init__(self, config: ml_collections.ConfigDict, env: cluster_env.ClusterEnv):
    """Opens the port; arguments are those of `transport.Port`."""
    self.opened: futures.Future[session_lib.Session] = futures.Future()
    super().__init__(config, env, 'a server')

  def act(self, name: str, request: dict) -> dict:
    """Answers small requests; see the methods of `session.ChiefSession`."""
    session = self.opened.result(session_lib.PATIENCE)
    if name not in _ACTIONS or not isinstance(session, session_lib.ChiefSession):
      raise parameter_store.InvalidMessageError(f'nothing is called {name!r} here')
    return getattr(session, name)(**request) or {}

  def answer(self, name: str, **request: Any) -> tuple[dict, list[np.ndarray]]:
    """Returns weights for a worker, or a slice for another server."""
    try:
      session = self.opened.result(session_lib.PATIENCE)
    except TimeoutError:
      return {'wait': True}, []
    if name == 'weights':
      return _weights(session, request)
    if name == 'start' and isinstance(session, session_lib.ChiefSession):
      state = session.starts[request['server']]
    elif name == 'snapshot':
      state = session.store.snapshot(request['version'], session_lib.PATIENCE)
    else:
      raise parameter_store.InvalidMessageError(f'nothing is called {name!r}')
    return {}, list(map(np.asarray, jax.tree.leaves(state)))

  def receive(self, request: dict, data: np.ndarray) -> None:
    """Receives a gradient."""
    store = self.opened.result(session_lib.PATIENCE).store
    shapes = store.optimizer.abstract_gradient, store.optimizer.abstract_state.stats
    arrays = transport.split(data, shapes)
    store.enqueue_gradient(session_lib.ticket_of(request), request['worker'], *arrays)


def _weights(session, request):
  if isinstance(session, session_lib.ChiefSession):
    at_least = session.begin_read(request['worker'], session_lib.ticket_of(request))
    if at_least is None:
      return {'drop': True}, []
  else:
    at_least = int(request['at_least'])
  try:
    version, state = session.store.read(at_least, session_lib.PATIENCE)
  except TimeoutError:
    return {'wait': True}, []
  weights = session.store.optimizer.weights(state)
  return {'version': version}, [*weights, np.asarray(state.stats)]
