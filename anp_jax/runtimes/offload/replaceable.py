"""An offload device of another process that may be lost during a step."""

from collections.abc import Callable
from concurrent import futures
import functools
import threading
import time
from typing import Any

import numpy as np

from anp_jax.runtimes.offload import device as device_lib, remote_device

_POLL = 0.5  # seconds between two looks whether a device is lost
# Seconds after an error of a call in which the process may turn out to be lost.
_LOSS_SEEN_WITHIN = 5.0


class ReplaceableDevice:
  """A device of another process; once it is lost, this process computes for it.

  A step under way then ends as if the device had not been lost. The operands of
  a forward pass are kept until its backward pass begins. The interface is that
  of `device.LocalDevice`.

  Attributes:
    name: name of the device, for people.
  """

  def __init__(self, device: remote_device.RemoteDevice, substitute: device_lib.LocalDevice):
    """Stands for a device.

    Args:
      device: device of the other process.
      substitute: device of this process that computes in its place.
    """
    self.name = device.name
    self._device, self._substitute = device, substitute
    self._operands: dict[int, tuple] = {}  # x and kernel, by the number of a task
    self._lock = threading.Lock()

  @property
  def error(self) -> Exception | None:
    """The first exception of a task, except those of a lost connection."""
    error = None if self.is_lost else self._device.error
    return error or self._substitute.error

  @property
  def is_lost(self) -> bool:
    """Whether its process has gone, or does not answer."""
    return self._device.is_lost

  def forward(self, task: device_lib.Task, x: np.ndarray, kernel: np.ndarray, keep: bool) -> Any:
    """Starts the forward pass; see `device.LocalDevice.forward`."""
    if keep:
      self._operands[task.number] = x, kernel

    def compute():
      return self._substitute.forward(task, x, kernel, keep=False)

    if self.is_lost:
      return compute()
    future = self._device.forward(task, x, kernel, keep)
    return _Result(self._device, future, compute)

  def backward(self, task: device_lib.Task, dy: np.ndarray, needs_dx: bool) -> tuple[Any, Any]:
    """Starts the backward pass; see `device.LocalDevice.backward`."""
    x, kernel = self._operands.pop(task.number)

    @functools.cache
    def compute():
      self._substitute.forward(task, x, kernel, keep=True)
      return self._substitute.backward(task, dy, needs_dx)

    def part(index):
      with self._lock:  # both results may be asked for at the same time
        return compute()[index]

    if self.is_lost:
      return compute()
    dx, dkernel = self._device.backward(task, dy, needs_dx)
    result = functools.partial(_Result, self._device)
    return (
      dx and result(dx, functools.partial(part, 0)),
      result(dkernel, functools.partial(part, 1)),
    )

  def lose(self) -> None:
    """Notes that the device's process is lost; nothing waits for it then."""
    self._device.lose()

  def close(self) -> None:
    """Stops the threads of the device and of its substitute."""
    self._device.close()
    self._substitute.close()


class _Result:
  """The result of a device, or of its substitute if the device is lost before."""

  def __init__(self, device, future: futures.Future, compute: Callable):
    self._device, self._future, self._compute = device, future, compute

  def result(self) -> np.ndarray:
    """Waits for the result."""
    while not self._device.is_lost:
      try:
        return self._future.result(_POLL)
      except futures.TimeoutError:
        pass
      except Exception:
        # A lost device may answer anything, such as that its client is closed.
        if not self._is_lost_soon():
          raise
    return self._compute().result()

  def _is_lost_soon(self):
    deadline = time.monotonic() + _LOSS_SEEN_WITHIN
    while not self._device.is_lost and time.monotonic() < deadline:
      time.sleep(_POLL)
    return self._device.is_lost
