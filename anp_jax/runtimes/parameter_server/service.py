"""A server's port: Flight calls onto its session."""

from concurrent import futures
import json

import jax
import ml_collections
import numpy as np
from pyarrow import flight

from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.parameter_server import (
  parameter_store,
  session as session_lib,
  slice_optimizer,
)
from anp_jax.system import memory

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

  def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
    """Answers small requests; see the methods of `session.ChiefSession`."""
    del context
    with transport.answering():
      request = json.loads(action.body.to_pybytes())
      answer = self._act(action.type, request)
    return [json.dumps(answer).encode()]

  def do_get(
    self, context: flight.ServerCallContext, ticket: flight.Ticket
  ) -> flight.FlightDataStream:
    """Sends weights to a worker, or a slice to another server."""
    del context
    with transport.answering():
      request = json.loads(ticket.ticket)
      name = request['name']
      try:
        session = self.opened.result(session_lib.PATIENCE)
      except TimeoutError:
        return transport.stream({'wait': True}, [])
      if name == 'start' and isinstance(session, session_lib.ChiefSession):
        return _state_stream(session.starts[request['server']], request)
      if name == 'snapshot':
        state = session.store.snapshot(request['version'], session_lib.PATIENCE)
        return _state_stream(state, request)
      if name == 'weights':
        return _weights_stream(session, request)
      raise parameter_store.InvalidMessageError(f'nothing is called {name!r}')

  def do_put(
    self,
    context: flight.ServerCallContext,
    descriptor: flight.FlightDescriptor,
    reader: flight.MetadataRecordBatchReader,
    writer: flight.FlightMetadataWriter,
  ) -> None:
    """Receives a gradient."""
    del context
    with transport.answering():
      request = json.loads(descriptor.command)
      session = self.opened.result(session_lib.PATIENCE)
      optimizer = session.store.optimizer
      shapes = (optimizer.abstract_gradient, optimizer.abstract_state.stats)
      size = sum(map(memory.of_array, shapes))
      data = transport.read_bytes(reader, size, request.get('local', False))
      arrays = transport.split(data, shapes)
      session.store.enqueue_gradient(session_lib.ticket_of(request), request['worker'], *arrays)
      writer.write(b'taken')

  def _act(self, name, request):
    session = self.opened.result(session_lib.PATIENCE)
    if name not in _ACTIONS or not isinstance(session, session_lib.ChiefSession):
      raise parameter_store.InvalidMessageError(f'nothing is called {name!r} here')
    return getattr(session, name)(**request) or {}


def _weights_stream(session, request):
  worker, ticket = request['worker'], session_lib.ticket_of(request)
  if isinstance(session, session_lib.ChiefSession):
    at_least = session.begin_read(worker, ticket)
    if at_least is None:
      return transport.stream({'drop': True}, [])
  else:
    at_least = int(request['at_least'])
  try:
    version, state = session.store.read(at_least, session_lib.PATIENCE)
  except TimeoutError:
    return transport.stream({'wait': True}, [])
  weights = session.store.optimizer.weights(state)
  return transport.stream(
    {'version': version}, [*weights, np.asarray(state.stats)], request.get('local', False)
  )


def _state_stream(state, request):
  leaves = list(map(np.asarray, jax.tree.leaves(state)))
  return transport.stream({}, leaves, request.get('local', False))


def unpack_state(
  optimizer: slice_optimizer.SliceOptimizer, data: np.ndarray
) -> slice_optimizer.SliceState:
  """Returns the SliceState that a server has sent.

  Args:
    optimizer: optimizer of the server.
    data: (n,) uint8.
  """
  leaves, structure = jax.tree.flatten(optimizer.abstract_state)
  return jax.tree.unflatten(structure, transport.split(data, leaves))
