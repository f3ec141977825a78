"""How models travel between processes, over Apache Arrow Flight."""

from concurrent import futures
import json
import secrets
import threading

import jax
import numpy as np

from anp_jax import cluster
from anp_jax.runtimes import transport
from anp_jax.runtimes.relay import worker as station_lib


class Post(transport.Port):
  """A process's letter box."""

  def __init__(self, config, place, token: str, took, told):
    """Opens the port.

    Args:
      config: the run's config.
      place: of this process.
      token: of the run: a call without it is refused.
      took: called (request, bytes) for what has come, from any thread.
      told: called (name, request) for a message, likewise.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    self._took, self._told = took, told
    super().__init__(config, place, token, 'a station')

  def do_put(self, context, descriptor, reader, writer):
    """A model, or what there is of it to score."""
    del context
    request = json.loads(descriptor.command)
    self._took(request, transport.read_bytes(reader, request.pop('bytes')))
    writer.write(b'taken')

  def do_action(self, context, action):
    """A message."""
    del context
    self._told(action.type, json.loads(action.body.to_pybytes()))
    return [b'{}']


class Mail:
  """Sends models and messages to the other processes of a ring, in order."""

  def __init__(self, config, processes, spans, put, heard, leave):
    """Opens this process's letter box; all processes make theirs at once.

    Args:
      config: the run's config.
      processes: of the run.
      spans: `spans.Spans`.
      put: called (station, item) with what has come, from any thread.
      heard: called (name, request) with a message, likewise.
      leave: called (model) before a model is sent.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    self._config = config
    self._spans = spans
    self._put = put
    self._leave = leave
    first = not processes.index
    self._token = processes.gather(secrets.token_hex(32) if first else '')[0]
    self._box = Post(config, processes.env, self._token, self._took, heard)
    self._addresses = processes.gather(self._box.address)
    self._lock = threading.Lock()
    self._clients = {}
    self._sender = futures.ThreadPoolExecutor(1, 'sender')
    self._sent = []

  def send(self, process: int, station: int, item) -> None:
    """Begins to send an item of `station` to another process's station."""
    sent = self._sender.submit(self._send, process, station, item)
    with self._lock:  # several stations send
      waiting = [s for s in self._sent if not s.done() or s.exception()]
      self._sent = [*waiting, sent]

  def tell(self, process: int, name: str, request: dict) -> None:
    """Says something to another process; returns once it was heard."""
    self._client(process).ask(name, **request)

  def look(self) -> None:
    """Raises `cluster.Lost` if something could not be sent."""
    for sent in self._sent:
      if sent.done() and sent.exception():
        raise cluster.Lost(f'a model could not be sent: {sent.exception()}')

  def wait(self) -> None:
    """Returns once all has come that was sent; raises as `look`."""
    futures.wait(self._sent)
    self.look()

  def close(self) -> None:
    """Sends and takes nothing more."""
    self._sender.shutdown(wait=False, cancel_futures=True)
    for client in self._clients.values():
      client.close()
    self._box.shutdown()

  def _send(self, process, station, item):
    request, tree = {'station': station, 'model': item.model}, None
    if isinstance(item, station_lib.Score):
      request |= {'kind': 'score', 'laps': item.laps, 'step': item.step}
      tree = item.evaluated
    elif isinstance(item, station_lib.Parcel):
      self._leave(item.model)
      request |= {'kind': 'parcel', 'step': item.step}
      tree = item.state
    else:
      request |= {'kind': 'gone'}
    with self._spans.during(station, 'send', item.model, None) as span:
      leaves = jax.device_get(jax.tree.leaves(tree))
      arrays = [np.asarray(leaf) for leaf in leaves]
      span['bytes'] = sum(a.nbytes for a in arrays)
      self._client(process).put(request, arrays)

  def _took(self, request, data):
    station, kind = request.pop('station'), request.pop('kind')
    if kind == 'score':
      item = station_lib.Score(**request, evaluated=data)
    elif kind == 'parcel':
      item = station_lib.Parcel(**request, state=data if data.size else None)
    else:
      item = station_lib.Gone(**request)
    self._put(station, item)

  def _client(self, process):
    with self._lock:
      if process not in self._clients:
        # Of a host that has gone, the processes' own watch tells sooner.
        self._clients[process] = transport.connect(
          self._config, self._addresses[process], self._token, timeout=600.0
        )
      return self._clients[process]
