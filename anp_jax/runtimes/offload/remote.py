"""Offload devices of other processes, which are called over Arrow Flight."""

from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import json
import threading
import time

import jax
from jax import export
import numpy as np
import pyarrow as pa
from pyarrow import flight

from anp_jax.runtimes import transport
from anp_jax.runtimes.offload import device as device_lib

# Seconds of a call: the first one waits until a program is compiled. The
# watchdog reports a process that has gone sooner.
TIMEOUT = 600.0
# Seconds in which the watchdog ends this process, with a line that names the
# process that has gone; JAX would print a callback's error as a traceback.
_GRACE = 5.0
_PERIOD = 1.0  # seconds between two requests for a vote


def describe(device: jax.Device) -> dict:
  """What another process needs to know of a device: JSON values."""
  target = device.platform
  if target == 'gpu':
    is_rocm = 'rocm' in device.client.platform_version.lower()
    target = 'rocm' if is_rocm else 'cuda'
  kind = device_lib.kind(device)
  return {'kind': kind, 'platform': device.platform, 'target': target}


def end(client: transport.Client) -> None:
  """Tells an offload process to end, if it is still there."""
  with contextlib.suppress(pa.ArrowException):
    client.ask('end')


class RemoteDevice:
  """A device of another process; the interface of `device.LocalDevice`.

  Attributes:
    name: of the device, for people.
    platform: 'cpu', 'gpu' or 'tpu'.
    error: the first exception of a call or of a task there, or None.
    is_lost: whether that is because its process has gone.
  """

  def __init__(
    self, client: transport.Client, index: int, name: str, description: dict
  ):
    """Starts the threads that send and receive.

    Args:
      client: of the process.
      index: of the device, among those of its process.
      name: of the device, for people.
      description: see `describe`.
    """
    self.name, self.platform = name, description['platform']
    self.error, self.is_lost = None, False
    self._client, self._index = client, index
    self._target = description['target']
    self._installed = set()
    # Each thread keeps the order of its calls; a layer's input may be sent
    # while the gradient of the next one is received.
    self._sender, self._receiver = (
      futures.ThreadPoolExecutor(1, name) for name in ('send', 'receive')
    )

  def forward(
    self, task: device_lib.Task, x: np.ndarray, kernel: np.ndarray, keep: bool
  ) -> futures.Future:
    """Starts the forward pass; see `device.LocalDevice.forward`."""

    def send():
      if task.number not in self._installed:
        self._install(task)
        self._installed.add(task.number)
      self._put('forward', task.number, [x, kernel], keep=keep)

    return self._result(self._sender.submit(send), task.number, 'y', task.y)

  def backward(
    self, task: device_lib.Task, dy: np.ndarray, needs_dx: bool
  ) -> tuple[futures.Future | None, futures.Future]:
    """Starts the backward pass; see `device.LocalDevice.backward`."""
    number = task.number
    request = self._sender.submit(
      self._put, 'backward', number, [dy], needs_dx=needs_dx
    )
    dx = self._result(request, number, 'dx', task.x) if needs_dx else None
    return dx, self._result(request, number, 'dkernel', task.kernel)

  def close(self) -> None:
    """Stops the threads; calls that have not started are dropped."""
    for thread in (self._sender, self._receiver):
      thread.shutdown(wait=False, cancel_futures=True)

  def _install(self, task):
    """Sends a task's programs, which are compiled there."""
    wide = task.x.dtype == np.float64
    with jax.enable_x64(wide):
      for name, (function, shapes) in task.programs(self.platform).items():
        program = export.export(function, platforms=[self._target])
        content = np.frombuffer(program(*shapes).serialize(), np.uint8)
        self._put('program', task.number, [content], name=name)

  def _put(self, kind, number, arrays, **options):
    request = {'kind': kind, 'device': self._index, 'number': number, **options}
    self._call(self._client.put, request, arrays)

  def _result(self, request, number, name, shape):
    """A future of a result, received once its request was sent."""

    def receive():
      request.result()
      _, data = self._call(
        self._client.get, 'result', device=self._index, number=number,
        part=name,
      )  # fmt: skip
      return transport.split(data, [shape])[0]

    return self._receiver.submit(receive)

  def _call(self, method, *arguments, **options):
    """Calls the other process; notes an error before it is raised."""
    try:
      return method(*arguments, **options)
    except (pa.ArrowException, ValueError) as e:
      lost = (flight.FlightUnavailableError, flight.FlightTimedOutError)
      self.is_lost = isinstance(e, lost)
      self.error = self.error or e
      if self.is_lost:
        time.sleep(_GRACE)
      raise


class VotePoller:
  """Asks the offload processes about once a second whether to stop.

  Those whose devices compute nothing are asked, too.

  Attributes:
    vote: the largest that was received; see `cluster.preemption`.
  """

  def __init__(self, clients: list[transport.Client]):
    """Starts to ask these processes."""
    self.vote = 0
    self._clients = clients
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._poll, name='vote', daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Stops asking."""
    self._end.set()
    # Bounded: a process that was suspended does not answer.
    self._thread.join(_PERIOD)

  def _poll(self):
    while not self._end.wait(_PERIOD):
      for client in self._clients:
        # The watchdog reports a process that has gone.
        with contextlib.suppress(pa.ArrowException):
          self.vote = max(self.vote, client.ask('vote')['vote'])


class OffloadServer(transport.Port):
  """Serves the devices of an offload process to the process that trains.

  Attributes:
    requests: number of tasks and programs that were received.
    vote: what this process asks of the one that trains.
    has_ended: whether the process that trains has ended it.
  """

  def __init__(self, config, place, token: str, devices):
    """Opens the server's port.

    Args:
      config: the run's config.
      place: of this process, see `transport.Port`.
      token: of the run.
      devices: jax.Devices of this process.
    """
    self.requests = self.vote = 0
    self.has_ended = False
    self._devices = [device_lib.LocalDevice(d, str(d)) for d in devices]
    self._tasks = {}  # by (device, number)
    self._results = {}  # (device, number, name) to future
    super().__init__(config, place, token, 'an offload process')

  def do_put(self, context, descriptor, reader, writer):
    """Receives a program of a task, or starts a pass of one."""
    del context
    with transport.answering():
      request = json.loads(descriptor.command)
      data = transport.read_bytes(reader, request['bytes'])
      self.requests += 1
      key = request['device'], request['number']
      device = self._devices[key[0]]
      task = self._tasks.setdefault(key, _ReceivedTask(key[1], {}))
      if request['kind'] == 'program':
        program = export.deserialize(bytearray(data.tobytes()))
        task.exported[request['name']] = program
      elif request['kind'] == 'forward':
        x, kernel = transport.split(data, task.exported['y'].in_avals)
        self._results[*key, 'y'] = device.forward(
          task, x, kernel, request['keep']
        )
      else:
        (dy,) = transport.split(data, task.exported['y'].out_avals)
        dx, dkernel = device.backward(task, dy, request['needs_dx'])
        self._results[*key, 'dx'] = dx
        self._results[*key, 'dkernel'] = dkernel
    writer.write(b'taken')

  def do_get(self, context, ticket):
    """Sends a result as soon as it has been computed."""
    del context
    with transport.answering():
      request = json.loads(ticket.ticket)
      key = request['device'], request['number'], request['part']
      return transport.stream({}, [self._results.pop(key).result()])

  def do_action(self, context, action):
    """Answers with this process's vote; ends the service on request."""
    del context
    if action.type == 'end':
      self.has_ended = True
    return [json.dumps({'vote': self.vote}).encode()]

  def close(self):
    """Closes the port."""
    self.shutdown()


@dataclasses.dataclass(frozen=True)
class _ReceivedTask:
  """A task of another process; the part of `Task` that a device calls.

  Attributes:
    number: unique within the other process.
    exported: programs by name.
  """

  number: int
  exported: dict[str, export.Exported]

  def programs(self, platform: str) -> dict[str, tuple[Callable, tuple]]:
    """The jitted programs, exported for the platform of the device."""
    del platform
    return {k: (jax.jit(p.call), p.in_avals) for k, p in self.exported.items()}
