"""Maps whose channels are divided over the devices, inside a shard_map.

Device k of the mesh's axis 'model' has counts[k] channels, which begin where
those of the devices before it end. All devices run one program, so an array of a
device's channels is padded with zeros to the most channels of a device, `widest`;
zeros are sent only where that costs less than more messages.

Gradients are written by hand: all devices compute the same from a whole map,
and the gradient of a gather would count it once for each device.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib

_AXIS = mesh_lib.MODEL
# Below this number of elements, or this share of zeros, several messages cost more
# than one with the zeros.
_SMALL, _LITTLE = 2**14, 0.1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def own_features(
  convolve: Callable, x: jax.Array, kernel: jax.Array, counts: tuple[int, ...], sums: bool
) -> jax.Array:
  """A convolution's features that this device computes.

  Args:
    convolve: (x, kernel) -> (batch, height', width', features), each feature
      computed from its own part of the kernel alone.
    x: (batch, height, width, channels), the same on all devices of the axis.
    kernel: (height, width, channels, features); only this device's features are
      used.
    counts: features of each device of the axis, 0 or more.
    sums: whether the gradient of x is summed over the devices; False where
      `operand` sums it.

  Returns:
    (batch, height', width', widest). The kernel's gradient has this device's
    features, and zeros elsewhere.
  """
  del sums
  shape = jax.eval_shape(convolve, x, kernel)
  widest = max(counts)

  def branch(cut):
    def compute(x, kernel):
      if cut.start == cut.stop:
        return jnp.zeros((*shape.shape[:-1], widest), shape.dtype)
      return _padded(convolve(x, kernel[..., cut]), 0, widest)

    return compute

  return _switch(counts, branch, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole(part: jax.Array, counts: tuple[int, ...]) -> jax.Array:
  """All channels of a map on each device.

  Args:
    part: this device's channels, (..., widest).
    counts: channels of each device of the axis.

  Returns:
    (..., channels); the gradient of `part` is that of this device's channels.
  """
  return _gathered(part, counts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def operand(part: jax.Array, gathered: jax.Array, counts: tuple[int, ...]) -> jax.Array:
  """`gathered`, as the operand of a convolution that is split.

  Each device computes the gradient from its features of the result. The gradient is
  their sum; a device receives its channels of it.

  Args:
    part: this device's channels, (..., widest).
    gathered: (..., channels), from `whole`; it has no gradient.
    counts: channels of each device of the axis.
  """
  del part, counts
  return gathered


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def own_part(x: jax.Array, counts: tuple[int, ...]) -> jax.Array:
  """This device's channels of an array that all devices have: (..., widest).

  The gradient of x is whole on all devices.
  """
  return _cut(x, counts)


def join(parts: Sequence[jax.Array], counts: Sequence[int]) -> jax.Array:
  """The channels (..., channels) of all devices, from (..., widest) of each."""
  return jnp.concatenate([p[..., :n] for p, n in zip(parts, counts, strict=True) if n], -1)


def x_gradient(convolve: Callable, x: jax.Array, kernel: jax.Array, dy: Any) -> jax.Array:
  """The gradient of convolve(x, kernel) with respect to x."""
  return jax.vjp(lambda x: convolve(x, kernel), x)[1](dy)[0]


def kernel_gradient(convolve: Callable, x: jax.Array, kernel: jax.Array, dy: Any) -> jax.Array:
  """The gradient of convolve(x, kernel) with respect to kernel."""
  return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](dy)[0]


def _own_features_forward(convolve, x, kernel, counts, sums):
  return own_features(convolve, x, kernel, counts, sums), (x, kernel)


def _own_features_backward(convolve, counts, sums, residuals, dy):
  x, kernel = residuals

  def x_branch(cut):
    def compute(dy):
      if cut.start == cut.stop:
        return jnp.zeros_like(x)
      part = dy[..., : cut.stop - cut.start]
      return x_gradient(convolve, x, kernel[..., cut], part)

    return compute

  def kernel_branch(cut):
    def compute(dy):
      if cut.start == cut.stop:
        return jnp.zeros_like(kernel)
      part = dy[..., : cut.stop - cut.start]
      gradient = kernel_gradient(convolve, x, kernel[..., cut], part)
      return _padded(gradient, cut.start, kernel.shape[-1])

    return compute

  # Two switches: a network's first convolution needs no gradient of x, which is then
  # neither computed nor summed.
  dx = _switch(counts, x_branch, dy)
  if sums:
    # Each device has rounded its part to the computation's dtype; a sum in bfloat16
    # would round once more for each device.
    dtype, wide = dx.dtype, _wide(dx.dtype)
    dx = lax.psum(dx.astype(wide), _AXIS)
    if dtype != wide:
      # Rounds nothing. Without it XLA for TPU narrows the sum to its only
      # user's dtype, even across a barrier.
      bits = jnp.finfo(wide)
      dx = lax.reduce_precision(dx, bits.nexp, bits.nmant).astype(dtype)
  return dx, _switch(counts, kernel_branch, dy)


own_features.defvjp(_own_features_forward, _own_features_backward)

whole.defvjp(
  lambda part, counts: (whole(part, counts), None), lambda counts, _, dy: (_cut(dy, counts),)
)
operand.defvjp(
  lambda part, gathered, counts: (gathered, None),
  lambda counts, _, dx: (_scattered_sum(dx, counts), jnp.zeros_like(dx)),
)
own_part.defvjp(
  lambda x, counts: (own_part(x, counts), None), lambda counts, _, dy: (_gathered(dy, counts),)
)


def _gathered(part, counts):
  """All devices' channels (..., channels)."""
  if _is_padded(part, counts):
    return join(lax.all_gather(part, _AXIS), counts)
  devices = len(counts)
  # From the device itself, the one before it and so on around.
  blocks = [part] + [_rotated(part, counts, step) for step in range(1, devices)]
  order = (lax.axis_index(_AXIS) - np.arange(devices)) % devices
  return join(jnp.take(jnp.stack(blocks), order, axis=0), counts)


def _scattered_sum(x, counts):
  """This device's channels of the sum of all devices' arrays (..., channels).

  The arrays are sent in their dtype and added in float32 or wider.
  """
  devices, widest = len(counts), max(counts)
  ends = np.cumsum(counts).tolist()
  for_each = jnp.stack(
    [_padded(x[..., end - n : end], 0, widest) for end, n in zip(ends, counts, strict=True)]
  )
  if _is_padded(for_each[0], counts):
    parts = lax.all_to_all(for_each, _AXIS, 0, 0)
  else:
    me = lax.axis_index(_AXIS)
    parts = [lax.dynamic_index_in_dim(for_each, me, keepdims=False)]
    for step in range(1, devices):
      part = lax.dynamic_index_in_dim(for_each, (me + step) % devices, keepdims=False)
      received = [counts[(k + step) % devices] for k in range(devices)]
      parts.append(_rotated(part, received, step))
    parts = jnp.stack(parts)
  return parts.astype(_wide(x.dtype)).sum(0).astype(x.dtype)


def _is_padded(part, counts):
  """Whether parts are sent with their zeros, in one collective."""
  zeros = 1 - sum(counts) / (len(counts) * max(counts))
  return zeros < _LITTLE or part.size < _SMALL


def _rotated(part, sent, step):
  """The array (..., widest) that the device `step` places before this one sends.

  Args:
    part: (..., widest), which this device sends to the one `step` places after it.
    sent: number of channels that each device of the axis sends.
    step: places along the axis.
  """
  levels = sorted({0, *sent})
  # A message has one number of channels on all devices that send it.
  pieces = [
    lax.ppermute(
      part[..., low:high],
      _AXIS,
      [(k, (k + step) % len(sent)) for k, n in enumerate(sent) if n >= high],
    )
    for low, high in zip(levels, levels[1:], strict=False)
  ]
  return _padded(jnp.concatenate(pieces, -1), 0, part.shape[-1])


def _cut(x, counts):
  """This device's channels of x (..., channels), and zeros: (..., widest)."""
  widest = max(counts)
  return _switch(counts, lambda cut: lambda x: _padded(x[..., cut], 0, widest), x)


def _switch(counts, branch, *operands):
  """Calls branch(slice of this device's channels) with the operands."""
  ends = np.cumsum(counts).tolist()
  cuts = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]
  return lax.switch(lax.axis_index(_AXIS), [branch(cut) for cut in cuts], *operands)


def _padded(x, start, width):
  """The array, padded with zeros to (..., width)."""
  after = width - start - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(start, after)])


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)
