"""A convolution whose output channels are divided over the devices."""

from collections.abc import Callable
from collections.abc import Sequence
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax.parallel import mesh as mesh_lib

_AXIS = mesh_lib.MODEL


def split(convolve: Callable, x, kernel, counts: Sequence[int]):
  """convolve(x, kernel), inside a shard_map with the axis 'model'.

  Device k of the axis computes counts[k] of the features, which begin where
  those of the devices before it end, and all devices get all features. The
  gradient is written by hand, since that of a gather would be another: all
  devices have the same x and the same gradient of the result. The gradient of x
  is the sum over the devices' channels; that of the kernel has this device's
  channels and zeros elsewhere, so that a sum over the axis completes it.

  Args:
    convolve: (x, kernel) -> (..., features), each feature computed from its
      own part of the kernel alone.
    x: (batch, height, width, channels), the same on all devices of the axis.
    kernel: (height, width, channels, features), likewise.
    counts: features of each device of the axis, 0 or more.

  Returns:
    (..., features), the same on all devices of the axis.

  Raises:
    ValueError: if the counts are not of as many devices or features.
  """
  devices = lax.axis_size(_AXIS)
  if len(counts) != devices or sum(counts) != kernel.shape[-1]:
    raise ValueError(
      f'counts {tuple(counts)}: expected {devices} of them, '
      f'{kernel.shape[-1]} in all'
    )
  return _split(x, kernel, convolve, tuple(counts))


def local_part(gradient, counts: Sequence[int]):
  """This device's features of a kernel's gradient, padded to the most any has.

  Args:
    gradient: (height, width, channels, features).
    counts: features of each device of the axis.

  Returns:
    (height, width, channels, max(counts)).
  """
  widest = max(counts)
  return _switch(
    counts, lambda cut: lambda x: _padded(x[..., cut], 0, widest), gradient
  )


def join(parts, counts: Sequence[int]):
  """The devices' features one after another, without their padding.

  Args:
    parts: (devices, ..., max(counts)).
    counts: features of each device.

  Returns:
    (..., features).
  """
  return jnp.concatenate(
    [p[..., :n] for p, n in zip(parts, counts, strict=True) if n], -1
  )


def x_gradient(convolve: Callable, x, kernel, dy):
  """The gradient of convolve(x, kernel) with respect to x."""
  return jax.vjp(lambda x: convolve(x, kernel), x)[1](dy)[0]


def kernel_gradient(convolve: Callable, x, kernel, dy):
  """The gradient of convolve(x, kernel) with respect to kernel."""
  return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](dy)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _split(x, kernel, convolve, counts):
  shape = jax.eval_shape(convolve, x, kernel)
  widest = max(counts)

  def branch(cut):
    def compute(x, kernel):
      if cut.start == cut.stop:
        return jnp.zeros((*shape.shape[:-1], widest), shape.dtype)
      return _padded(convolve(x, kernel[..., cut]), 0, widest)

    return compute

  y = _switch(counts, branch, x, kernel)
  # Padded on every device: the parts of a gather are of one size.
  return join(lax.all_gather(y, _AXIS), counts)


def _split_forward(x, kernel, convolve, counts):
  return _split(x, kernel, convolve, counts), (x, kernel)


def _split_backward(convolve, counts, residuals, dy):
  x, kernel = residuals

  def x_branch(cut):
    def compute(dy):
      if cut.start == cut.stop:
        return jnp.zeros_like(x)
      return x_gradient(convolve, x, kernel[..., cut], dy[..., cut])

    return compute

  def kernel_branch(cut):
    def compute(dy):
      if cut.start == cut.stop:
        return jnp.zeros_like(kernel)
      local = kernel_gradient(convolve, x, kernel[..., cut], dy[..., cut])
      return _padded(local, cut.start, kernel.shape[-1])

    return compute

  # Two switches: a network's first convolution needs no gradient of x, and what
  # is not needed is neither computed nor summed.
  dx = _switch(counts, x_branch, dy)
  # Each device's part was rounded to the computation's dtype already; a sum in
  # bfloat16 would round once more for each device.
  wide = jnp.promote_types(dx.dtype, jnp.float32)
  summed = lax.psum(dx.astype(wide), _AXIS)
  if dx.dtype != wide:
    # Rounds nothing. Without it XLA for TPU narrows the sum to its only user's
    # dtype, even across a barrier.
    bits = jnp.finfo(wide)
    summed = lax.reduce_precision(summed, bits.nexp, bits.nmant)
  return summed.astype(dx.dtype), _switch(counts, kernel_branch, dy)


_split.defvjp(_split_forward, _split_backward)


def _switch(counts, branch, *operands):
  """Calls this device's branch, made by `branch` from its features' slice."""
  ends = np.cumsum(counts).tolist()
  cuts = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]
  return lax.switch(
    lax.axis_index(_AXIS), [branch(cut) for cut in cuts], *operands
  )


def _padded(x, start, width):
  """The array with zeros around its last axis, to that width."""
  after = width - start - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(start, after)])
