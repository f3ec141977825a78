"""A device outside the mesh that computes some of a convolution's features.

Arrays reach it and return as NumPy arrays in host memory, so it may be of any
platform, and of any process that receives bytes.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import platform as platform_lib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel.channel_split import split_operation
from anp_jax.system import cores


@dataclasses.dataclass(frozen=True)
class Task:
  """An offload device's part of one convolution of a traced program.

  Attributes:
    convolve: (x, kernel, platform) -> y.
    x, kernel, y: shapes of the operands and the result; kernel and y have the
      offload device's features only.
    number: number of the task, unique within the process.
  """

  convolve: Callable
  x: jax.ShapeDtypeStruct
  kernel: jax.ShapeDtypeStruct
  y: jax.ShapeDtypeStruct
  number: int = dataclasses.field(default_factory=itertools.count().__next__)

  @classmethod
  def create(cls, convolve: Callable, x: Any, kernel: Any, y: Any, count: int) -> 'Task':
    """Returns the task of computing some features of a convolution.

    Args:
      convolve: (x, kernel, platform) -> y.
      x: array or its shape.
      kernel: array or its shape, with all features.
      y: array or its shape, with all features.
      count: number of features of the offload device.
    """

    def narrow(array):
      return jax.ShapeDtypeStruct((*array.shape[:-1], count), array.dtype)

    x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return cls(convolve, x, narrow(kernel), narrow(y))

  def programs(self, platform: str) -> dict[str, tuple[Callable, tuple]]:
    """Returns the jitted 'y', 'dx' and 'dkernel', each with its operands' shapes.

    Args:
      platform: platform of the offload device.
    """
    convolve = functools.partial(self.convolve, platform=platform)

    # A convolution is linear in x and in its kernel: neither gradient needs the
    # value of its own variable.
    def x_gradient(kernel, dy):
      x = jnp.zeros(self.x.shape, self.x.dtype)
      return split_operation.x_gradient(convolve, x, kernel, dy)

    def kernel_gradient(x, dy):
      kernel = jnp.zeros(self.kernel.shape, self.kernel.dtype)
      return split_operation.kernel_gradient(convolve, x, kernel, dy)

    return {
      'y': (jax.jit(convolve), (self.x, self.kernel)),
      'dx': (jax.jit(x_gradient), (self.kernel, self.y)),
      'dkernel': (jax.jit(kernel_gradient), (self.x, self.y)),
    }


class LocalDevice:
  """An offload device of this process.

  One thread executes the tasks one after another.

  Attributes:
    name: name of the device, for people.
    platform: 'cpu', 'gpu' or 'tpu'.
    error: first exception of a task, or None.
    is_lost: always False; see `remote_device.RemoteDevice`.
  """

  error: Exception | None = None
  is_lost = False

  def __init__(self, device: jax.Device, name: str):
    """Starts the device's thread."""
    self.name, self.platform = name, device.platform
    self._device = device
    self._programs: dict[int, dict] = {}  # programs by task
    self._operands: dict[int, Any] = {}  # operands of the backward pass, by task
    self._thread = futures.ThreadPoolExecutor(1, 'offload')

  def forward(self, task: Task, x: np.ndarray, kernel: np.ndarray, keep: bool) -> futures.Future:
    """Starts the forward pass of a task.

    Args:
      task: the device's part of the convolution.
      x: NumPy array that is no longer written to.
      kernel: NumPy array with the task's features, likewise.
      keep: whether `backward` follows.

    Returns:
      A future of y, a NumPy array.
    """
    if task.number not in self._programs:
      self._programs[task.number] = task.programs(self.platform)
    return self._thread.submit(self._forward, task.number, x, kernel, keep)

  def backward(
    self, task: Task, dy: np.ndarray, needs_dx: bool
  ) -> tuple[futures.Future | None, futures.Future]:
    """Starts the backward pass with the operands that `forward` kept.

    Args:
      task: the task of the last call of `forward` with `keep`.
      dy: NumPy array, the gradient of y.
      needs_dx: whether the gradient of x is computed.

    Returns:
      Futures of the gradients of x (None if not computed) and of the kernel.
    """
    number = task.number
    arrays: dict[str, Any] = {}  # on the device, from the first gradient on

    def gradient(name, operand):
      with self._context(dy.dtype):
        if not arrays:
          arrays['dy'] = jax.device_put(dy, self._device)
          arrays['operands'] = self._operands.pop(number)
        function, _ = self._programs[number][name]
        return np.asarray(function(arrays['operands'][operand], arrays['dy']))

    dx = self._thread.submit(gradient, 'dx', 1) if needs_dx else None
    return dx, self._thread.submit(gradient, 'dkernel', 0)

  def close(self) -> None:
    """Stops the thread; tasks that have not started are dropped."""
    self._thread.shutdown(wait=False, cancel_futures=True)

  def _forward(self, number, x, kernel, keep):
    with self._context(x.dtype):
      operands = jax.device_put((x, kernel), self._device)
      if keep:
        self._operands[number] = operands
      function, _ = self._programs[number]['y']
      return np.asarray(function(*operands))

  @contextlib.contextmanager
  def _context(self, dtype):
    """Sets what JAX keeps per thread, and keeps the first error."""
    try:
      with jax.enable_x64(dtype == np.float64):
        with jax.default_device(self._device):
          yield
    except Exception as e:
      self.error = self.error or e
      raise


def kind(device: jax.Device) -> str:
  """Returns the name of a device of this process, for people."""
  return processor() if device.platform == 'cpu' else device.device_kind


def processor() -> str:
  """Returns the CPU's name, and the number of cores that this process may use."""
  name = cores.cpu_line('model name').partition(':')[2].strip() or platform_lib.machine()
  count = cores.count()
  return f'{name}, {count} core{"s" if count > 1 else ""}'
