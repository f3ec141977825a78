"""The random starts of parameters, drawn on the host.

XLA compiles a kernel for each random array: of a ResNet-50's initial state that takes
11 s of processor time on a CPU and 12 s on an H100, and reading the compiled program
back takes a second. NumPy draws the same distributions in less than one, with the same bits
on all platforms and meshes. A network that has other initializers is drawn by JAX.
"""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

# Standard deviation of a standard normal distribution that is cut at -2 and 2.
_TRUNCATED_STD = 0.87962566103423978
_record: contextvars.ContextVar[list | None] = contextvars.ContextVar('record', default=None)


@dataclasses.dataclass(frozen=True)
class Initializer:
  """A parameter's initial distribution; Flax takes it as any initializer.

  Attributes:
    distribution: 'truncated_normal' is cut at twice its standard deviation.
    scale: value of a constant; standard deviation, where `fan` is ''; else factor
      of the variance.
    fan: by what the variance is divided: numbers that enter into an output ('fan_in'),
      or outputs that an input enters into ('fan_out'); as in
      `jax.nn.initializers.variance_scaling`.
    is_identity: whether the first outputs of a convolution start as its inputs, as many
      as there are (Zagoruyko and Komodakis 2017, arXiv 1706.00388).
  """

  distribution: Literal['constant', 'normal', 'truncated_normal', 'uniform']
  scale: float
  fan: Literal['', 'fan_in', 'fan_out'] = ''
  is_identity: bool = False

  def __call__(self, key: Any, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """A parameter drawn by JAX."""
    value = self._drawn_by_jax(key, tuple(shape), jnp.dtype(dtype))
    if (record := _record.get()) is not None:
      record.append((value, self))
    return value

  # Traced once for each shape: all draws of a ResNet-50 were a quarter of its first trace.
  @functools.partial(jax.jit, static_argnums=(0, 2, 3))
  def _drawn_by_jax(self, key, shape, dtype):
    initializers = jax.nn.initializers
    if self.fan:
      draw = initializers.variance_scaling(self.scale, self.fan, self.distribution)
    else:
      draw = getattr(initializers, self.distribution)(self.scale)
    value = draw(key, shape, dtype)
    if not self.is_identity:
      return value
    copies = _copies(shape)
    return value.at[..., : copies.shape[-1]].set(copies)

  def draw(self, seed: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """A parameter drawn by NumPy, float32.

    Args:
      seed: non-negative numbers that determine it.
      shape: (..., in, out) of a Flax kernel, if `fan` is not ''.
    """
    if self.distribution == 'constant':
      return np.full(shape, self.scale, np.float32)
    values = self._random(np.random.default_rng(list(seed)), shape)
    if self.is_identity:
      copies = _copies(shape)
      values[..., : copies.shape[-1]] = copies
    return values

  def _random(self, generator, shape):
    std = self._std(shape)
    if self.distribution == 'uniform':
      limit = math.sqrt(3) * std
      return generator.random(shape, np.float32) * np.float32(2 * limit) - np.float32(limit)
    values = generator.standard_normal(shape, np.float32)
    if self.distribution == 'truncated_normal':
      while (beyond := np.abs(values) > 2).any():
        values[beyond] = generator.standard_normal(np.count_nonzero(beyond), np.float32)
      std = std / _TRUNCATED_STD if self.fan else std
    return values * np.float32(std)

  def _std(self, shape):
    if not self.fan:
      return self.scale
    *window, inputs, outputs = shape
    fan = math.prod(window) * (inputs if self.fan == 'fan_in' else outputs)
    return math.sqrt(self.scale / fan)


def _copies(shape):
  """The kernel (height, width, in, features) whose first outputs are its inputs."""
  height, width, inputs, features = shape
  kernel = np.zeros((height, width, inputs, min(inputs, features)), np.float32)
  kernel[height // 2, width // 2] = np.eye(inputs, features)[:, :inputs]
  return kernel


ZEROS = Initializer('constant', 0.0)
ONES = Initializer('constant', 1.0)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[jax.Array, Initializer]]]:
  """Yields a list to which each call of an initializer adds its value and itself."""
  record: list = []
  token = _record.set(record)
  try:
    yield record
  finally:
    _record.reset(token)
