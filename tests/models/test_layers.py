"""Convolution, pooling and relu against NumPy in float64."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from anp_jax.models import layers, resnet
from anp_jax.models.layers import convolution
from anp_jax.system import onednn
from tests import layer_references as references

# All are run on this machine's CPU. What is computed by one lowering on a CPU and by
# another on both accelerators is tried on one of the two.
PLATFORMS = ('cpu', 'tpu')
# Both sides compute in float64, sums of up to 7 * 7 * 3 * 256 terms of order
# one, each rounded at 1e-16: 1e-11 is a thousand times what was seen, and a
# wrong pixel shows at 1e-1.
TIGHT = 1e-11

# (kernel, stride, padding): the maps, in pixels, that are tried with it. Maps
# of up to 2 x 2 results gather patches on a CPU, larger ones do not.
CONVOLUTIONS = {
  (7, 2, 3): ((6, 6), (16, 16), (17, 15), (24, 23)),
  (3, 1, 1): ((1, 1), (2, 2), (3, 5), (8, 8), (9, 9), (8, 9)),
  (3, 2, 1): ((1, 1), (2, 2), (7, 7), (15, 16), (17, 17), (18, 13)),
  (1, 1, 0): ((1, 1), (2, 3), (11, 9)),
  (1, 2, 0): ((1, 1), (2, 2), (7, 7), (8, 5), (19, 18)),
  # Every way to say the padding.
  **{
    (*window, padding): ((8, 11),)
    for window in ((3, 2), (5, 1))
    for padding in ('SAME', 'VALID', ((2, 0), (1, 3)))
  },
}


def _pixels(padding, shape, size, stride):
  """Padding in pixels, pairs for height and width."""
  if padding == 'VALID':
    return (0, 0), (0, 0)
  if padding == 'SAME':
    # As many results as pixels over the stride; an odd pixel at the end.
    missing = [max((math.ceil(n / stride) - 1) * stride + size - n, 0) for n in shape]
    return tuple((m // 2, m - m // 2) for m in missing)
  return ((padding, padding),) * 2 if isinstance(padding, int) else padding


def _convolve(x, kernel, stride, padding, dy=None):
  pads = _pixels(padding, x.shape[1:3], len(kernel), stride)
  return references.convolution(x, kernel, stride, pads, dy=dy)


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('plan', CONVOLUTIONS, ids=str)
def test_convolution_and_its_gradients_equal_numpy(x64, plan, platform):
  size, stride, padding = plan
  random = np.random.default_rng(0)
  kernel = random.normal(size=(size, size, 3, 4))
  images = [random.normal(size=(2, *m, 3)) for m in CONVOLUTIONS[plan]]
  cotangents = [random.normal(size=_convolve(x, kernel, stride, padding).shape) for x in images]

  @jax.jit
  def ours(images, cotangents):
    result = []
    for x, dy in zip(images, cotangents):
      y, pull = jax.vjp(lambda x, k: layers.convolve(x, k, stride, padding, platform), x, kernel)
      result.append((y, *pull(dy)))
    return result

  for x, dy, got in zip(images, cotangents, ours(images, cotangents)):
    want = _convolve(x, kernel, stride, padding, dy)
    for name, a, b in zip(('y', 'dx', 'dkernel'), got, want):
      message = f'{name} of a map of {x.shape[1:3]}'
      assert a.shape == b.shape, message
      np.testing.assert_allclose(a, b, rtol=0, atol=TIGHT, err_msg=message)


@pytest.mark.parametrize('platform', PLATFORMS)
def test_a_window_larger_than_the_map_is_refused(platform):
  x, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((5, 5, 1, 1))
  with pytest.raises(ValueError, match=r'4, 4\) pixels .* window of \(5, 5\)'):
    layers.convolve(x, kernel, 2, 0, platform)
  with pytest.raises(ValueError, match=r'no room for a window of \(7, 7\)'):
    layers.max_pool(x, 7, 2, 1, platform)


def test_padding_that_is_no_padding():
  with pytest.raises(ValueError, match="'SAME', 'VALID' or pixels, not 'FULL'"):
    layers.convolve(jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 1)), 1, 'FULL')


# (kernel, stride, padding, map): each lowering, with many terms in a sum. The
# last two are products of so many rows that a CPU halves them.
ROUNDED = (
  (3, 1, 1, (2, 2, 64)),
  (3, 1, 1, (14, 14, 32)),
  (7, 2, 3, (32, 32, 3)),
  (1, 2, 0, (15, 15, 64)),
  (1, 1, 0, (48, 48, 16)),
  (1, 1, 0, (64, 33, 64)),
)


@pytest.mark.parametrize('platform', PLATFORMS)
@pytest.mark.parametrize('plan', ROUNDED, ids=str)
def test_float32_is_off_by_no_more_than_its_rounding(plan, platform):
  size, stride, padding, shape = plan
  random = np.random.default_rng(2)
  x = np.float32(random.normal(size=(2, *shape)))
  kernel = np.float32(random.normal(size=(size, size, shape[-1], 32)))
  exact = np.float64(x), np.float64(kernel)
  dy = np.float32(random.normal(size=_convolve(*exact, stride, padding).shape))
  ours = references.with_gradients(lambda x, k: layers.convolve(x, k, stride, padding, platform))
  result = ours(dy, x, kernel)
  want = _convolve(*exact, stride, padding, np.float64(dy))
  # A sum of n products is off by no more than n roundings of 2^-24 of the sum
  # of their sizes (Higham 2002, eq. 3.5), in whatever order it is taken.
  sizes = _convolve(*map(np.abs, exact), stride, padding, np.abs(dy))
  pixels = dy.size // dy.shape[-1]
  terms = kernel[..., 0].size, kernel[..., 0, :].size, pixels
  for a, b, bound, n in zip(result, want, sizes, terms):
    assert a.dtype == np.float32
    assert (np.abs(np.float64(a) - b) <= n * 2.0**-24 * bound + 1e-30).all()


@pytest.mark.parametrize('stride', [1, 2])
@pytest.mark.parametrize('inside', ['branch', 'loop'])
def test_gradients_stay_in_the_order_that_is_quick(inside, stride):
  """Within a branch or a loop XLA leaves axes as they are, fast or not."""

  def gradients(x, kernel, dy):

    def convolve(*arguments):
      return layers.convolve(*arguments, stride, 1)

    return jax.vjp(convolve, x, kernel)[1](dy)

  def branch(i, *arguments):

    def other(x, *arguments):
      return gradients(2 * x, *arguments)

    return jax.lax.switch(i, [gradients, other], *arguments)

  def loop(i, x, kernel, dy):
    def turn(total, _):
      return jax.tree.map(jnp.add, total, gradients(x, kernel, dy)), i

    return jax.lax.scan(turn, (x, kernel), jnp.arange(3))

  side = 9 if stride == 1 else 5
  shapes = ((), (4, 9, 9, 6), (3, 3, 6, 8), (4, side, side, 8))
  arguments = [jax.ShapeDtypeStruct(s, jnp.float32 if s else jnp.int32) for s in shapes]
  text = jax.jit(locals()[inside]).lower(*arguments).compile().as_text()
  orders = re.findall(r' convolution\(.*dim_labels=([^,\s]+)', text)
  assert len(orders) >= 2 and set(orders) == {'b01f_01io->b01f'}


# (platform, kernel, side of the map, stride, padding) to the lowering.
LOWERINGS = {
  ('cpu', 1, 56, 1, 0): 'product',
  ('cpu', 1, 56, 2, 0): 'product',
  ('cpu', 1, 56, 1, 1): 'barrier',
  ('cpu', 3, 2, 1, 1): 'patches',
  ('cpu', 3, 4, 2, 1): 'patches',
  ('cpu', 3, 3, 1, 1): 'barrier',
  ('cpu', 7, 224, 2, 3): 'barrier',
  ('gpu', 1, 56, 1, 0): 'library',
  ('gpu', 3, 2, 1, 1): 'library',
  ('gpu', 7, 224, 2, 3): 'space_to_depth',
  ('tpu', 7, 224, 2, 3): 'space_to_depth',
  ('tpu', 3, 32, 2, 1): 'space_to_depth',
  ('tpu', 3, 32, 1, 1): 'library',
  ('tpu', 1, 32, 2, 0): 'library',
}


@pytest.mark.parametrize('where', LOWERINGS, ids=str)
def test_the_lowering_is_chosen_by_platform_and_shapes(where):
  platform, size, side, stride, padding = where
  shapes = (1, side, side, 3), (size, size, 3, 4)
  around = ((padding, padding),) * 2
  kind = convolution.lowering(*shapes, stride, around, platform)
  assert kind == LOWERINGS[where]
  # What is traced is what the name says.
  program = str(
    jax.make_jaxpr(lambda x, k: layers.convolve(x, k, stride, padding, platform))(
      *map(jnp.ones, shapes)
    )
  )
  products = kind in ('product', 'patches')
  assert program.count('dot_general') == products
  assert program.count('conv_general_dilated') == (not products)
  strided = f'window_strides=({stride}, {stride})' in program
  assert strided == (not products and kind != 'space_to_depth')


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_a_network_computes_as_its_platform_does(platform):
  """Also where it is compiled on a machine without an accelerator."""
  net = resnet.ResNet(10, stages=(1, 1, 1, 1), bottleneck=True, group=0, platform=platform)
  images = jax.ShapeDtypeStruct((2, 64, 64, 3), 'float32')
  program = str(jax.make_jaxpr(lambda v, x: net.apply(v, x, False))(references.shapes(net), images))
  # That of the classifier; on a CPU 1x1 convolutions and those of 2x2 results too.
  assert (program.count('dot_general') == 1) == (platform != 'cpu')
  assert ('reduce_window_max' in program) == (platform == 'tpu')


# (window, stride, padding): of pools.
POOLS = ((3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 3, 0), (3, 2, ((0, 1), (1, 0))), (3, 2, 'SAME'))


def _largest(pixels, dy):
  """The largest of a window (batch, height, width, channels), and what goes back to each pixel."""
  flat = pixels.reshape(2, -1, 3)
  first = flat.argmax(1)  # of equal ones the first, row by row
  is_first = np.arange(flat.shape[1])[:, None] == first[:, None]
  return flat.max(1), (is_first * dy[:, None]).reshape(pixels.shape)


def _mean(pixels, dy):
  """The same of the mean."""
  count = pixels[0, ..., 0].size
  return pixels.mean((1, 2)), dy[:, None, None] / count


# Each with its reference and its padding.
_POOLS = {'max': (layers.max_pool, _largest, -np.inf), 'mean': (layers.avg_pool, _mean, 0)}


@pytest.mark.parametrize(
  'kind, platform', [*itertools.product(_POOLS, PLATFORMS), ('mean', 'cpu_onednn')]
)
@pytest.mark.parametrize('plan', POOLS, ids=str)
@pytest.mark.parametrize('side', [(3, 3), (7, 8)])
def test_pools_and_their_gradients_equal_numpy(side, plan, kind, platform, request):
  if platform == 'cpu_onednn':
    if onednn.find() is None:
      pytest.skip('no oneDNN')
    dtype, tolerance = 'float32', 1e-6
  else:
    request.getfixturevalue('x64')
    dtype, tolerance = 'float64', 1e-14  # at most nine windows share a pixel
  pool, reference, fill = _POOLS[kind]
  window, stride, padding = plan
  random = np.random.default_rng(1)
  # Few values, so that most windows have several largest; all below zero, so
  # that zeros as padding would win.
  x = -1 - random.integers(0, 4, size=(2, *side, 3)).astype(dtype)
  around = _pixels(padding, side, window, stride)
  (top, bottom), (left, right) = around
  padded = np.pad(x, ((0, 0), *around, (0, 0)), constant_values=fill)
  size = [(n - window) // stride + 1 for n in padded.shape[1:3]]
  dy = random.normal(size=(2, *size, 3)).astype(dtype)
  want, dx = np.zeros(dy.shape), np.zeros(padded.shape)
  for i, j in np.ndindex(*size):
    rows, columns = (slice(n * stride, n * stride + window) for n in (i, j))
    want[:, i, j], gradient = reference(padded[:, rows, columns], dy[:, i, j])
    dx[:, rows, columns] += gradient
  dx = dx[:, top : dx.shape[1] - bottom, left : dx.shape[2] - right]
  ours = references.with_gradients(lambda x: pool(x, window, stride, padding, platform))
  y, gradients = ours(dy, x)
  np.testing.assert_allclose(y, want, rtol=0, atol=tolerance)
  np.testing.assert_allclose(gradients, dx, rtol=0, atol=tolerance)


@pytest.mark.parametrize('platform', PLATFORMS)
def test_bias_and_its_gradient(x64, platform):
  random = np.random.default_rng(5)
  y, dy = random.normal(size=(2, 5, 3, 3, 3))
  bias = random.normal(size=3)
  result = references.with_gradients(lambda y, b: layers.add_bias(y, b, platform))(dy, y, bias)
  for got, want in zip(result, (y + bias, dy, dy.sum((0, 1, 2)))):
    # Sums of up to 320 numbers of order one.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_a_bias_gradient_in_bfloat16_is_summed_in_float32():
  dy = jnp.ones((4, 16, 16, 2), 'bfloat16')  # in bfloat16 it would stop at 256
  ours = references.with_gradients(lambda b: layers.add_bias(dy, b, 'cpu'))
  _, dbias = ours(dy, jnp.zeros(2, 'bfloat16'))
  np.testing.assert_array_equal(np.float32(dbias), 1024)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_relu(platform, dtype):
  inputs = [-2, -0.0, 0, 3, -np.inf, np.inf, np.nan]
  dy = jnp.full(7, 5, dtype)
  ours = references.with_gradients(lambda x: layers.relu(x, platform))
  y, dx = ours(dy, jnp.array(inputs, dtype))
  assert y.dtype == dtype
  # What is not a number stays so: training must stop there.
  np.testing.assert_array_equal(np.float32(y), [0, 0, 0, 3, 0, np.inf, np.nan])
  np.testing.assert_array_equal(np.float32(dx)[:-1], [0, 0, 0, 5, 0, 5])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_relu6_and_its_gradient(dtype):
  inputs = [-np.inf, -2, 0, 0.5, 3, 6, 7, np.inf, np.nan]
  ours = references.with_gradients(layers.relu6)
  y, dx = ours(jnp.full(9, 5, dtype), jnp.array(inputs, dtype))
  assert y.dtype == dtype
  np.testing.assert_array_equal(np.float32(y), [0, 0, 0, 0.5, 3, 6, 6, 6, np.nan])
  np.testing.assert_array_equal(np.float32(dx)[:-1], [0, 0, 0, 5, 5, 0, 0, 0])


@pytest.mark.parametrize('name', ['silu', 'gelu'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_activations_have_their_formulas(name, dtype):
  inputs = jnp.linspace(-9, 9, 73).astype(dtype)
  ours = references.with_gradients(getattr(layers, name))
  actual = ours(jnp.full_like(inputs, 2), inputs)
  x = np.float64(inputs)
  below, density = scipy.stats.norm.cdf(x), scipy.stats.norm.pdf(x)
  want = x * below, 2 * (below + x * density)
  if name == 'silu':
    share = scipy.special.expit(x)
    want = x * share, 2 * (share + x * share * (1 - share))
  # A few roundings of numbers up to 9; bfloat16's at 2^-9 of the value.
  tolerance = {'float32': 3e-6, 'bfloat16': 0.04}[dtype]
  for got, exact in zip(actual, want, strict=True):
    assert got.dtype == dtype
    np.testing.assert_allclose(np.float64(got), exact, atol=tolerance)


@pytest.mark.parametrize('name', ['silu', 'gelu'])
def test_a_compiled_gradient_keeps_no_more(name):
  depth, x = 8, jnp.zeros((2048, 64))

  def network(kernels, x):
    for kernel in kernels:
      x = getattr(layers, name)(x @ kernel)
    return x.sum()

  kernels = [jnp.zeros((64, 64))] * depth
  compiled = jax.jit(jax.grad(network)).lower(kernels, x).compile()
  # Of each layer what goes in and what comes out, which is the next one's; the
  # gradient that passes through needs up to two more. XLA kept 3 x depth - 1.
  arrays = compiled.memory_analysis().temp_size_in_bytes / x.nbytes
  assert arrays < 2 * depth + 2.5
