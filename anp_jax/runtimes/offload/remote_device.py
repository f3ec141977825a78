"""Offload devices of other processes, called over Arrow Flight."""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import queue
import threading
from typing import Any

import jax
from jax import export
import ml_collections
import numpy as np
import pyarrow as pa
from pyarrow import flight

from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.offload import device as device_lib


def describe(device: jax.Device) -> dict:
  """Returns the description of a device for another process, as JSON values."""
  target = device.platform
  if target == 'gpu':
    is_rocm = 'rocm' in device.client.platform_version.lower()
    target = 'rocm' if is_rocm else 'cuda'
  kind = device_lib.kind(device)
  return {'kind': kind, 'platform': device.platform, 'target': target}


class RemoteDevice:
  """A device of another process; the interface of `device.LocalDevice`.

  Attributes:
    name: name of the device, for people.
    platform: 'cpu', 'gpu' or 'tpu'.
    error: first exception of a call or of a task there, or None.
    is_lost: whether its process has gone, or does not answer.
  """

  def __init__(self, client: transport.Client, index: int, name: str, description: dict):
    """Starts the threads that send and receive.

    Args:
      client: client of the process.
      index: index of the device, among those of its process.
      name: name of the device, for people.
      description: description of the device, from `describe`.
    """
    self.name, self.platform = name, description['platform']
    self.error: Exception | None = None
    self.is_lost = False
    self._client, self._index = client, index
    self._target = description['target']
    self._installed: set[int] = set()  # numbers of tasks
    # Each thread keeps the order of its calls; a layer's input may be sent
    # while the gradient of the next one is received.
    self._sender, self._receiver = _Caller('send'), _Caller('receive')

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
    request = self._sender.submit(self._put, 'backward', number, [dy], needs_dx=needs_dx)
    dx = self._result(request, number, 'dx', task.x) if needs_dx else None
    return dx, self._result(request, number, 'dkernel', task.kernel)

  def lose(self) -> None:
    """Notes that the device's process is lost; nothing more is sent to it."""
    self.is_lost = True
    self.close()

  def close(self) -> None:
    """Stops the threads; calls that have not started are dropped."""
    self._sender.close()
    self._receiver.close()

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
    """Returns a future of a result, received once its request was sent."""

    def receive():
      request.result()
      _, data = self._call(self._client.get, 'result', device=self._index, number=number, part=name)
      return transport.split(data, [shape])[0]

    return self._receiver.submit(receive)

  def _call(self, method, *arguments, **options):
    """Calls the other process; notes an error before it is raised."""
    try:
      return method(*arguments, **options)
    except (pa.ArrowException, ValueError) as e:
      self.is_lost = self.is_lost or _says_lost(e)
      self.error = self.error or e
      raise


def _says_lost(error):
  """Returns whether a call's error says that its process cannot be reached."""
  if isinstance(error, pa.ArrowInvalid):
    # Arrow has no type of its own for a connection that was closed here.
    return 'FlightClient is closed' in str(error)
  return isinstance(error, (flight.FlightUnavailableError, flight.FlightTimedOutError))


class _Caller:
  """Makes calls one after another, in a thread that keeps no process alive.

  An executor's thread would: a call to a process that does not answer cannot be
  ended.
  """

  def __init__(self, name: str):
    self._calls: queue.SimpleQueue[tuple[futures.Future, Callable] | None] = queue.SimpleQueue()
    self._is_closed = False
    self._lock = threading.Lock()  # no call is added once it is closed
    threading.Thread(target=self._run, name=name, daemon=True).start()

  def submit(self, call: Callable, *arguments, **options) -> futures.Future:
    """Returns a future of a call's result."""
    future: futures.Future = futures.Future()
    with self._lock:
      if self._is_closed:
        future.cancel()
      else:
        self._calls.put((future, lambda: call(*arguments, **options)))
    return future

  def close(self) -> None:
    """Drops the calls that have not started."""
    with self._lock:
      self._is_closed = True
      self._calls.put(None)

  def _run(self):
    while (job := self._calls.get()) is not None:
      future, call = job
      if self._is_closed or not future.set_running_or_notify_cancel():
        future.cancel()
        continue
      try:
        future.set_result(call())
      except BaseException as e:  # noqa: BLE001 - the caller's to handle
        future.set_exception(e)


class OffloadServer(transport.Port):
  """Serves the devices of an offload process to the process that trains.

  Attributes:
    requests: number of tasks and programs that were received.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    env: cluster_env.ClusterEnv,
    devices: Sequence[jax.Device],
  ):
    """Opens the server's port.

    Args:
      config: the run's config.
      env: environment of this process, with the run's secret.
      devices: devices of this process.
    """
    self.requests = 0
    self._devices = [device_lib.LocalDevice(d, str(d)) for d in devices]
    self._tasks: dict[tuple[int, int], Any] = {}  # tasks by device and number
    self._results: dict[tuple, Any] = {}  # futures by device, number and name
    super().__init__(config, env, 'an offload process')

  def receive(self, request: dict, data: np.ndarray) -> None:
    """Receives a program of a task, or starts a pass of one."""
    self.requests += 1
    key = request['device'], request['number']
    device = self._devices[key[0]]
    task = self._tasks.setdefault(key, _ReceivedTask(key[1], {}))
    if request['kind'] == 'program':
      task.exported[request['name']] = export.deserialize(bytearray(data.tobytes()))
    elif request['kind'] == 'forward':
      x, kernel = transport.split(data, task.exported['y'].in_avals)
      self._results[*key, 'y'] = device.forward(task, x, kernel, request['keep'])
    else:
      (dy,) = transport.split(data, task.exported['y'].out_avals)
      dx, dkernel = device.backward(task, dy, request['needs_dx'])
      self._results[*key, 'dx'] = dx
      self._results[*key, 'dkernel'] = dkernel

  def answer(self, name: str, device: int, number: int, part: str) -> tuple[dict, list]:
    """Returns a result as soon as it has been computed."""
    del name
    return {}, [self._results.pop((device, number, part)).result()]


@dataclasses.dataclass(frozen=True)
class _ReceivedTask:
  """A task of another process, with the part of `Task` that a device calls.

  Attributes:
    number: number of the task, unique within the other process.
    exported: programs by name.
  """

  number: int
  exported: dict[str, export.Exported]

  def programs(self, platform: str) -> dict[str, tuple[Callable, tuple]]:
    """Returns the jitted programs, exported for the platform of the device."""
    del platform
    return {k: (jax.jit(p.call), p.in_avals) for k, p in self.exported.items()}
