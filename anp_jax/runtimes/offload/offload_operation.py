"""Convolutions that the training device and offload devices compute together.

The program runs on the training device. Where a convolution begins, it sends
its input and each offload device's features of the kernel, computes its own
features, and waits for the others: host callbacks, so that an offload device
may be of any platform and host. Nothing else is computed twice, unlike on a
mesh whose devices split convolutions.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel.channel_split import split_operation
from anp_jax.runtimes.offload import device as device_lib

_TOKEN = jax.ShapeDtypeStruct((), np.int32)


class OffloadedConvolution:
  """A convolution of a traced program, and its calls when the program runs.

  The futures of a pass are kept here until the program fetches them, which its
  data flow orders: the call that starts a pass returns a number, the token,
  which the call that fetches the results takes.

  Attributes:
    convolve: (x, kernel) -> y.
    local: slice of the training device's features, which are the first.
    dtype: dtype of the kernel.
    has_backward: whether the program has its backward pass.
  """

  def __init__(
    self, convolve: Callable, x: Any, kernel: Any, counts: Sequence[int], devices: Sequence[Any]
  ):
    """Divides a convolution over devices.

    Args:
      convolve: (x, kernel, platform=None) -> (..., features), each feature
        computed from its own part of the kernel alone; platform: platform that
        it is lowered for, where that is not the program's.
      x: (batch, height, width, channels) array or its shape.
      kernel: (height, width, channels, features) array or its shape.
      counts: features of the training device, then of each offload device; 0
        or more.
      devices: offload devices, see `device.LocalDevice`.
    """
    self.convolve, self.local = convolve, slice(0, counts[0])
    self.dtype, self.has_backward = kernel.dtype, False
    y = jax.eval_shape(convolve, x, kernel)
    self._parts: list[tuple[Any, slice, device_lib.Task]] = []  # device, features, task
    end = counts[0]
    for count, device in zip(counts[1:], devices, strict=True):
      cut = slice(end, end := end + count)
      if count:
        task = device_lib.Task.create(convolve, x, kernel, y, count)
        self._parts.append((device, cut, task))
    self._tokens = itertools.count(1)
    self._results: dict[int, list] = {}  # futures by token
    self._kernel_gradients: list[list] = []  # futures that were not fetched yet

  # Called while the program is traced.

  def start_forward(self, x: jax.Array, kernel: jax.Array, keep: bool) -> jax.Array:
    """Starts the forward pass; returns its token."""
    start = functools.partial(self._start_forward, keep=keep)
    return jax.pure_callback(start, _TOKEN, x, kernel)

  def start_backward(
    self, token: jax.Array, dy: jax.Array, needs_dx: bool
  ) -> tuple[jax.Array, jax.Array]:
    """Starts the backward pass; returns its token and a zero.

    XLA cannot know that a value computed with the zero does not need the call.
    """
    self.has_backward = True
    start = functools.partial(self._start_backward, needs_dx=needs_dx)
    zero = jax.ShapeDtypeStruct((), self.dtype)
    return jax.pure_callback(start, (_TOKEN, zero), token, dy)

  def fetch(self, name: str, token: jax.Array, local: jax.Array | None) -> tuple:
    """Returns the offload devices' results, after the training device's own.

    Args:
      name: 'y', or 'x' for their parts of its gradient.
      token: token of the pass.
      local: array of the training device's part; None: it has none.
    """
    shapes = tuple(getattr(task, name) for _, _, task in self._parts)
    # An element of the local part: without it, XLA might wait for the others
    # before it computes.
    after = [] if local is None else [local[(0,) * local.ndim]]
    return jax.pure_callback(self._fetch, shapes, token, *after)

  # Called by the running program, in a thread of its own.

  def kernel_gradient(self) -> np.ndarray:
    """Returns the summed gradient of the offloaded features since the last call.

    In float32 at least, as the training device adds its own. Zero where there
    was none: a loop's body is traced twice, and one of the two runs.
    """
    passes, self._kernel_gradients = self._kernel_gradients, []
    wide = jnp.promote_types(self.dtype, jnp.float32)
    if not passes:
      return np.zeros((), wide)
    sums = [sum(f.result().astype(wide, copy=False) for f in futures) for futures in zip(*passes)]
    return np.concatenate(sums, -1)

  def _start_forward(self, x, kernel, keep):
    # Copies: their memory is the program's, which goes on.
    x = np.array(x)
    kernel = np.asarray(kernel)
    return self._store(
      [
        device.forward(task, x, np.array(kernel[..., cut]), keep)
        for device, cut, task in self._parts
      ]
    )

  def _start_backward(self, token, dy, needs_dx):
    del token  # the forward pass has been fetched
    dy = np.asarray(dy)
    gradients = [
      device.backward(task, np.array(dy[..., cut]), needs_dx) for device, cut, task in self._parts
    ]
    self._kernel_gradients.append([dkernel for _, dkernel in gradients])
    return self._store([dx for dx, _ in gradients]), np.zeros((), self.dtype)

  def _fetch(self, token, *after):
    del after
    return tuple(future.result() for future in self._results.pop(int(token)))

  def _store(self, futures):
    """Keeps a pass's futures, if it has any; returns its token."""
    token = next(self._tokens)
    if futures[0] is not None:
      self._results[token] = futures
    return np.int32(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def split(x: jax.Array, kernel: jax.Array, convolution: OffloadedConvolution) -> jax.Array:
  """Returns convolution.convolve(x, kernel), computed by all of its devices.

  The kernel's gradient has zeros for the features of the offload devices; see
  `kernel_gradients`.
  """
  return _forward(x, kernel, convolution, keep=False)[0]


def _split_forward(x, kernel, convolution):
  # Perturbed: the gradient is needed; that of images is not.
  y, token = _forward(x.value, kernel.value, convolution, keep=True)
  return y, (x.value, kernel.value, token, _Static(x.perturbed))


def _split_backward(convolution, residuals, dy):
  x, kernel, token, needs_dx = residuals
  if isinstance(dy, SymbolicZero):
    dy = jnp.zeros(dy.shape, dy.dtype)
  token, zero = convolution.start_backward(token, dy, needs_dx.value)
  # The offload devices start before the training device does.
  x, kernel, dy, token = lax.optimization_barrier((x, kernel, dy, token))
  local = convolution.local
  operands = convolution.convolve, x, kernel[..., local], dy[..., local]
  dx, dkernel = None, []
  if local.stop and needs_dx.value:
    dx = split_operation.x_gradient(*operands)
  if needs_dx.value:
    parts = convolution.fetch('x', token, dx)
    dx = sum(parts, start=0 if dx is None else dx)
  if local.stop:
    dkernel = [split_operation.kernel_gradient(*operands)]
  # What waits for the offload devices' gradients must not run before they have
  # started.
  zeros = jnp.broadcast_to(zero, (*kernel.shape[:-1], kernel.shape[-1] - local.stop))
  if dx is None:
    dx = jnp.zeros_like(x)
  return dx, jnp.concatenate([*dkernel, zeros], -1)


split.defvjp(_split_forward, _split_backward, symbolic_zeros=True)


def kernel_gradients(
  convolutions: Sequence[Sequence[OffloadedConvolution]], gradients: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
  """Returns the offload devices' parts of kernels' gradients, awaited all at once.

  Args:
    convolutions: uses of each kernel.
    gradients: gradient of each kernel on the training device, after which the
      offload devices' are awaited.

  Returns:
    (..., offloaded features) for each kernel, in its gradient's dtype.
  """
  shapes = tuple(
    jax.ShapeDtypeStruct((*g.shape[:-1], g.shape[-1] - uses[0].local.stop), g.dtype)
    for uses, g in zip(convolutions, gradients, strict=True)
  )

  def fetch(*after):
    del after
    sums = [sum(use.kernel_gradient() for use in uses) for uses in convolutions]
    return tuple(
      np.broadcast_to(total, s.shape).astype(s.dtype, copy=False)
      for total, s in zip(sums, shapes, strict=True)
    )

  return jax.pure_callback(fetch, shapes, *[g[..., -1, -1] for g in gradients])


def _forward(x, kernel, convolution, keep):
  """Returns y, and the token of the offload devices' pass."""
  token = convolution.start_forward(x, kernel, keep)
  x, kernel, token = lax.optimization_barrier((x, kernel, token))
  y = None
  if convolution.local.stop:
    y = convolution.convolve(x, kernel[..., convolution.local])
  parts = convolution.fetch('y', token, y)
  return jnp.concatenate([*([] if y is None else [y]), *parts], -1), token


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
  """A value that is known when the program is traced."""

  value: bool
