"""Messages and events that the stations and the controller of a ring exchange.

`Sender.send_event` sends all of them, from any thread: messages arrive in the
queue of a station, other events in the queue of a process. Between processes
they travel over Apache Arrow Flight.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import itertools
import queue
from typing import Any

import jax
import numpy as np

from anp_jax import cluster
from anp_jax.runtimes import transport
from anp_jax.runtimes.model_ring import ring as ring_lib, spans as spans_lib, store as store_lib
from anp_jax.system import error_lines

# Addresses; a station's is its number.
CONTROLLER = -1
HERE = -2  # this process
ALL = -3  # processes


@dataclasses.dataclass
class Message:
  """A message to a station.

  Attributes:
    model: index of a model.
    step: steps that the model has made.
    state: TrainState of the model, or its bytes, or None.
  """

  model: int
  step: int = 0
  state: Any = None


class ModelMessage(Message):
  """A model on its way; without a state it has not begun, or is finished."""


class Retired(Message):
  """A model that has left the ring and is forgotten by one station after another."""


@dataclasses.dataclass
class ScoreRequest(Message):
  """A model to be scored; its state is what TrainState.evaluated returned.

  Attributes:
    laps: laps that the model has made.
    origin: station that sends the request; its process holds the whole state.
  """

  laps: int = 0
  origin: int = 0


@dataclasses.dataclass
class Ranked(Message):
  """The scores of a state that a station's process holds, without the state."""

  scores: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Scored:
  """The scores of a model after so many laps."""

  model: int
  laps: int
  step: int
  scores: dict


@dataclasses.dataclass
class Failed:
  """A model cannot go on; its state is lost."""

  model: int
  step: int
  reason: str


@dataclasses.dataclass
class End:
  """The end of the ring, at which all stations stop.

  Attributes:
    reason: cause of a stop while models are in the ring; '' if none is.
  """

  reason: str


_KINDS = {
  kind.__name__: kind for kind in (ModelMessage, ScoreRequest, Ranked, Retired, Scored, Failed, End)
}


class MessageQueue:
  """Messages that wait at a station: scores first, for which others wait.

  Attributes:
    closed: whether the station takes no further message.
  """

  def __init__(self, place: Callable[[int, Any], Any]):
    """Starts empty.

    Args:
      place: (model, state) -> the state of a message while it waits.
    """
    self.closed = False
    self._place = place
    self._queue: queue.PriorityQueue[tuple[int, int, Message | None]] = queue.PriorityQueue()
    self._numbers = itertools.count()

  def put(self, message: Message) -> None:
    """Appends a message to those of its kind."""
    message.state = self._place(message.model, message.state)
    rank = 0 if isinstance(message, (ScoreRequest, Ranked)) else 1
    self._queue.put((rank, next(self._numbers), message))

  def get(self) -> Message | None:
    """Returns the next message, once there is one; None once closed."""
    return self._queue.get()[-1]

  def close(self) -> None:
    """Lets `get` return None, whatever waits."""
    self.closed = True
    self._queue.put((-1, next(self._numbers), None))

  def remaining(self) -> list[Message]:
    """Returns the messages that waited when the queue was closed."""
    return [message for *_, message in sorted(self._queue.queue) if message]


class Sender:
  """Sends events to their addresses.

  One thread sends arrays, in order; events without arrays are sent at once.

  Attributes:
    events: queue of this process's events other than messages; an exception is
      an event too.
  """

  def __init__(
    self,
    ring: ring_lib.Ring,
    processes: cluster.Processes,
    store: store_lib.Store,
    spans: spans_lib.Spans,
    queues: dict[int, MessageQueue],
  ):
    """Opens this process's port; all processes do so at once.

    Args:
      ring: models, stations and data.
      processes: processes of the run.
      store: store, which lets go of a model before it is sent.
      spans: record of how long models travel.
      queues: queue of each station of this process, by number.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._queues = queues
    self._ring, self._processes = ring, processes
    self._store, self._spans = store, spans
    self._thread = futures.ThreadPoolExecutor(1, 'sender')
    self._clients: list[transport.Client] = []
    self._port = None
    if processes.count > 1:
      self._port = transport.Port(ring.config, processes.env, 'a station')
      self._port.receive = self._on_data
      endpoints = processes.gather(self._port.endpoint)
      secret = processes.env.secret
      self._clients = [transport.Client(ring.config, endpoint, secret) for endpoint in endpoints]

  def send_event(self, address: int, event: Any) -> None:
    """Sends a message to a station, or an event to one of the addresses."""
    for process in self._processes_of(address):
      if process == self._processes.index:
        self._deliver(address, event)
      elif isinstance(event, Message):
        self._thread.submit(self._send_arrays, process, address, event)
      else:
        try:
          self._put(process, address, event, ())
        except transport.CONNECTION_ERRORS as e:
          text = f'{type(event).__name__} could not be sent: {error_lines.first_line(e)}'
          raise cluster.PeerLostError(text) from e

  def wait(self) -> None:
    """Returns once all that was sent has arrived."""
    self._thread.submit(int).result()

  def close(self) -> None:
    """Sends and receives nothing more."""
    self._thread.shutdown(wait=False, cancel_futures=True)
    for client in self._clients:
      client.close()
    if self._port:
      self._port.shutdown()

  def _processes_of(self, address):
    if address == ALL:
      return range(self._processes.count)
    if address == HERE:
      return [self._processes.index]
    return [0 if address == CONTROLLER else self._ring.owners[address]]

  def _deliver(self, address, event):
    if isinstance(event, Message) and address != CONTROLLER:
      self._queues[address].put(event)
    else:
      self.events.put(event)

  def _send_arrays(self, process, address, event):
    try:
      if isinstance(event, ModelMessage):
        self._store.let_go(event.model)
      with self._spans.record(address, 'send', event.model, None) as span:
        leaves = jax.device_get(jax.tree.leaves(event.state))
        arrays = [np.asarray(leaf) for leaf in leaves]
        span['bytes'] = sum(a.nbytes for a in arrays)
        self._put(process, address, event, arrays)
    except cluster.EXPECTED as e:  # such as a failed save; raised by the main thread
      self.events.put(e)
    except Exception as e:  # noqa: BLE001 - likewise
      text = f'a model could not be sent: {error_lines.first_line(e)}'
      self.events.put(cluster.PeerLostError(text))

  def _put(self, process, address, event, arrays):
    fields = {k: v for k, v in vars(event).items() if k != 'state'}
    request = {'address': address, 'kind': type(event).__name__, **fields}
    self._clients[process].put(request, arrays)

  def _on_data(self, request, data):
    address, kind = request.pop('address'), _KINDS[request.pop('kind')]
    if issubclass(kind, Message):
      request['state'] = data if data.size else None
    self._deliver(address, kind(**request))
