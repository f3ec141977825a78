"""Helpers in other processes: what they are asked travels over Flight."""

from concurrent import futures
import contextlib
import json
import threading
import time

import jax
from jax import export
import numpy as np
import pyarrow as pa
from pyarrow import flight

from anp_jax.runtimes import transport
from anp_jax.runtimes.offload import device as helper_lib

# Seconds of a call: the first one waits until a program is compiled. Of a
# process that has gone, the processes' own watch tells sooner.
TIMEOUT = 600.0
# Seconds in which that watch ends this process, with a line that says who has
# gone; of an error in a callback JAX would print a traceback first.
_GRACE = 5.0
_PERIOD = 1.0  # seconds between two questions for a vote


def shown(device: jax.Device) -> dict:
  """What another process has to know of a device: JSON values."""
  target = device.platform
  if target == 'gpu':
    is_rocm = 'rocm' in device.client.platform_version.lower()
    target = 'rocm' if is_rocm else 'cuda'
  kind = helper_lib.kind(device)
  return {'kind': kind, 'platform': device.platform, 'target': target}


def let_go(client: transport.Client) -> None:
  """Tells a process that it is over, if it is still there."""
  with contextlib.suppress(pa.ArrowException):
    client.ask('over')


class Far:
  """A device of another process, with the face of `helper.Helper`.

  Attributes:
    name: of the device, for people.
    platform: 'cpu', 'gpu' or 'tpu'.
    error: what went wrong on the way or there, or None.
    is_lost: whether it is because its process has gone.
  """

  def __init__(
    self, client: transport.Client, device: int, name: str, card: dict
  ):
    """Makes it.

    Args:
      client: of the process.
      device: its number there.
      name: of the device, for people.
      card: see `shown`.
    """
    self.name, self.platform = name, card['platform']
    self.error, self.is_lost = None, False
    self._client, self._device = client, device
    self._target = card['target']
    self._taught = set()
    # Each in order, and beside each other: what a layer is given may travel
    # while the gradient of the one after it comes back.
    self._up, self._down = (
      futures.ThreadPoolExecutor(1, name) for name in ('up', 'down')
    )

  def forward(
    self, task: helper_lib.Task, x: np.ndarray, kernel: np.ndarray, keep: bool
  ) -> futures.Future:
    """Begins a task; see `helper.Helper.forward`."""

    def send():
      if task.number not in self._taught:
        self._teach(task)
        self._taught.add(task.number)
      self._put('forward', task.number, [x, kernel], keep=keep)

    return self._answer(self._up.submit(send), task.number, 'y', task.y)

  def backward(
    self, task: helper_lib.Task, dy: np.ndarray, of_x: bool
  ) -> tuple[futures.Future | None, futures.Future]:
    """Begins the backward pass; see `helper.Helper.backward`."""
    number = task.number
    sent = self._up.submit(self._put, 'backward', number, [dy], of_x=of_x)
    dx = self._answer(sent, number, 'dx', task.x) if of_x else None
    return dx, self._answer(sent, number, 'dkernel', task.kernel)

  def close(self) -> None:
    """Says that nothing more will be asked."""
    for pool in (self._up, self._down):
      pool.shutdown(wait=False, cancel_futures=True)

  def _teach(self, task):
    """Sends a task's programs, compiled there."""
    wide = task.x.dtype == np.float64
    with jax.enable_x64(wide):
      for name, (function, likes) in task.programs(self.platform).items():
        made = export.export(jax.jit(function), platforms=[self._target])
        content = np.frombuffer(made(*likes).serialize(), np.uint8)
        self._put('program', task.number, [content], name=name)

  def _put(self, kind, number, arrays, **more):
    request = {'kind': kind, 'device': self._device, 'number': number, **more}
    self._noting(self._client.put, request, arrays)

  def _answer(self, sent, number, name, like):
    def receive():
      sent.result()
      _, data = self._noting(
        self._client.get, 'result', device=self._device, number=number,
        part=name,
      )  # fmt: skip
      return transport.split(data, [like])[0]

    return self._down.submit(receive)

  def _noting(self, call, *arguments, **more):
    try:
      return call(*arguments, **more)
    except (pa.ArrowException, ValueError) as e:
      gone = (flight.FlightUnavailableError, flight.FlightTimedOutError)
      self.is_lost = isinstance(e, gone)
      self.error = self.error or e
      if self.is_lost:
        time.sleep(_GRACE)
      raise


class Votes:
  """What helpers' processes want, asked of each about once a second.

  Of those that compute nothing, too.

  Attributes:
    vote: the largest that was heard; see `cluster.stopping`.
  """

  def __init__(self, clients):
    """Begins to ask these `wire.Client`s."""
    self.vote = 0
    self._clients = clients
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._ask, name='votes', daemon=True)
    self._thread.start()

  def close(self) -> None:
    """Asks no more."""
    self._end.set()
    # Not for ever: one that has stopped does not answer.
    self._thread.join(_PERIOD)

  def _ask(self):
    while not self._end.wait(_PERIOD):
      for client in self._clients:
        # That one has gone is for the processes' own watch to tell.
        with contextlib.suppress(pa.ArrowException):
          self.vote = max(self.vote, client.ask('vote')['vote'])


class Desk(transport.Port):
  """Where a helping process is asked.

  Attributes:
    asked: how often it was.
    vote: what this process asks of the one that trains.
    is_over: whether it wants nothing more.
  """

  def __init__(self, config, place, token: str, devices):
    """As `wire.Port`; devices: jax.Devices of this process."""
    self.asked = self.vote = 0
    self.is_over = False
    self._helpers = [helper_lib.Helper(d, str(d)) for d in devices]
    self._programs = {}  # (device, number) to exported ones, by name
    self._begun = {}  # (device, number, name) to future
    super().__init__(config, place, token, 'a helper')

  def do_put(self, context, descriptor, reader, writer):
    """A task, or a function of one."""
    del context
    with transport.answering():
      request = json.loads(descriptor.command)
      data = transport.taken(reader, request['bytes'])
      self.asked += 1
      place = request['device'], request['number']
      helper = self._helpers[place[0]]
      if request['kind'] == 'program':
        self._learn(helper, place, request['name'], data)
      elif request['kind'] == 'forward':
        likes = self._programs[place]['y'].in_avals
        x, kernel = transport.split(data, likes)
        self._begun[*place, 'y'] = helper.begin(
          place[1], x, kernel, request['keep']
        )
      else:
        (like,) = self._programs[place]['y'].out_avals
        (dy,) = transport.split(data, [like])
        dx, dkernel = helper.back(place[1], dy, request['of_x'])
        self._begun[*place, 'dx'] = dx
        self._begun[*place, 'dkernel'] = dkernel
    writer.write(b'taken')

  def do_get(self, context, ticket):
    """A result, once it is there."""
    del context
    with transport.answering():
      request = json.loads(ticket.ticket)
      place = request['device'], request['number'], request['part']
      found = self._begun.pop(place).result()
      return transport.stream({}, [found])

  def close(self):
    """Listens no more."""
    self.shutdown()

  def do_action(self, context, action):
    """A vote, or the end."""
    del context
    if action.type == 'over':
      self.is_over = True
    return [json.dumps({'vote': self.vote}).encode()]

  def _learn(self, helper, place, name, data):
    programs = self._programs.setdefault(place, {})
    programs[name] = export.deserialize(bytearray(data.tobytes()))
    helper.learn(place[1], {k: jax.jit(p.call) for k, p in programs.items()})
