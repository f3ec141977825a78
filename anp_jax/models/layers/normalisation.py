"""Batch normalisation of groups, also with a ReLU, and gradients by hand."""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from anp_jax.models.layers import sums


# The inner jit: a network has many norms of few shapes, traced once each.
@functools.partial(jax.jit, static_argnums=(3, 4, 5))
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def normalise(
  x: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  epsilon: float,
  axis_name: str | None = None,
  platform: str = 'cpu',
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Normalises each group by its own mean and variance.

  The gradient is written by hand in two passes over x; autodiff makes many
  (28 ms against 4.4 for 8x112x112x64 on 2 CPU cores). No gradient flows
  through the returned statistics, which only feed running averages.

  Args:
    x: (groups, rows, channels), any float dtype.
    scale: (channels,).
    bias: (channels,).
    epsilon: summand of the variance.
    axis_name: mesh axis whose devices share each group, or None.
    platform: platform of the device that computes.

  Returns:
    y: like x; mean and variance (biased): (groups, channels), float32 or wider.
  """
  return _forward(x, scale, bias, epsilon, axis_name, platform)[0]


def _forward(x, scale, bias, epsilon, axis_name, platform):
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean, var = _moments(wide, axis_name, platform)
  inverse = lax.rsqrt(var + epsilon)
  y = _scaled(wide, mean, inverse * scale, bias).astype(x.dtype)
  return (y, mean, var), (x, mean, inverse, scale)


def _scaled(x, mean, factor, bias):
  # Not x * factor + (bias - mean * factor): with a mean of a thousand
  # deviations the two terms would cancel three digits.
  return (x - mean[:, None]) * factor[:, None] + bias


def _moments(x, axis_name, platform):
  """Mean and biased variance of each group.

  E[x^2] - E[x]^2 would lose twice the digits by which the mean exceeds the
  deviation. A CPU takes the mean first, then the squares around it, which
  costs it nothing (5.7 against 6.1 times the time of reading x). An
  accelerator, which memory holds up, reads x once, less its first row: where
  that lies k deviations off the mean, the variance is good to k^2 6e-8.
  """
  if platform.startswith('cpu'):
    over_rows = functools.partial(sums.over_rows, platform=platform)
    mean = _across(over_rows(lambda x: x, x) / x.shape[1], axis_name)
    var = over_rows(lambda x: jnp.square(x - mean[:, None]), x)
    return mean, _across(var / x.shape[1], axis_name)
  guess = x[:, :1]
  around = x - guess
  totals = sums.pair_over_rows((lambda x: x, around), (jnp.square, around), platform)
  mean, square = (total / x.shape[1] for total in totals)
  var = jnp.maximum(square - jnp.square(mean), 0)
  mean = mean + guess[:, 0]
  if axis_name is None:
    return mean, var
  # Devices guess apart, so their variances are joined around the common mean.
  common = lax.pmean(mean, axis_name)
  return common, lax.pmean(var + jnp.square(mean - common), axis_name)


def _backward(_, axis_name, platform, saved, cotangents):
  x, mean, inverse, scale = saved
  wide, dy = x.astype(mean.dtype), cotangents[0].astype(mean.dtype)

  def unit(x):
    return (x - mean[:, None]) * inverse[:, None]

  sum_dy, sum_dy_unit = sums.pair_over_rows(
    (lambda dy: dy, dy), (lambda x, dy: dy * unit(x), wide, dy), platform
  )
  mean_dy = _across(sum_dy / x.shape[1], axis_name)
  mean_dy_unit = _across(sum_dy_unit / x.shape[1], axis_name)
  dx = (dy - mean_dy[:, None] - unit(wide) * mean_dy_unit[:, None]) * ((inverse * scale)[:, None])
  dscale = sum_dy_unit.sum(0).astype(scale.dtype)
  return dx.astype(x.dtype), dscale, sum_dy.sum(0).astype(scale.dtype)


normalise.__wrapped__.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def normalise_relu(
  x: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  epsilon: float,
  axis_name: str | None,
  platform: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`normalise` and a ReLU, whose gradient takes no pass of its own."""
  return _relu_forward(x, scale, bias, epsilon, axis_name, platform)[0]


def _relu_forward(x, scale, bias, *settings):
  (y, mean, var), saved = _forward(x, scale, bias, *settings)
  return (jax.nn.relu(y), mean, var), (*saved, bias)


def _relu_backward(epsilon, axis_name, platform, saved, cotangents):
  x, mean, inverse, scale, bias = saved
  dy, *statistics = cotangents
  # The sign of y as it was rounded; XLA keeps it from the forward pass on, a
  # byte each. A ReLU by itself reads y, 2 or 4 bytes, and writes its gradient.
  y = _scaled(x.astype(mean.dtype), mean, inverse * scale, bias)
  dy = jnp.where(y.astype(x.dtype) > 0, dy, jnp.zeros((), dy.dtype))
  return _backward(epsilon, axis_name, platform, saved[:4], (dy, *statistics))


normalise_relu.__wrapped__.defvjp(_relu_forward, _relu_backward)


def _across(x, axis_name):
  return x if axis_name is None else lax.pmean(x, axis_name)
