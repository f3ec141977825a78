"""oneDNN's convolutions and batch norm against float64."""

import math
from unittest import mock
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.models.layers import onednn_layers, windows
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import onednn
from anp_jax.system.onednn import c_api, pieces
from tests import layer_references as references, onednn_here

pytestmark = onednn_here.needed
wide_vectors = onednn_here.wide_vectors
PLATFORM = onednn.PLATFORM
# Of the largest value. float32 rounds each sum at 6e-8 a few times: 1e-6 was
# seen. bfloat16's are sums in float32 rounded once, at 2^-8 of a value. A
# wrong or missing tap shows at 1e-1.
_TOLERANCES = {'float32': 5e-6, 'bfloat16': 4.1e-3}


def _case(shape, size, features, stride, padding, **more):
  return dict(
    shape=shape,
    size=size,
    features=features,
    stride=stride,
    padding=padding,
    groups=more.get('groups', 1),
    calls=more.get('calls', 3),
  )


def _arrays(case, dtype):
  """An image, a kernel, pads, and a cotangent of the result."""
  shape, size = case['shape'], case['size']
  sizes = size if isinstance(size, tuple) else (size, size)
  pads = windows.pads(case['padding'], shape[1:3], sizes, case['stride'])
  x = references.values(0, shape, dtype)
  channels = shape[-1] // case['groups']
  kernel = references.values(1, (*sizes, channels, case['features']), dtype)
  rows = ((n + sum(pad) - k) // case['stride'] + 1 for n, k, pad in zip(shape[1:3], sizes, pads))
  # Another first number, of either sign, for each case.
  seed = zlib.crc32(repr(case).encode())
  dy = references.values(seed, (shape[0], *rows, case['features']), dtype)
  return x, kernel, pads, dy


def _program(case):
  """(dy, x, kernel) to the convolution and what it sends back of dy."""
  stride, padding, groups = (case[name] for name in ('stride', 'padding', 'groups'))
  return references.with_gradients(
    lambda x, k: layers.convolve(x, k, stride, padding, PLATFORM, groups)
  )


def _is_product(case):
  """Whether XLA multiplies by the kernel, on a map of up to 256 pixels."""
  window = case['size'], case['stride'], case['padding']
  return window == (1, 1, 0) and math.prod(case['shape'][1:3]) <= 256


def _check(case, dtype, computes=True):
  """Compares with NumPy; `computes` says that oneDNN does, not XLA."""
  x, kernel, pads, dy = _arrays(case, dtype)
  program = _program(case)
  few_pixels = dtype == 'float32' and math.prod(dy.shape[1:3]) <= 4
  calls = case['calls']
  if dtype == 'float32' and _is_product(case):
    calls = 1  # the kernel's gradient
  if computes and not few_pixels:
    assert onednn_here.calls(program, dy, x, kernel) == calls, (case, dtype)
  got = program(dy, x, kernel)
  wants = references.convolution(x, kernel, case['stride'], pads, case['groups'], dy)
  for name, a, want in zip(('y', 'dx', 'dkernel'), got, wants, strict=True):
    assert a.shape == want.shape and a.dtype == x.dtype
    error = np.abs(np.float64(a) - want).max() / np.abs(want).max()
    assert error < _TOLERANCES[dtype], f'{name} of {case}, {dtype}: {error:.1e}'


CASES = [
  *(_case((2, 9, 11, 16), k, 24, s, k // 2) for k in (1, 3, 7) for s in (1, 3)),
  *(_case((2, 9, 8, c), 3, f, 1, 1) for c, f in ((1, 5), (3, 33), (33, 5))),
  *(_case((3, 13, 10, 8), 3, 16, 2, p) for p in ('SAME', 'VALID', ((2, 0), (1, 3)))),
  _case((1, 7, 7, 64), 3, 32, 1, 1),
  _case((1, 30, 31, 3), 7, 64, 2, 3),
  _case((2, 12, 9, 16), (5, 3), 16, 1, ((2, 2), (1, 1))),
  _case((2, 9, 9, 64), 3, 64, 2, 1, groups=4),
  _case((2, 9, 9, 32), 3, 32, 2, ((0, 1), (0, 1)), groups=32),
  _case((2, 16, 16, 8), 1, 24, 1, 0),
  _case((2, 16, 17, 8), 1, 24, 1, 0),
  # Depthwise kernels whose gradients are computed in columns.
  _case((2, 9, 9, 32), 7, 32, 1, 3, groups=32, calls=5),
  _case((2, 11, 12, 16), 5, 16, 2, ((1, 2), (0, 3)), groups=16, calls=4),
  _case((2, 9, 9, 16), 4, 16, 1, 0, groups=16, calls=4),
  # By image, as maps are small.
  _case((2, 3, 2, 16), 7, 16, 1, 3, groups=16),
  _case((4, 6, 3, 16), 5, 16, 2, ((0, 2), (3, 2)), groups=16),
  # By pairs of pixels.
  _case((4, 2, 2, 16), 5, 16, 1, 2, groups=16, calls=2),
]


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
@pytest.mark.parametrize('case', CASES, ids=lambda c: str(tuple(c.values())))
def test_convolution_and_its_gradients_equal_numpy(case, dtype):
  _check(case, dtype)


def _random_case(seed):
  random = np.random.default_rng(seed)
  groups = int(random.choice([1, 1, 1, 2, 3]))
  size = tuple(int(n) for n in random.integers(1, 6, 2))
  height, width = (int(n) for n in random.integers(6, 20, 2))
  pads = tuple(tuple(int(n) for n in random.integers(0, k, 2)) for k in size)
  channels, features = (groups * int(n) for n in random.integers(1, 40, 2))
  shape = int(random.integers(1, 5)), height, width, channels
  stride = int(random.integers(1, 4))
  return _case(shape, size, features, stride, pads, groups=groups)


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
@pytest.mark.parametrize('seed', range(8))
def test_random_shapes(seed, dtype):
  _check(_random_case(seed), dtype, computes=False)


def _count(x, kernel):
  x, kernel = (jax.ShapeDtypeStruct(*a) for a in (x, kernel))
  program = jax.jit(lambda x, k: layers.convolve(x, k, 1, 1, PLATFORM))
  return onednn_here.calls(program, x, kernel)


def test_what_onednn_does_not_compute_falls_back(x64):
  image, kernel = (2, 9, 9, 16), (3, 3, 16, 16)
  assert _count((image, 'float32'), (kernel, 'float32')) == 1
  for dtype in ('float64', 'float16'):
    assert _count((image, dtype), (kernel, dtype)) == 0
  # Few pixels, whose patches XLA multiplies faster.
  small = (2, 2, 2, 16)
  assert _count((small, 'float32'), (kernel, 'float32')) == 0


def test_padding_below_zero_cuts_edges_off():
  case = _case((2, 9, 9, 16), 3, 16, 1, ((-1, -1), (-2, -1)))
  x, kernel, _, _ = _arrays(case, 'float32')
  cut = np.s_[:, 1:-1, 2:-1]
  dy = references.values(2, (2, 5, 4, 16), 'float32')
  y, dx, dkernel = _program(case)(dy, x, kernel)
  none = ((0, 0), (0, 0))
  wants = references.convolution(x[cut], kernel, 1, none, 1, dy)
  for a, want in zip((y, dx[cut], dkernel), wants, strict=True):
    limit = _TOLERANCES['float32'] * np.abs(want).max()
    np.testing.assert_allclose(a, want, rtol=0, atol=limit)
  np.testing.assert_array_equal(np.abs(dx).sum(), np.abs(dx[cut]).sum())


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
def test_an_empty_batch(dtype):
  x, kernel = references.values(0, (0, 9, 9, 16), dtype), references.values(1, (3, 3, 16, 8), dtype)

  def compute(x, kernel):
    return jax.vjp(lambda x, k: layers.convolve(x, k, 2, 1, PLATFORM), x, kernel)

  y, pull = jax.jit(compute)(x, kernel)
  assert y.shape == (0, 5, 5, 8)
  dx, dkernel = pull(y)
  assert dx.shape == x.shape
  np.testing.assert_array_equal(np.float32(dkernel), 0)


def test_a_kernel_of_another_dtype_is_not_read_as_the_images():
  x = references.values(0, (2, 9, 9, 16), 'float32')
  kernel = references.values(1, (3, 3, 16, 8), 'bfloat16')
  with pytest.raises(TypeError, match='same dtypes'):
    layers.convolve(x, kernel, 1, 1, PLATFORM)


def test_where_there_is_only_the_slow_reference_xla_computes(monkeypatch):
  slow = c_api.OneDnnError('only ref:any')
  monkeypatch.setattr(pieces, 'compile_fast', mock.Mock(side_effect=slow))
  shape = (2, 9, 9, 19)  # no other test makes a primitive for it
  assert _count((shape, 'float32'), ((3, 3, 19, 17), 'float32')) == 0
  x = jax.ShapeDtypeStruct((2, 81, 19), 'float32')
  scale = jax.ShapeDtypeStruct((19,), 'float32')
  assert not onednn_layers.takes_norm(x, scale, True, PLATFORM)


def _norm_arrays(shape, dtype):
  random = np.random.default_rng(5)
  x = random.normal(size=shape) * 2 + 3
  # Rows differ in mean and spread, so that a wrong grouping shows.
  x = x * (1 + np.arange(len(x)) / 4)[:, None, None, None]
  scale, bias = random.normal(size=(2, shape[-1])).astype('float32')
  dy = random.normal(size=shape)
  kind = ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype
  return x.astype(kind), scale, bias, dy.astype(kind)


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
@pytest.mark.parametrize(
  'shape, group, relu',
  [
    ((12, 5, 7, 16), 4, False),
    ((12, 5, 7, 16), 4, True),
    ((12, 5, 3, 33), 0, True),
    ((4, 6, 6, 64), 1, False),
    ((6, 1, 1, 3), 3, True),
  ],
)
def test_batch_norm_equals_numpy(shape, group, relu, dtype, monkeypatch):
  # As many as the float32 groups can be divided among.
  groups = shape[0] // (group or shape[0])
  threads = next(n for n in (3, 2, 1) if groups % n == 0)
  monkeypatch.setattr(onednn.find(), 'threads', threads)
  x, scale, bias, dy = _norm_arrays(shape, dtype)
  layer = layers.BatchNorm(group, momentum=0.75, dtype=dtype, platform=PLATFORM, relu=relu)
  assert onednn_here.calls(references.norm_step, layer, x, scale, bias, dy) == 2
  y, (dx, dscale, dbias), new = references.norm_step(layer, x, scale, bias, dy)
  assert y.dtype == dx.dtype == x.dtype and dscale.dtype == np.float32
  wants = references.normalisation(x, scale, bias, group or len(x), dy, relu)
  want, mean, var, want_dx, want_dscale, want_dbias = wants
  # float32: means of up to 30 deviations and few rows cost a digit.
  wide = 2e-5 if dtype == 'float32' else 4e-3
  for got, right, tolerance in (
    (y, want, wide),
    (dx, want_dx, wide),
    (dscale, want_dscale, 2e-5),
    (dbias, want_dbias, 2e-5),
    (new['mean'], 0.375 + mean.mean(0) / 4, 2e-6),
    (new['var'], 1.5 + var.mean(0) / 4, 2e-5),
  ):
    limit = tolerance * max(np.abs(right).max(), 1e-2)
    np.testing.assert_allclose(np.float64(got), right, rtol=0, atol=limit)


def test_float32_groups_that_cannot_be_divided_are_xlas(monkeypatch):
  scale = jax.ShapeDtypeStruct((16,), 'float32')
  for groups, threads, dtype, takes in (
    (1, 2, 'float32', False),
    (2, 2, 'float32', True),
    (3, 2, 'float32', False),
    (1, 1, 'float32', True),
    (1, 2, 'bfloat16', True),
  ):
    if dtype not in onednn_here.DTYPES:
      continue
    monkeypatch.setattr(onednn.find(), 'threads', threads)
    x = jax.ShapeDtypeStruct((groups, 30, 16), dtype)
    assert onednn_layers.takes_norm(x, scale, True, PLATFORM) == takes


@pytest.mark.parametrize('dtype', onednn_here.DTYPES)
def test_constant_channels(dtype):
  """Their variance is 0, and y the bias; dx is dy less its mean, over eps."""
  values = jnp.asarray(np.linspace(-4, 1000, 16), dtype)
  x = np.asarray(jnp.broadcast_to(values, (8, 3, 3, 16)))
  bias = np.linspace(-1, 1, 16, dtype='float32')
  dy = references.values(0, x.shape, dtype)
  layer = layers.BatchNorm(4, 0.0, dtype=dtype, platform=PLATFORM)
  y, (dx, dscale, dbias), new = references.norm_step(layer, x, np.ones(16, 'f4'), bias, dy)
  # float32 holds a mean near 1000 to 6e-5, which is 0.02 deviations, where eps
  # is all the variance; the sum is a few such off.
  np.testing.assert_allclose(new['var'], 0, atol=1e-7)
  np.testing.assert_allclose(np.float64(y), np.broadcast_to(bias, y.shape), atol=0.1)
  groups = np.float64(dy).reshape(2, -1, 16)
  want = (groups - groups.mean(1, keepdims=True)) / np.sqrt(1e-5)
  np.testing.assert_allclose(np.float64(dx), want.reshape(dx.shape), rtol=0, atol=1e-2 * want.max())
  np.testing.assert_allclose(dbias, groups.sum((0, 1)), atol=1e-4)
  assert np.isfinite(dscale).all()


@pytest.mark.parametrize('devices, calls', [(1, 2), (2, 0)])
def test_a_group_over_devices_falls_back(config, devices, calls, monkeypatch):
  monkeypatch.setattr(onednn.find(), 'threads', 1)
  x, scale, bias, dy = _norm_arrays((8, 5, 3, 16), 'float32')
  layer = layers.BatchNorm(0, momentum=0.75, axis_name=mesh_lib.DATA, platform=PLATFORM, relu=True)
  program = references.divided_norm_step(layer, config, devices)
  assert onednn_here.calls(program, x, scale, bias, dy) == calls
  y, gradients, new = program(x, scale, bias, dy)
  want, mean, _, *wants = references.normalisation(x, scale, bias, 8, dy, relu=True)
  for got, right in zip((y, *gradients), (want, *wants), strict=True):
    np.testing.assert_allclose(got, right, rtol=0, atol=2e-5 * np.abs(right).max())
  np.testing.assert_allclose(new['mean'], 0.375 + mean[0] / 4, rtol=1e-5)
