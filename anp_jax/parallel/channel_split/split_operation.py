"""Maps whose channels are divided over the devices, inside a shard_map.

Device k of the mesh's axis 'model' has counts[k] channels, which begin where
those of the devices before it end. In an array they are followed by zeros up to
the most that a device has, `widest`, since all devices run one program; they
travel only where that costs less than more messages.

Gradients are by hand: all devices compute the same from a map that is whole,
and the gradient of a gather would count it once for each device.
"""

from collections.abc import Callable, Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib

_AXIS = mesh_lib.MODEL
# Elements, and a share of zeros among them, under which several messages cost
# more than sending the zeros in one.
_SMALL, _LITTLE = 2**14, 0.1


def own_features(convolve: Callable, x, kernel, counts: Sequence[int], *, sums: bool = True):
  """A convolution's features that this device computes.

  Args:
    convolve: (x, kernel) -> (batch, height', width', features), each feature
      computed from its own part of the kernel alone.
    x: (batch, height, width, channels), the same on all devices of the axis.
    kernel: (height, width, channels, features); a device's own features count.
    counts: features of each device of the axis, 0 or more.
    sums: whether the gradient of x is summed over the devices; each has that
      of its own features. Not where `operand` sums it.

  Returns:
    (batch, height', width', widest). The kernel's gradient has this device's
    features, and zeros elsewhere.

  Raises:
    ValueError: if the counts are not of as many devices or features.
  """
  devices = lax.axis_size(_AXIS)
  if len(counts) != devices or sum(counts) != kernel.shape[-1]:
    raise ValueError(
      f'counts {tuple(counts)}: expected {devices} of them, {kernel.shape[-1]} in all'
    )
  return _own_features(x, kernel, convolve, tuple(counts), sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def whole(part, counts: tuple[int, ...]):
  """All channels of a map on each device, from its own ones.

  Args:
    part: this device's channels, (..., widest).
    counts: channels of each device of the axis.

  Returns:
    (..., channels); of its gradient, a device takes that of its own channels.
  """
  return _gathered(part, counts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def operand(part, gathered, counts: tuple[int, ...]):
  """`gathered`, as the operand of a convolution that is split.

  Each device has the gradient of its own features of the result. Their sum is
  the gradient; a device gets that of its own channels alone.

  Args:
    part: this device's channels, (..., widest).
    gathered: (..., channels), from `whole`; it has no gradient.
    counts: channels of each device of the axis.
  """
  del part, counts
  return gathered


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def own_part(x, counts: tuple[int, ...]):
  """This device's channels of an array that all devices have: (..., widest).

  Its gradient is whole on all devices.
  """
  return _cut(x, counts)


def join(parts, counts: Sequence[int]):
  """The devices' channels one after another, without the zeros.

  Args:
    parts: of each device (..., widest).
    counts: channels of each device.

  Returns:
    (..., channels).
  """
  return jnp.concatenate([p[..., :n] for p, n in zip(parts, counts, strict=True) if n], -1)


def x_gradient(convolve: Callable, x, kernel, dy):
  """The gradient of convolve(x, kernel) with respect to x."""
  return jax.vjp(lambda x: convolve(x, kernel), x)[1](dy)[0]


def kernel_gradient(convolve: Callable, x, kernel, dy):
  """The gradient of convolve(x, kernel) with respect to kernel."""
  return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](dy)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _own_features(x, kernel, convolve, counts, sums):
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


def _own_features_forward(x, kernel, convolve, counts, sums):
  return _own_features(x, kernel, convolve, counts, sums), (x, kernel)


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

  # Two switches: a network's first convolution needs no gradient of x, and what
  # is not needed is neither computed nor summed.
  dx = _switch(counts, x_branch, dy)
  if sums:
    # Each device's part was rounded to the computation's dtype already; a sum
    # in bfloat16 would round once more for each device.
    dtype, wide = dx.dtype, _wide(dx.dtype)
    dx = lax.psum(dx.astype(wide), _AXIS)
    if dtype != wide:
      # Rounds nothing. Without it XLA for TPU narrows the sum to its only
      # user's dtype, even across a barrier.
      bits = jnp.finfo(wide)
      dx = lax.reduce_precision(dx, bits.nexp, bits.nmant).astype(dtype)
  return dx, _switch(counts, kernel_branch, dy)


_own_features.defvjp(_own_features_forward, _own_features_backward)

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
  """All devices' channels, from those of each."""
  if _is_padded(part, counts):
    return join(lax.all_gather(part, _AXIS), counts)
  devices = len(counts)
  # From the device itself, the one before it and so on around.
  blocks = [part] + [_rotated(part, counts, step) for step in range(1, devices)]
  order = (lax.axis_index(_AXIS) - np.arange(devices)) % devices
  return join(jnp.take(jnp.stack(blocks), order, axis=0), counts)


def _scattered_sum(x, counts):
  """This device's channels of the sum of all devices' arrays (..., channels).

  They travel in their dtype, to which each device rounded them, and are added
  in float32 or wider.
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
  """Whether parts travel with their zeros, in one collective."""
  zeros = 1 - sum(counts) / (len(counts) * max(counts))
  return zeros < _LITTLE or part.size < _SMALL


def _rotated(part, sent, step):
  """What the device `step` places before this one sends it: (..., widest).

  Args:
    part: (..., widest), what this device sends to the one `step` places on.
    sent: channels of it that each device of the axis sends.
    step: places along the axis.
  """
  levels = sorted({0, *sent})
  # A message is of as many channels on all devices that send it.
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
  """Calls this device's branch, made by `branch` from its channels' slice."""
  ends = np.cumsum(counts).tolist()
  cuts = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]
  return lax.switch(lax.axis_index(_AXIS), [branch(cut) for cut in cuts], *operands)


def _padded(x, start, width):
  """The array with zeros around its last axis, to that width."""
  after = width - start - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(start, after)])


def _wide(dtype):
  return jnp.promote_types(dtype, jnp.float32)
