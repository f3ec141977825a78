"""Batch normalisation against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.models.layers import onednn_layers
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import onednn
from tests import layer_references as references

PLATFORMS = ('cpu', 'gpu')  # the two ways to take moments, both run on a CPU


def _example(batch=8, side=3):
  random, channels = np.random.default_rng(2), 5
  x = random.normal(size=(batch, side, side, channels)) * 2 + 3
  # Rows differ in mean and spread, so that the wrong grouping shows.
  x = x * (1 + np.arange(batch))[:, None, None, None] + np.arange(channels)
  scale, bias = random.normal(size=(2, channels))
  return x, scale, bias, random.normal(size=x.shape)


def _by_onednn(x, scale, bias, epsilon=0.0):
  if onednn.find() is None:
    pytest.skip(f'no oneDNN: {onednn.missing_reason()}')
  return onednn_layers.normalise(x, scale, bias, epsilon, False)


def _assert_close(results, wants, mean, var):
  """Asserts y, gradients and the new statistics, of a momentum of 0.75."""
  stats = 0.375 + 0.25 * mean.mean(0), 1.5 + 0.25 * var.mean(0)
  # Means are up to 30, spreads from 2: a few of 16 digits are lost, and a
  # missing term shows at 1e-1.
  for got, want in zip(results, (*wants, *stats), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


# 0: all of the batch.
@pytest.mark.parametrize('group', [1, 4, 0])
@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('relu', [False, True])
def test_batch_norm_equals_numpy(x64, relu, platform, group):
  x, scale, bias, dy = _example()
  layer = layers.BatchNorm(
    group, momentum=0.75, dtype='float64', param_dtype='float64', platform=platform, relu=relu
  )
  y, gradients, new = references.norm_step(layer, x, scale, bias, dy)
  want, mean, var, *wants = references.normalisation(x, scale, bias, group or len(x), dy, relu)
  assert not relu or 0.2 < (want > 0).mean() < 0.8
  _assert_close((y, *gradients, new['mean'], new['var']), (want, *wants), mean, var)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('platform', PLATFORMS)
def test_a_relu_after_the_norm_has_gradient_0_at_0(platform, dtype):
  """JAX has it so, too. Where scale and bias are 0, so is each y."""
  random = np.random.default_rng(6)
  x, dy = jnp.asarray(random.normal(size=(2, 8, 5, 3, 16)), dtype)
  zero = jnp.zeros(16)
  bias = jnp.where(jnp.arange(16) < 8, zero, 1.0)
  layer = layers.BatchNorm(4, dtype=dtype, platform=platform, relu=True)
  y, (dx, dscale, dbias), _ = references.norm_step(layer, x, zero, bias, dy)
  np.testing.assert_array_equal(np.float32(y), np.broadcast_to(bias, y.shape))
  assert not np.float32(dx).any()
  assert not dscale[:8].any() and not dbias[:8].any()
  # One of y above 0 lets all of dy through.
  want = np.float64(dy).sum((0, 1, 2))[8:]
  np.testing.assert_allclose(dbias[8:], want, rtol=0, atol=1e-4)


def test_batch_norm_uses_running_statistics_outside_training(x64):
  x, scale, bias, _ = _example()
  mean, var = np.linspace(-1, 1, 5), np.linspace(1, 3, 5)
  variables = {'params': {'scale': scale, 'bias': bias}, 'batch_stats': {'mean': mean, 'var': var}}
  # No multiple of the group: the last batch of an evaluation may be short.
  layer = layers.BatchNorm(3, dtype='float64', param_dtype='float64')
  y = layer.apply(variables, x, False)
  want = (x - mean) / np.sqrt(var + 1e-5) * scale + bias
  np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('function', [layers.normalise, _by_onednn])
def test_no_gradient_flows_through_statistics(function):
  def loss(x):
    _, mean, var = function(x, jnp.ones(16), jnp.zeros(16), 1e-5)
    return mean.sum() + var.sum()

  x = np.float32(np.random.default_rng(4).normal(size=(2, 5, 16)))
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 0)


def test_batch_norm_in_bfloat16_keeps_float32_statistics():
  x, scale, bias, dy = map(np.float32, _example(batch=8, side=8))
  wide = jnp.asarray(x, jnp.bfloat16)
  layer = layers.BatchNorm(4, momentum=0.0, dtype='bfloat16')
  y, gradients, new = references.norm_step(layer, wide, scale, bias, jnp.asarray(dy, jnp.bfloat16))
  assert y.dtype == jnp.bfloat16 and gradients[0].dtype == jnp.bfloat16
  assert gradients[1].dtype == gradients[2].dtype == jnp.float32
  # Of the input that bfloat16 can hold, the statistics are good to float32:
  # bfloat16's own 8 bits would be off by 4e-3.
  want, mean, var, *_ = references.normalisation(np.float32(wide), scale, bias, 4)
  for name, expected in (('mean', mean), ('var', var)):
    assert new[name].dtype == jnp.float32
    np.testing.assert_allclose(new[name], expected.mean(0), rtol=2e-5)
  # The result itself is rounded once to bfloat16.
  np.testing.assert_allclose(np.float32(y), want, rtol=2**-8, atol=2e-3)


def test_batch_norm_refuses_a_batch_that_is_not_whole_groups():
  layer = layers.BatchNorm(4)
  x = jnp.ones((6, 2, 2, 3))
  variables = layer.init(jax.random.key(0), x, False)
  with pytest.raises(ValueError, match='6 images.*group of 4'):
    layer.apply(variables, x, True, mutable=['batch_stats'])


@pytest.mark.parametrize('platform', PLATFORMS)
def test_variance_never_falls_below_zero(platform):
  # Of equal rows it is 0. The mean of squares less the square of the mean is
  # below it for some of these, by float32 rounding, and by far more than
  # epsilon: the root would be NaN.
  values = np.linspace(100, 1000, 512, dtype=np.float32)
  x = jnp.broadcast_to(values, (1, 7, 512))
  y, _, var = layers.normalise(x, jnp.ones(512), jnp.zeros(512), 1e-5, None, platform)
  assert var.min() >= 0 and np.isfinite(y).all()


# A TPU's moments are a GPU's, whose pair of sums a CPU adds row after row. oneDNN
# adds thousands of rows one by one in float32, each at 3e-8 of the sum.
@pytest.mark.parametrize(
  'function, var_error, mean_error, error',
  [
    (lambda *a: layers.normalise(*a, 0.0, None, 'cpu'), 1e-5, 5e-7, 5e-4),
    (lambda *a: layers.normalise(*a, 0.0, None, 'tpu'), 1e-5, 5e-7, 5e-4),
    (_by_onednn, 2e-5, 3e-6, 3e-3),
  ],
  ids=['cpu', 'tpu', 'onednn'],
)
def test_a_mean_of_a_thousand_deviations_does_not_cancel(function, var_error, mean_error, error):
  random = np.random.default_rng(5)
  x = np.float32(random.normal(1e3, 1, (2, 4096, 16)))
  y, mean, var = function(x, jnp.ones(16), jnp.zeros(16))
  exact = np.float64(x)
  # float32 rounds at 6e-8: a sum of squares of order one loses a few times
  # that, a mean of 1e3 is 6e-5 off, and with it the result.
  np.testing.assert_allclose(var, exact.var(1), rtol=var_error)
  np.testing.assert_allclose(mean, exact.mean(1), rtol=mean_error)
  unit = exact - exact.mean(1, keepdims=True)
  unit /= exact.std(1, keepdims=True)
  np.testing.assert_allclose(y, unit, atol=error)
  # The textbook's form loses six of seven digits on the same numbers.
  cancelled = jnp.square(x).mean(1) - jnp.square(jnp.asarray(x).mean(1))
  assert np.abs(cancelled / exact.var(1) - 1).max() > 1e-2


def test_a_first_row_far_from_the_mean_costs_few_digits():
  # An accelerator's moments are taken around it. At 30 deviations squares are
  # near 1e3, and float32 rounds those at 6e-5.
  random = np.random.default_rng(6)
  x = np.float32(random.normal(size=(1, 4096, 8)))
  x[0, 0] = 30
  args = jnp.ones(8), jnp.zeros(8), 0.0, None, 'tpu'
  _, _, var = layers.normalise(x, *args)
  np.testing.assert_allclose(var, np.float64(x).var(1), rtol=5e-4)


@pytest.mark.parametrize('rows', [1, 2, 7, 12, 40])
def test_every_count_of_rows_is_summed_whole(x64, rows):
  random = np.random.default_rng(7)
  x, dy = random.normal(size=(2, 2, rows, 3))
  scale, bias = random.normal(size=(2, 3))

  @jax.jit
  def compute(dy, *arguments):
    (y, mean, var), pull = jax.vjp(lambda *a: layers.normalise(*a, 1e-5), *arguments)
    return (y, mean, *pull((dy, jnp.zeros_like(mean), jnp.zeros_like(var))))

  flat = x.reshape(2 * rows, 1, 3)  # the reference's groups are of the first axis
  want, want_mean, _, dx, dscale, dbias = references.normalisation(flat, scale, bias, rows, dy)
  result = compute(dy, x, scale, bias)
  expected = want, want_mean, dx, dscale, dbias
  for got, right in zip(result, expected):
    np.testing.assert_allclose(got, right.reshape(got.shape), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
  'platform, devices, group',
  [('cpu', 1, 0), ('cpu', 4, 2), ('cpu', 8, 0), ('gpu', 2, 0), ('gpu', 8, 0)],
)
def test_batch_norm_is_independent_of_the_device_count(x64, config, platform, devices, group):
  """Divided by shard_map: groups without, the whole batch with collectives."""
  x, scale, bias, dy = _example()
  types = dict(dtype='float64', param_dtype='float64', platform=platform)
  layer = layers.BatchNorm(group, momentum=0.75, axis_name=mesh_lib.DATA, **types)
  program = references.divided_norm_step(layer, config, devices)
  y, gradients, new = program(x, scale, bias, dy)
  want, mean, var, *wants = references.normalisation(x, scale, bias, group or len(x), dy)
  _assert_close((y, *gradients, new['mean'], new['var']), (want, *wants), mean, var)


def test_a_silu_behind_keeps_no_more_for_its_gradient():
  depth, features, x = 8, 64, jnp.zeros((2048, 64))

  def network(parameters, x):
    for kernel, scale, bias in parameters:
      y = layers.normalise((x @ kernel)[None], scale, bias, 1e-5)[0]
      x = layers.silu(y.reshape(x.shape))
    return (x * x).sum()

  parameters = [
    (jnp.zeros((features, features)), jnp.ones(features), jnp.zeros(features)) for _ in range(depth)
  ]
  compiled = jax.jit(jax.grad(network)).lower(parameters, x).compile()
  arrays = compiled.memory_analysis().temp_size_in_bytes / x.nbytes
  # Of each layer what the norm takes and gives, and what the SiLU gives. As a
  # product, the gradient had XLA keep the logistic function too: 4 x depth.
  assert arrays < 3 * depth + 2.5
