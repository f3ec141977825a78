"""A convolution of which each device computes some of the channels."""

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

  Device k of the axis computes counts[k] of the features, beginning where those
  of the devices before it end, and all devices get all of them. Its gradient is
  written by hand, for that of a gather is not what is meant here: all devices
  have the same x and the same gradient of the result. That of x is the sum of
  what the devices' channels contribute; that of the kernel has this device's
  channels, zeros elsewhere, so that a sum over the axis completes it.

  Args:
    convolve: (x, kernel) -> (..., features), each feature of its own part of
      the kernel alone.
    x: (batch, height, width, channels), the same on all devices of the axis.
    kernel: (height, width, channels, features), likewise.
    counts: features of each device of the axis, 0 or more.

  Returns:
    What `convolve` gives, the same on all devices of the axis.

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


def part(gradient, counts: Sequence[int]):
  """Of a kernel's gradient this device's features, as wide as the widest's."""
  most = max(counts)
  return _switch(
    counts, lambda cut: lambda x: _widened(x[..., cut], 0, most), gradient
  )


def joined(parts, counts: Sequence[int]):
  """(devices, ..., widest) to (..., features): what the devices have of it."""
  return jnp.concatenate(
    [p[..., :n] for p, n in zip(parts, counts, strict=True) if n], -1
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _split(x, kernel, convolve, counts):
  like = jax.eval_shape(convolve, x, kernel)
  most = max(counts)

  def branch(cut):
    def compute(x, kernel):
      if cut.start == cut.stop:
        return jnp.zeros((*like.shape[:-1], most), like.dtype)
      return _widened(convolve(x, kernel[..., cut]), 0, most)

    return compute

  y = _switch(counts, branch, x, kernel)
  # As wide as the widest on every device: a gather's parts are of one size.
  return joined(lax.all_gather(y, _AXIS), counts)


def _split_forward(x, kernel, convolve, counts):
  return _split(x, kernel, convolve, counts), (x, kernel)


def _split_backward(convolve, counts, saved, dy):
  x, kernel = saved

  def of_x(cut):
    def compute(dy):
      if cut.start == cut.stop:
        return jnp.zeros_like(x)
      pull = jax.vjp(lambda x: convolve(x, kernel[..., cut]), x)[1]
      return pull(dy[..., cut])[0]

    return compute

  def of_kernel(cut):
    def compute(dy):
      if cut.start == cut.stop:
        return jnp.zeros_like(kernel)
      pull = jax.vjp(lambda w: convolve(x, w), kernel[..., cut])[1]
      return _widened(pull(dy[..., cut])[0], cut.start, kernel.shape[-1])

    return compute

  # Apart: of a network's first convolution nobody asks for that of x, and what
  # nobody asks for is neither computed nor summed.
  dx = _switch(counts, of_x, dy)
  # What a device has was rounded to the computation's dtype already; a sum in
  # bfloat16 would round once more for each device.
  wide = jnp.promote_types(dx.dtype, jnp.float32)
  summed = lax.psum(dx.astype(wide), _AXIS)
  if dx.dtype != wide:
    # Rounds nothing, but for a TPU XLA would else narrow the sum to what its
    # only user wants; a barrier does not keep it from that.
    bits = jnp.finfo(wide)
    summed = lax.reduce_precision(summed, bits.nexp, bits.nmant)
  return summed.astype(dx.dtype), _switch(counts, of_kernel, dy)


_split.defvjp(_split_forward, _split_backward)


def _switch(counts, branch, *operands):
  """What this device's branch gives, made for the slice of its features."""
  ends = np.cumsum(counts).tolist()
  cuts = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]
  return lax.switch(
    lax.axis_index(_AXIS), [branch(cut) for cut in cuts], *operands
  )


def _widened(x, start, width):
  """Zeros around the last axis."""
  after = width - start - x.shape[-1]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(start, after)])
