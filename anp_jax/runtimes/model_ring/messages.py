"""What the stations and the controller of a ring send each other.

Everything is sent by `Sender.send_event`, from any thread: messages arrive in
the queue of a station, all else in the queue of events of a process. Between
processes it travels over Apache Arrow Flight.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import itertools
import json
import queue
import secrets
import threading

import jax
import numpy as np

from anp_jax import cluster
from anp_jax.runtimes import transport
from anp_jax.system import error_lines

# Addresses; a station's is its number.
CONTROLLER = -1
HERE = -2  # this process
ALL = -3  # processes


@dataclasses.dataclass
class Message:
  """What is sent to a station.

  Attributes:
    model: index of a model.
    step: steps that the model has made.
    state: its TrainState, or the bytes of that, or None.
  """

  model: int
  step: int = 0
  state: object = None


class ModelMessage(Message):
  """A model on its way; without a state it has not begun, or is finished."""


class Retired(Message):
  """A model has left the ring: each station in turn forgets it.

  Its state, if there is one, is yet to be saved.
  """


@dataclasses.dataclass
class ScoreRequest(Message):
  """A model to be scored; its state is what TrainState.evaluated gave.

  Attributes:
    laps: that it has made.
    origin: the station that asks, whose process holds all of the state.
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
  """All stations stop.

  Attributes:
    reason: why before all models have left the ring; '' if they have.
  """

  reason: str


_KINDS = {
  kind.__name__: kind for kind in (ModelMessage, ScoreRequest, Ranked, Retired, Scored, Failed, End)
}


class MessageQueue:
  """What waits at a station: scores first, which others wait for.

  Attributes:
    closed: whether the station takes no further message.
  """

  def __init__(self, on_put: Callable):
    """Starts empty.

    Args:
      on_put: called (message) before a message waits.
    """
    self.closed = False
    self._on_put = on_put
    self._queue = queue.PriorityQueue()
    self._numbers = itertools.count()

  def put(self, message) -> None:
    """Appends a message to those of its kind."""
    self._on_put(message)
    rank = 0 if isinstance(message, (ScoreRequest, Ranked)) else 1
    self._queue.put((rank, next(self._numbers), message))

  def get(self):
    """Returns the next message, once there is one; None once closed."""
    return self._queue.get()[-1]

  def close(self) -> None:
    """Lets `get` return None, whatever waits."""
    self.closed = True
    self._queue.put((-1, next(self._numbers), None))

  def remaining(self) -> list:
    """Returns the messages that nobody got before the queue was closed."""
    return [entry[-1] for entry in sorted(self._queue.queue) if entry[-1]]


class Receiver(transport.Port):
  """Takes what other processes send to this one."""

  def __init__(self, config, env, token: str, on_data: Callable):
    """Opens the port.

    Args:
      config: the run's config.
      env: `cluster_env.ClusterEnv` of this process.
      token: see `transport.session_token`; a call without it is refused.
      on_data: called (request, (n,) uint8) for what arrives, from any thread.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    self._on_data = on_data
    super().__init__(config, env, token, 'a station')

  def do_put(self, context, descriptor, reader, writer):
    """Takes one request and its bytes; called by Flight."""
    del context
    request = json.loads(descriptor.command)
    size, local = request.pop('bytes'), request.pop('local', False)
    data = transport.read_bytes(reader, size, local)
    self._on_data(request, data)
    writer.write(b'taken')


class Sender:
  """Sends events to their addresses.

  What holds arrays is sent by one thread, in order; all else at once.

  Attributes:
    events: queue of this process's events that are no messages; an exception is
      an event too.
  """

  def __init__(self, ring, processes, store, spans, queues):
    """Opens this process's receiver; all processes do so at once.

    Args:
      ring: `ring.Ring`.
      processes: of the run.
      store: `store.Store`, which lets go of a model before it is sent.
      spans: `spans.Spans`.
      queues: the MessageQueue of each station of this process, by number.

    Raises:
      ConfigError: if the port cannot be opened.
    """
    self.events = queue.SimpleQueue()
    self._queues = queues
    self._ring, self._processes = ring, processes
    self._store, self._spans = store, spans
    self._thread = futures.ThreadPoolExecutor(1, 'sender')
    self._lock = threading.Lock()
    self._clients = {}
    self._receiver = None
    if processes.count > 1:
      session = '' if processes.index else secrets.token_hex(8)
      self._token = transport.session_token(processes.secret, processes.gather(session)[0])
      self._receiver = Receiver(ring.config, processes.env, self._token, self._on_data)
      self._addresses = processes.gather(self._receiver.address)

  def send_event(self, address: int, event) -> None:
    """Sends a message to a station, or an event to one of the addresses."""
    for process in self._processes_of(address):
      if process == self._processes.index:
        self._deliver(address, event)
      elif isinstance(event, Message):
        self._thread.submit(self._send_arrays, process, address, event)
      else:
        self._put(process, address, event, ())

  def wait(self) -> None:
    """Returns once all that was sent has arrived."""
    self._thread.submit(int).result()

  def close(self) -> None:
    """Sends and receives nothing more."""
    self._thread.shutdown(wait=False, cancel_futures=True)
    for client in self._clients.values():
      client.close()
    if self._receiver:
      self._receiver.shutdown()

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
    except Exception as e:  # noqa: BLE001 - raised by the main thread
      text = f'a model could not be sent: {error_lines.first_line(e)}'
      self.events.put(cluster.PeerLostError(text))

  def _put(self, process, address, event, arrays):
    fields = {k: v for k, v in vars(event).items() if k != 'state'}
    request = {'address': address, 'kind': type(event).__name__, **fields}
    self._client(process).put(request, arrays)

  def _on_data(self, request, data):
    address, kind = request.pop('address'), _KINDS[request.pop('kind')]
    if issubclass(kind, Message):
      request['state'] = data if data.size else None
    self._deliver(address, kind(**request))

  def _client(self, process):
    with self._lock:
      if process not in self._clients:
        # The watchdog of the processes names a host that has gone sooner.
        self._clients[process] = transport.connect(
          self._ring.config, self._addresses[process], self._token, timeout=600.0
        )
      return self._clients[process]
