"""Convolutions, batch norm and mean pools by oneDNN, with their gradients.

They are for platform 'cpu_onednn': a CPU for which `system.onednn` has a library.
"""

import dataclasses
import functools
import itertools
import math
from typing import TypeAlias

import jax
from jax import custom_derivatives
import jax.numpy as jnp

from anp_jax.models.layers import channelwise, depthwise, windows
from anp_jax.system import onednn

Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct
# Pixels of a map up to which XLA multiplies by a float32 kernel of 1x1.
_PRODUCT_PIXELS = 256


def takes_convolution(
  x: Shaped, kernel: Shaped, stride: int, pads: windows.Pads, platform: str, groups: int = 1
) -> bool:
  """Whether oneDNN computes a convolution; arguments are `convolve`'s."""
  if not _may_take(x, platform) or kernel.dtype != x.dtype:
    return False
  spec = onednn.convolution_of('forward', x, kernel, stride, pads, groups)
  return all(
    onednn.takes(spec._replace(direction=direction))
    for direction in ('forward', 'backward_data', 'backward_weights')
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def convolve(
  x: jax.Array, kernel: jax.Array, stride: int, pads: windows.Pads, groups: int = 1
) -> jax.Array:
  """Convolution by oneDNN; sums are in float32.

  A product with a float32 kernel of 1x1 and the gradient of its input are
  XLA's on small maps: it takes the kernel as it is, which oneDNN copies first
  (the 1x1 convolutions of ResNet-50 on up to 16 x 16 pixels: 0.80 to 0.98 of
  XLA's speed; on 28 x 28 and more: 0.95 to 1.3). The kernel's gradient is
  oneDNN's there, too.

  Args:
    x: (batch, height, width, channels), float32 or bfloat16.
    kernel: (height, width, channels of a group, features), likewise.
    stride: pixels, both ways.
    pads: padding of x, ((top, bottom), (left, right)).
    groups: groups of channels, each convolved with its share of the features.

  Returns:
    (batch, height', width', features), the dtype of x.
  """
  if _is_product(x, kernel, stride, pads, groups):
    return x @ kernel[0, 0]
  spec = onednn.convolution_of('forward', x, kernel, stride, pads, groups)
  result = jax.ShapeDtypeStruct(spec.result, x.dtype)
  return onednn.call(spec, result, x, kernel)


def _convolve_forward(x, kernel, stride, pads, groups):
  # Whether x has a gradient is in the structure: () or None.
  request = () if x.perturbed else None
  x, kernel = x.value, kernel.value
  return convolve(x, kernel, stride, pads, groups), (x, kernel, request)


def _convolve_backward(stride, pads, groups, saved, dy):
  x, kernel, request = saved
  if isinstance(dy, custom_derivatives.SymbolicZero):
    dy = jnp.zeros(dy.shape, dy.dtype)
  arguments = x, kernel, stride, pads, groups
  dx = None
  if request is not None and _is_product(*arguments):
    dx = dy @ kernel[0, 0].T
  elif request is not None:
    spec = onednn.convolution_of('backward_data', *arguments)
    dx = onednn.call(spec, _like(x), dy, kernel)
  if groups == x.shape[-1] == kernel.shape[-1]:
    dkernel = depthwise.kernel_gradient(x, kernel, dy, stride, pads)
    if dkernel is not None:
      return dx, dkernel
  # The kernel's gradient waits for dx: else XLA, which sees no order between
  # dx and the update of the kernel in place, copies all kernels first (52 ms
  # of a step of ResNet-50 at 8 x 224 px).
  spec = onednn.convolution_of('backward_weights', *arguments)
  awaited = () if dx is None else (dx,)
  return dx, onednn.call(spec, _like(kernel), x, dy, *awaited)


# Else a gradient of the kernel alone, which is asked for where convolutions are
# split, would wait for one of x that nobody needs.
convolve.defvjp(_convolve_forward, _convolve_backward, symbolic_zeros=True)


def _is_product(x, kernel, stride, pads, groups):
  return (
    x.dtype == jnp.float32
    and kernel.shape[:2] == (1, 1)
    and stride == groups == 1
    and not any(itertools.chain(*pads))
    and math.prod(x.shape[1:3]) <= _PRODUCT_PIXELS
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class After:
  """What follows a convolution before its result is rounded.

  Attributes:
    factor: (features,) float32, factor of the result.
    summand: (features,) float32, summand of the product.
    added: further summand, like the result; or None.
    relu: whether a ReLU is last. It makes 0 of NaN.
  """

  factor: jax.Array | None
  summand: jax.Array | None
  added: jax.Array | None
  relu: bool = dataclasses.field(metadata={'static': True})

  def follow(self, y: jax.Array) -> jax.Array:
    """Returns a plain convolution's result after these operations."""

    @channelwise.by_channel
    def followed(y, factor, summand, added):
      wide = y.astype(jnp.float32) * factor + summand
      if added is not None:
        wide += added.astype(jnp.float32)
      return (jax.nn.relu(wide) if self.relu else wide).astype(y.dtype)

    return followed(y, self.factor, self.summand, self.added)


def takes_convolve_and(
  x: Shaped, kernel: Shaped, after: After, stride: int, pads: windows.Pads
) -> bool:
  """Whether oneDNN computes `convolve_and`, whose arguments these are.

  Its other condition is `takes_convolution`. Arrays may be shapes and dtypes.
  """
  added = x if after.added is None else after.added
  return x.dtype == added.dtype and onednn.takes(_spec_and(x, kernel, after, stride, pads))


@functools.partial(jax.jit, static_argnums=(3, 4))
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def convolve_and(
  x: jax.Array, kernel: jax.Array, after: After, stride: int, pads: windows.Pads
) -> jax.Array:
  """A convolution and what follows it, in one call.

  Args:
    x: (batch, height, width, channels), float32 or bfloat16.
    kernel: (height, width, channels, features), float32.
    after: operations that follow.
    stride: pixels, both ways.
    pads: padding of x, ((top, bottom), (left, right)).

  Returns:
    (batch, height', width', features), the dtype of x.
  """
  spec = _spec_and(x, kernel, after, stride, pads)
  result = jax.ShapeDtypeStruct(spec.result, x.dtype)
  arguments = x, kernel, after.factor, after.summand
  if after.added is None:
    return onednn.call(spec, result, *arguments)
  return onednn.call(spec, result, *arguments, after.added, into=4)


def _convolve_and_forward(x, kernel, after, stride, pads):
  return convolve_and(x, kernel, after, stride, pads), (x, kernel, after)


def _convolve_and_backward(stride, pads, saved, dy):
  def apart(x, kernel, after):
    return after.follow(convolve(x, kernel.astype(x.dtype), stride, pads))

  return jax.vjp(apart, *saved)[1](dy)


convolve_and.__wrapped__.defvjp(_convolve_and_forward, _convolve_and_backward)


def _spec_and(x, kernel, after, stride, pads):
  steps = ('norm',) + ('add',) * (after.added is not None)
  return onednn.convolution_of('forward', x, kernel, stride, pads, 1)._replace(
    after=steps + ('relu',) * after.relu
  )


@functools.partial(jax.jit, static_argnums=(3, 4))
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalise(
  x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, relu: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Batch norm of each group by oneDNN, and the ReLU after it.

  Args:
    x: (groups, rows, channels), float32 or bfloat16.
    scale: (channels,), float32.
    bias: (channels,), float32.
    epsilon: added to the variance.
    relu: whether y is what a ReLU makes of it.

  Returns:
    y: like x; mean and variance (biased): (groups, channels), float32.
  """
  return _normalise_forward(x, scale, bias, epsilon, relu)[0]


def takes_norm(x: Shaped, scale: Shaped, relu: bool, platform: str) -> bool:
  """Whether oneDNN computes a batch norm; the arguments are `normalise`'s."""
  return (
    _may_take(x, platform)
    and scale.dtype == jnp.float32
    and all(
      onednn.takes(_norm_spec(direction, x, 1e-5, relu)) for direction in ('forward', 'backward')
    )
  )


def _normalise_forward(x, scale, bias, epsilon, relu):
  spec = _norm_spec('forward', x, epsilon, relu)
  statistics = jax.ShapeDtypeStruct((x.shape[0], x.shape[2]), jnp.float32)
  results = [_like(x), statistics, statistics]
  if relu:
    mask = onednn.mask_bytes(spec)
    results.append(jax.ShapeDtypeStruct((x.shape[0], mask), jnp.uint8))
  y, mean, var, *mask = onednn.call(spec, results, x, scale, bias)
  return (y, mean, var), (x, mean, var, scale, mask)


def _normalise_backward(epsilon, relu, saved, cotangents):
  x, mean, var, scale, mask = saved
  dx, dscale, dbias = onednn.call(
    _norm_spec('backward', x, epsilon, relu),
    (_like(x), _like(mean), _like(mean)),
    x,
    mean,
    var,
    cotangents[0],
    scale,
    *mask,
  )
  return dx, dscale.sum(0), dbias.sum(0)


normalise.__wrapped__.defvjp(_normalise_forward, _normalise_backward)


def _norm_spec(direction, x, epsilon, relu):
  dtype = jnp.dtype(x.dtype).name
  return onednn.BatchNormSpec(direction, dtype, tuple(x.shape), epsilon, relu)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def mean_pool(x: jax.Array, shape: tuple[int, ...], over: windows.Windows) -> jax.Array:
  """Mean of each window; padding counts as zeros.

  Args:
    x: (batch, height, width, channels), float32 or bfloat16.
    shape: shape of x.
    over: square windows.

  Returns:
    (batch, height', width', channels), the dtype of x.
  """
  spec = _pool_spec('forward', x, shape, over)
  return onednn.call(spec, jax.ShapeDtypeStruct(spec.result, x.dtype), x)


def takes_mean_pool(x: Shaped, over: windows.Windows, platform: str) -> bool:
  """Whether oneDNN computes means over windows; `mean_pool`'s arguments."""
  return _may_take(x, platform) and all(
    onednn.takes(_pool_spec(direction, x, x.shape, over)) for direction in ('forward', 'backward')
  )


def _mean_pool_forward(x, shape, over):
  return mean_pool(x, shape, over), None


def _mean_pool_backward(shape, over, _, dy):
  spec = _pool_spec('backward', dy, shape, over)
  return (onednn.call(spec, jax.ShapeDtypeStruct(shape, dy.dtype), dy),)


mean_pool.defvjp(_mean_pool_forward, _mean_pool_backward)


def _pool_spec(direction, x, shape, over):
  rows, columns = windows.size(shape[1:3], over)
  return onednn.MeanPoolSpec(
    direction,
    jnp.dtype(x.dtype).name,
    tuple(shape),
    (shape[0], rows, columns, shape[3]),
    over.shape[0],
    over.stride,
    (*over.pads[0], *over.pads[1]),
  )


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _may_take(x, platform):
  return platform == onednn.PLATFORM and x.size > 0
