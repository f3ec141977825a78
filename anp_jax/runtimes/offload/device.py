"""A device that is in no mesh, and computes some of a convolution's features.

Host memory is where it is met: arrays come and go as NumPy's, so that it may be
of any platform, and of any process that can be sent bytes.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import functools
import platform as platform_lib

import jax
import numpy as np

from anp_jax.system import cores


@dataclasses.dataclass(frozen=True)
class Task:
  """A helper's part of one convolution of a traced program.

  Attributes:
    number: of no other task of the run.
    convolve: (x, kernel, platform) -> y.
    x, kernel, y: jax.ShapeDtypeStruct; of kernel and y the helper's features.
  """

  number: int
  convolve: Callable
  x: jax.ShapeDtypeStruct
  kernel: jax.ShapeDtypeStruct
  y: jax.ShapeDtypeStruct

  def programs(self, platform: str) -> dict:
    """Each function with what it takes, by name.

    Args:
      platform: of the helper's device.
    """
    convolve = functools.partial(self.convolve, platform=platform)

    def of_x(kernel, dy):
      zeros = jax.numpy.zeros(self.x.shape, self.x.dtype)
      return jax.vjp(lambda x: convolve(x, kernel), zeros)[1](dy)[0]

    def of_kernel(x, dy):
      zeros = jax.numpy.zeros(self.kernel.shape, self.kernel.dtype)
      return jax.vjp(lambda w: convolve(x, w), zeros)[1](dy)[0]

    return {
      'y': (convolve, (self.x, self.kernel)),
      'dx': (of_x, (self.kernel, self.y)),
      'dkernel': (of_kernel, (self.x, self.y)),
    }


class Helper:
  """A device of this process.

  What it is asked to do it does in turn, in a thread of its own.

  Attributes:
    name: of the device, for people.
    platform: 'cpu', 'gpu' or 'tpu'.
    error: what went wrong, or None.
    is_lost: whether it might be found again.
  """

  error, is_lost = None, False

  def __init__(self, device: jax.Device, name: str):
    """Takes a device."""
    self.name, self.platform = name, device.platform
    self._device = device
    self._functions = {}
    self._held = {}  # operands of the backward pass, by task
    self._work = futures.ThreadPoolExecutor(1, 'helper')

  def knows(self, number: int) -> bool:
    """Whether a task's functions are here."""
    return number in self._functions

  def learn(self, number: int, functions: dict[str, Callable]) -> None:
    """Takes a task's functions: jitted, of arrays on the device."""
    self._functions[number] = functions

  def forward(
    self, task: Task, x: np.ndarray, kernel: np.ndarray, keep: bool
  ) -> futures.Future:
    """Begins a task.

    Args:
      task: what is asked.
      x: NumPy array that nobody writes to any more.
      kernel: likewise.
      keep: whether `backward` follows.

    Returns:
      Of y, a NumPy array.
    """
    if not self.knows(task.number):
      programs = task.programs(self.platform)
      self.learn(task.number, {k: jax.jit(f) for k, (f, _) in programs.items()})
    return self.begin(task.number, x, kernel, keep)

  def begin(self, number: int, x, kernel, keep: bool) -> futures.Future:
    """`forward`, of a task whose functions are here."""
    return self._work.submit(self._forward, number, x, kernel, keep)

  def backward(
    self, task: Task, dy: np.ndarray, of_x: bool
  ) -> tuple[futures.Future | None, futures.Future]:
    """Begins the backward pass of the operands that were kept.

    Args:
      task: that `forward` was last asked with.
      dy: NumPy array, the gradient of y.
      of_x: whether the gradient of x is asked for.

    Returns:
      Of the gradients of x (None: not asked for) and of the kernel.
    """
    return self.back(task.number, dy, of_x)

  def back(self, number: int, dy, of_x: bool):
    """`backward`, of a task whose functions are here."""
    holding = {}  # dy, once it is on the device

    def gradient(name, operand):
      with self._here(dy):
        if not holding:
          holding['dy'] = jax.device_put(dy, self._device)
          holding['operands'] = self._held.pop(number)
        found = self._functions[number][name](
          holding['operands'][operand], holding['dy']
        )
        return np.asarray(found)

    dx = self._work.submit(gradient, 'dx', 1) if of_x else None
    return dx, self._work.submit(gradient, 'dkernel', 0)

  def close(self) -> None:
    """Does nothing more."""
    self._work.shutdown(wait=False, cancel_futures=True)

  def _forward(self, number, x, kernel, keep):
    with self._here(x):
      held = jax.device_put((x, kernel), self._device)
      if keep:
        self._held[number] = held
      return np.asarray(self._functions[number]['y'](*held))

  @contextlib.contextmanager
  def _here(self, like):
    """A thread has its own settings of JAX, and none of its maker's."""
    wide = like.dtype == np.float64
    try:
      with jax.enable_x64(wide), jax.default_device(self._device):
        yield
    except Exception as e:
      self.error = self.error or e
      raise


def kind(device: jax.Device) -> str:
  """What a device of this process is, for people."""
  return processor() if device.platform == 'cpu' else device.device_kind


def processor() -> str:
  """The CPU's name and how many of its cores this process may use."""
  name = platform_lib.machine()
  try:
    with open('/proc/cpuinfo') as f:
      found = [line for line in f if line.startswith('model name')]
    name = found[0].partition(':')[2].strip() if found else name
  except OSError:  # not of Linux
    pass
  count = cores.count()
  return f'{name}, {count} core{"s" if count > 1 else ""}'
