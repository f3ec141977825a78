"""Convolution, pooling and batch normalisation against NumPy in float64."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import mesh as mesh_lib
from anp_jax.models import layers
from anp_jax.models.layers import convolution

P = jax.sharding.PartitionSpec
PLATFORMS = ('cpu', 'gpu', 'tpu')  # all are run on this machine's CPU
# Both sides compute in float64, sums of up to 7 * 7 * 3 * 256 terms of order
# one, each rounded at 1e-16: 1e-11 is a thousand times what was seen, and a
# wrong pixel shows at 1e-1.
TIGHT = 1e-11

# (kernel, stride, padding): the maps, in pixels, that are tried with it. Maps
# of up to 8 x 8 results gather patches on a CPU, larger ones do not.
CONVOLUTIONS = {
  (7, 2, 3): ((6, 6), (16, 16), (17, 15), (24, 23)),
  (3, 1, 1): ((1, 1), (2, 2), (3, 5), (8, 8), (9, 9), (8, 9)),
  (3, 2, 1): ((1, 1), (2, 2), (7, 7), (15, 16), (17, 17), (18, 13)),
  (1, 1, 0): ((1, 1), (2, 3), (11, 9)),
  (1, 2, 0): ((1, 1), (2, 2), (7, 7), (8, 5), (19, 18)),
}


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


def _windows(shape, kernel, stride, padding):
  """Result's pixels, each with its place in the padded map."""
  rows = (shape[1] + 2 * padding - kernel) // stride + 1
  columns = (shape[2] + 2 * padding - kernel) // stride + 1
  places = [
    (
      i,
      j,
      slice(i * stride, i * stride + kernel),
      slice(j * stride, j * stride + kernel),
    )
    for i in range(rows)
    for j in range(columns)
  ]
  return (rows, columns), places


def _pad(x, padding, value):
  around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
  return np.pad(x, around, constant_values=value)


def _crop(x, padding):
  return x[:, padding : x.shape[1] - padding, padding : x.shape[2] - padding]


def _convolve(x, kernel, stride, padding, cotangent=None):
  """Convolution one pixel at a time; with a cotangent also both gradients."""
  size, places = _windows(x.shape, len(kernel), stride, padding)
  padded = _pad(x, padding, 0)
  out = np.zeros((len(x), *size, kernel.shape[-1]))
  for i, j, rows, columns in places:
    out[:, i, j] = np.tensordot(padded[:, rows, columns], kernel, 3)
  if cotangent is None:
    return out
  dx, dkernel = np.zeros_like(padded), np.zeros_like(kernel)
  for i, j, rows, columns in places:
    dy = cotangent[:, i, j]
    dx[:, rows, columns] += np.tensordot(dy, kernel, ((1,), (3,)))
    dkernel += np.tensordot(padded[:, rows, columns], dy, ((0,), (0,)))
  return out, _crop(dx, padding), dkernel


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('plan', CONVOLUTIONS, ids=str)
def test_convolution_and_its_gradients_equal_numpy(x64, plan, platform):
  size, stride, padding = plan
  random = np.random.default_rng(0)
  kernel = random.normal(size=(size, size, 3, 4))
  images = [random.normal(size=(2, *m, 3)) for m in CONVOLUTIONS[plan]]
  cotangents = [
    random.normal(size=_convolve(x, kernel, stride, padding).shape)
    for x in images
  ]

  @jax.jit
  def ours(images, cotangents):
    result = []
    for x, dy in zip(images, cotangents):
      y, pull = jax.vjp(
        lambda x, k: layers.convolve(x, k, stride, padding, platform), x, kernel
      )
      result.append((y, *pull(dy)))
    return result

  for x, dy, got in zip(images, cotangents, ours(images, cotangents)):
    want = _convolve(x, kernel, stride, padding, dy)
    for name, a, b in zip(('y', 'dx', 'dkernel'), got, want):
      message = f'{name} of a map of {x.shape[1:3]}'
      assert a.shape == b.shape, message
      np.testing.assert_allclose(a, b, rtol=0, atol=TIGHT, err_msg=message)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('platform', PLATFORMS)
def test_convolution_keeps_its_dtype(platform, dtype):
  for size, stride, side in ((1, 2, 6), (3, 1, 4), (3, 1, 12)):
    x = jnp.ones((1, side, side, 2), dtype)
    kernel = jnp.ones((size, size, 2, 3), dtype)
    out = layers.convolve(x, kernel, stride, (size - 1) // 2, platform)
    assert out.dtype == dtype
    # Sums of at most 18 ones: exact in bfloat16 too.
    inner = np.float32(out[0, out.shape[1] // 2, out.shape[2] // 2])
    np.testing.assert_array_equal(inner, 2.0 * size**2)


# (platform, kernel, side of the map, stride, padding) to the lowering.
LOWERINGS = {
  ('cpu', 1, 56, 1, 0): 'product',
  ('cpu', 1, 56, 2, 0): 'product',
  ('cpu', 1, 56, 1, 1): 'apart',
  ('cpu', 3, 2, 1, 1): 'patches',
  ('cpu', 3, 4, 2, 1): 'patches',
  ('cpu', 3, 3, 1, 1): 'apart',
  ('cpu', 7, 224, 2, 3): 'apart',
  ('gpu', 1, 56, 1, 0): 'library',
  ('gpu', 3, 2, 1, 1): 'library',
  ('gpu', 7, 224, 2, 3): 'library',
  ('tpu', 7, 224, 2, 3): 'depth',
  ('tpu', 3, 32, 2, 1): 'depth',
  ('tpu', 3, 32, 1, 1): 'library',
  ('tpu', 1, 32, 2, 0): 'library',
}


@pytest.mark.parametrize('where', LOWERINGS, ids=str)
def test_the_lowering_is_chosen_by_platform_and_shapes(where):
  platform, size, side, stride, padding = where
  shapes = (1, side, side, 3), (size, size, 3, 4)
  around = ((padding, padding),) * 2
  found = convolution.lowering(*shapes, stride, around, platform)
  assert found == LOWERINGS[where]
  # What is traced is what the name says.
  program = str(
    jax.make_jaxpr(
      lambda x, k: layers.convolve(x, k, stride, padding, platform)
    )(*map(jnp.ones, shapes))
  )
  products = found in ('product', 'patches')
  assert program.count('dot_general') == products
  assert program.count('conv_general_dilated') == (not products)
  strided = f'window_strides=({stride}, {stride})' in program
  assert strided == (not products and found != 'depth')


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('side', [(1, 1), (2, 2), (7, 7), (16, 16), (9, 14)])
def test_max_pool_and_its_gradient_equal_numpy(x64, side, platform):
  random = np.random.default_rng(1)
  # Each value once, so that the largest of a window is one pixel; all below
  # zero, so that zeros as padding would win.
  count = 2 * side[0] * side[1] * 3
  x = -1.0 - random.permutation(count).reshape(2, *side, 3)
  size, places = _windows(x.shape, 3, 2, 1)
  padded = _pad(x, 1, -np.inf)
  dy = random.normal(size=(2, *size, 3))
  want, dx = np.zeros_like(dy), np.zeros_like(padded)
  for i, j, rows, columns in places:
    window = padded[:, rows, columns]
    want[:, i, j] = window.max((1, 2))
    dx[:, rows, columns] += (window == want[:, None, None, i, j]) * (
      dy[:, None, None, i, j]
    )
  y, pull = jax.vjp(lambda x: layers.max_pool(x, platform=platform), x)
  np.testing.assert_array_equal(y, want)
  # At most four windows share a pixel: three roundings.
  np.testing.assert_allclose(pull(dy)[0], _crop(dx, 1), rtol=0, atol=1e-14)


def _normalise(x, scale, bias, group, epsilon=1e-5, cotangent=None):
  """Batch normalisation in groups, and its gradients by the chain rule."""
  shape = x.shape
  x = np.float64(x).reshape(len(x) // group, -1, shape[-1])
  mean = x.mean(1, keepdims=True)
  var = ((x - mean) ** 2).mean(1, keepdims=True)
  unit = (x - mean) / np.sqrt(var + epsilon)
  y = (unit * scale + bias).reshape(shape)
  if cotangent is None:
    return y, mean[:, 0], var[:, 0]
  # Written as Ioffe and Szegedy write it: through variance and mean apart.
  count = x.shape[1]
  dy = np.float64(cotangent).reshape(x.shape)
  dunit = dy * scale
  dvar = (dunit * (x - mean) * -0.5 * (var + epsilon) ** -1.5).sum(
    1, keepdims=True
  )
  dmean = (-dunit / np.sqrt(var + epsilon)).sum(1, keepdims=True)
  dx = (
    dunit / np.sqrt(var + epsilon)
    + dvar * 2 * (x - mean) / count
    + dmean / count
  )
  return (
    y,
    mean[:, 0],
    var[:, 0],
    dx.reshape(shape),
    (dy * unit).sum((0, 1)),
    dy.sum((0, 1)),
  )


def _example(batch=8, side=3, channels=5):
  random = np.random.default_rng(2)
  x = random.normal(size=(batch, side, side, channels)) * 2 + 3
  # Rows differ in mean and spread, so that the wrong grouping shows.
  x = x * (1 + np.arange(batch))[:, None, None, None] + np.arange(channels)
  scale, bias = random.normal(size=(2, channels))
  return x, scale, bias, random.normal(size=x.shape)


@functools.partial(jax.jit, static_argnums=0)
def _layer_step(layer, x, scale, bias, dy):
  """y, gradients of (dy * y).sum() and new statistics of a BatchNorm."""
  channels = x.shape[-1]
  stats = {'mean': jnp.full(channels, 0.5), 'var': jnp.full(channels, 2.0)}

  def loss(x, scale, bias):
    y, new = layer.apply(
      {'params': {'scale': scale, 'bias': bias}, 'batch_stats': stats},
      x,
      True,
      mutable=['batch_stats'],
    )
    return (y * dy).sum(), (y, new['batch_stats'])

  (_, (y, new)), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
    x, scale, bias
  )
  return y, gradients, new


# 0: all of the batch.
@pytest.mark.parametrize('group', [1, 2, 4, 8, 0])
def test_batch_norm_equals_numpy(x64, group):
  x, scale, bias, dy = _example()
  layer = layers.BatchNorm(
    group, momentum=0.75, dtype='float64', param_dtype='float64'
  )
  y, gradients, new = _layer_step(layer, x, scale, bias, dy)
  want, mean, var, *want_gradients = _normalise(
    x, scale, bias, group or len(x), cotangent=dy
  )
  # The one-pass variance E[x^2] - E[x]^2 loses some of 16 digits: means are up
  # to 30, spreads from 2, so 1e-10 holds and a missing term shows at 1e-1.
  close = dict(rtol=1e-10, atol=1e-10)
  np.testing.assert_allclose(y, want, **close)
  for got, expected in zip(gradients, want_gradients):
    np.testing.assert_allclose(got, expected, **close)
  running = {'mean': (0.5, mean), 'var': (2.0, var)}
  for name, (old, of_groups) in running.items():
    expected = 0.75 * old + 0.25 * of_groups.mean(0)
    np.testing.assert_allclose(new[name], expected, **close)


def test_batch_norm_of_rows_without_a_map_equals_numpy(x64):
  x, scale, bias, dy = (a[:, 0, 0] if a.ndim == 4 else a for a in _example())
  layer = layers.BatchNorm(4, dtype='float64', param_dtype='float64')
  y, gradients, _ = _layer_step(layer, x, scale, bias, dy)
  want, _, _, dx, *_ = _normalise(x, scale, bias, 4, cotangent=dy)
  np.testing.assert_allclose(y, want, rtol=1e-10, atol=1e-10)
  np.testing.assert_allclose(gradients[0], dx, rtol=1e-10, atol=1e-10)


def test_batch_norm_uses_running_statistics_outside_training(x64):
  x, scale, bias, _ = _example()
  mean, var = np.linspace(-1, 1, 5), np.linspace(1, 3, 5)
  variables = {
    'params': {'scale': scale, 'bias': bias},
    'batch_stats': {'mean': mean, 'var': var},
  }
  # No multiple of the group: the last batch of an evaluation may be short.
  layer = layers.BatchNorm(3, dtype='float64', param_dtype='float64')
  y = layer.apply(variables, x, False)
  want = (x - mean) / np.sqrt(var + 1e-5) * scale + bias
  np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


def test_batch_norm_gradient_equals_finite_differences(x64):
  random = np.random.default_rng(3)
  x = random.normal(size=(3, 4, 2)) + 1
  scale, bias = random.normal(size=(2, 2))
  dy = random.normal(size=x.shape)
  arguments = [x, scale, bias]

  def loss(x, scale, bias):
    return float((_normalise(x, scale, bias, 1)[0] * dy).sum())

  # Groups are the first axis, as in `normalise`.
  gradients = jax.jit(
    jax.grad(lambda *a: (layers.normalise(*a, 1e-5)[0] * dy).sum(), (0, 1, 2))
  )(*arguments)
  step = 1e-5
  for k, gradient in enumerate(gradients):
    for index in np.ndindex(gradient.shape):
      moved = [a.copy() for a in arguments]
      moved[k][index] += step
      above = loss(*moved)
      moved[k][index] -= 2 * step
      # Truncation step^2 and cancellation 1e-16 / step are both near 1e-10.
      np.testing.assert_allclose(
        gradient[index], (above - loss(*moved)) / (2 * step), atol=1e-7
      )


def test_no_gradient_flows_through_statistics():
  def loss(x):
    _, mean, var = layers.normalise(x, jnp.ones(2), jnp.zeros(2), 1e-5)
    return mean.sum() + var.sum()

  x = np.random.default_rng(4).normal(size=(2, 5, 2))
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 0)


def test_batch_norm_in_bfloat16_keeps_float32_statistics():
  x, scale, bias, dy = map(np.float32, _example(batch=8, side=8))
  wide = jnp.asarray(x, jnp.bfloat16)
  layer = layers.BatchNorm(4, momentum=0.0, dtype='bfloat16')
  y, gradients, new = _layer_step(
    layer, wide, scale, bias, jnp.asarray(dy, jnp.bfloat16)
  )
  assert y.dtype == jnp.bfloat16 and gradients[0].dtype == jnp.bfloat16
  assert gradients[1].dtype == gradients[2].dtype == jnp.float32
  # Of the input that bfloat16 can hold, the statistics are good to float32:
  # bfloat16's own 8 bits would be off by 4e-3.
  want, mean, var = _normalise(np.float32(wide), scale, bias, 4)
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


def test_variance_never_falls_below_zero():
  # Of equal rows it is 0. The mean of squares less the square of the mean is
  # below it for some of these, by float32 rounding, and by far more than
  # epsilon: the root would be NaN.
  values = np.linspace(100, 1000, 512, dtype=np.float32)
  x = jnp.broadcast_to(values, (1, 7, 512))
  y, _, var = jax.jit(layers.normalise, static_argnums=3)(
    x, jnp.ones(512), jnp.zeros(512), 1e-5
  )
  assert var.min() >= 0 and np.isfinite(y).all()


@pytest.mark.parametrize('group', [2, 0])
@pytest.mark.parametrize('devices', [1, 2, 4])
def test_batch_norm_is_independent_of_the_device_count(
  x64, config, devices, group
):
  """Divided by shard_map: groups without, the whole batch with collectives."""
  _check_divided(config, devices, group)


def test_batch_norm_of_the_whole_batch_on_eight_devices(x64, config):
  _check_divided(config, 8, 0)


def _check_divided(config, devices, group):
  x, scale, bias, dy = _example()
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  layer = layers.BatchNorm(
    group,
    momentum=0.75,
    dtype='float64',
    param_dtype='float64',
    axis_name=mesh_lib.DATA,
  )

  def shard(x, dy, scale, bias):
    y, (dx, *rest), new = _layer_step(layer, x, scale, bias, dy)
    return y, dx, lax.psum(rest, 'data'), lax.pmean(new, 'data')

  rows = P(mesh_lib.DATA)
  y, dx, rest, new = jax.jit(
    jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(rows, rows, P(), P()),
      out_specs=(rows, rows, P(), P()),
      check_vma=False,
    )
  )(x, dy, scale, bias)
  want, mean, var, *gradients = _normalise(
    x, scale, bias, group or len(x), cotangent=dy
  )
  close = dict(rtol=1e-10, atol=1e-10)
  np.testing.assert_allclose(y, want, **close)
  for got, expected in zip((dx, *rest), gradients):
    np.testing.assert_allclose(got, expected, **close)
  expected = 0.75 * 0.5 + 0.25 * mean.mean(0)
  np.testing.assert_allclose(new['mean'], expected, **close)
  expected = 0.75 * 2.0 + 0.25 * var.mean(0)
  np.testing.assert_allclose(new['var'], expected, **close)
