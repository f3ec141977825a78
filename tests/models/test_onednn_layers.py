"""oneDNN's convolutions and batch norm against float64, and PyTorch."""

import functools
import importlib.util
import math
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.models.layers import onednn_layers, windows
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import onednn
from anp_jax.system.onednn import c_api, pieces

pytestmark = [
  pytest.mark.usefixtures('quick_compiles'),
  pytest.mark.skipif(onednn.find() is None, reason=f'no oneDNN: {onednn.missing_reason()}'),
]
PLATFORM = onednn.PLATFORM
P = jax.sharding.PartitionSpec
_BFLOAT16 = onednn.find() and 'bfloat16' in onednn.find().dtypes
_DTYPES = ('float32', 'bfloat16') if _BFLOAT16 else ('float32',)
# Of the largest value. float32 rounds each sum at 6e-8 a few times: 1e-6 was
# seen. bfloat16's are sums in float32 rounded once, at 2^-8 of a value. A
# wrong or missing tap shows at 1e-1.
_TOLERANCES = {'float32': 5e-6, 'bfloat16': 4.1e-3}


def _taps(x, kernel, stride, pads):
  """Each tap of the kernel, with where in a padded map it meets pixels."""
  rows, columns = (
    (n + sum(pad) - k) // stride + 1 for n, k, pad in zip(x.shape[1:3], kernel.shape, pads)
  )
  for i in range(kernel.shape[0]):
    for j in range(kernel.shape[1]):
      yield (
        i,
        j,
        np.s_[
          :, i : i + (rows - 1) * stride + 1 : stride, j : j + (columns - 1) * stride + 1 : stride
        ],
      )


def _reference(x, kernel, stride, pads, groups=1, dy=None):
  """Convolution in float64, tap by tap; with dy both gradients, too."""
  x, kernel = np.float64(x), np.float64(kernel)
  around = ((0, 0), *pads, (0, 0))
  padded = np.pad(x, around).reshape(
    len(x), x.shape[1] + sum(pads[0]), x.shape[2] + sum(pads[1]), groups, -1
  )
  kernels = kernel.reshape(*kernel.shape[:3], groups, -1)
  y = 0.0
  dpadded, dkernels = np.zeros(padded.shape), np.zeros(kernels.shape)
  for i, j, place in _taps(x, kernel, stride, pads):
    y = y + np.einsum('bhwgc,cgf->bhwgf', padded[place], kernels[i, j])
    if dy is not None:
      wide = np.float64(dy).reshape(*dy.shape[:3], groups, -1)
      dpadded[place] += np.einsum('bhwgf,cgf->bhwgc', wide, kernels[i, j])
      dkernels[i, j] = np.einsum('bhwgc,bhwgf->cgf', padded[place], wide)
  y = y.reshape(*y.shape[:3], -1)
  if dy is None:
    return (y,)
  (top, bottom), (left, right) = pads
  dx = dpadded[:, top : dpadded.shape[1] - bottom, left : dpadded.shape[2] - right]
  return y, dx.reshape(x.shape), dkernels.reshape(kernel.shape)


def _values(seed, shape, dtype):
  values = np.random.default_rng(seed).normal(size=shape)
  return values.astype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)


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
  x = _values(0, shape, dtype)
  channels = shape[-1] // case['groups']
  kernel = _values(1, (*sizes, channels, case['features']), dtype)
  rows = ((n + sum(pad) - k) // case['stride'] + 1 for n, k, pad in zip(shape[1:3], sizes, pads))
  # Another first number, of either sign, for each case.
  seed = zlib.crc32(repr(case).encode())
  dy = _values(seed, (shape[0], *rows, case['features']), dtype)
  return x, kernel, pads, dy


def _program(case):
  """(x, kernel, dy) to the convolution and what it sends back of dy."""

  def compute(x, kernel, dy):
    y, pull = jax.vjp(
      lambda x, k: layers.convolve(x, k, case['stride'], case['padding'], PLATFORM, case['groups']),
      x,
      kernel,
    )
    return (y, *pull(dy))

  return jax.jit(compute)


def _calls(program, *arguments):
  """How often a program calls oneDNN."""
  return program.lower(*arguments).as_text().count('custom_call @anp_onednn')


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
    assert _calls(program, x, kernel, dy) == calls, (case, dtype)
  got = program(x, kernel, dy)
  wants = _reference(x, kernel, case['stride'], pads, case['groups'], dy)
  for name, a, want in zip(('y', 'dx', 'dkernel'), got, wants, strict=True):
    assert a.shape == want.shape and a.dtype == x.dtype
    error = np.abs(np.float64(a) - want).max() / np.abs(want).max()
    assert error < _TOLERANCES[dtype], f'{name} of {case}, {dtype}: {error:.1e}'


CASES = [
  *(_case((2, 9, 11, 16), k, 24, s, k // 2) for k in (1, 3, 5, 7) for s in (1, 2, 3)),
  *(_case((2, 9, 8, c), 3, f, 1, 1) for c in (1, 3, 4, 5, 16, 33) for f in (5, 33)),
  *(
    _case((3, 13, 10, 8), 3, 16, s, padding)
    for s in (1, 2)
    for padding in ('SAME', 'VALID', ((2, 0), (1, 3)))
  ),
  _case((2, 9, 9, 8), 2, 16, 2, 'SAME'),
  _case((1, 7, 7, 64), 3, 32, 1, 1),
  _case((1, 30, 31, 3), 7, 64, 2, 3),
  _case((2, 12, 9, 16), (5, 3), 16, 1, ((2, 2), (1, 1))),
  _case((2, 9, 9, 32), 3, 64, 1, 1, groups=2),
  _case((2, 9, 9, 64), 3, 64, 2, 1, groups=4),
  _case((2, 9, 9, 32), 3, 32, 1, 1, groups=32),
  _case((2, 9, 9, 32), 3, 32, 2, ((0, 1), (0, 1)), groups=32),
  _case((2, 16, 16, 8), 1, 24, 1, 0),
  _case((2, 16, 17, 8), 1, 24, 1, 0),
  # Depthwise kernels whose gradients are computed in columns.
  _case((2, 9, 9, 32), 7, 32, 1, 3, groups=32, calls=5),
  _case((4, 10, 9, 16), 5, 16, 2, 2, groups=16, calls=4),
  _case((2, 11, 12, 16), 5, 16, 2, ((1, 2), (0, 3)), groups=16, calls=4),
  # By image, by pairs of pixels.
  _case((2, 3, 2, 16), 7, 16, 1, 3, groups=16),
  _case((4, 4, 4, 16), 7, 16, 1, 3, groups=16),
  _case((3, 4, 4, 5), 7, 5, 1, 3, groups=5),
  _case((4, 5, 4, 16), 5, 16, 2, ((2, 2), (1, 2)), groups=16),
  _case((4, 6, 3, 16), 5, 16, 2, ((0, 2), (3, 2)), groups=16),
  _case((4, 2, 2, 16), 5, 16, 1, 2, groups=16, calls=2),
  _case((2, 9, 9, 16), 4, 16, 1, 0, groups=16, calls=4),
]


@pytest.mark.parametrize('dtype', _DTYPES)
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


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize('seed', range(30))
def test_random_shapes(seed, dtype):
  _check(_random_case(seed), dtype, computes=False)


@pytest.mark.parametrize('dtype', _DTYPES)
def test_convolution_equals_pytorchs(dtype):
  if importlib.util.find_spec('torch') is None:
    pytest.skip('no PyTorch')
  import torch

  case = _case((3, 15, 14, 24), 3, 40, 2, 1, groups=2)
  x, kernel, _, dy = _arrays(case, dtype)
  got = _program(case)(x, kernel, dy)
  # In float64, of the same rounded numbers.
  tensors = [
    torch.tensor(np.float64(x).transpose(0, 3, 1, 2), requires_grad=True),
    torch.tensor(np.float64(kernel).transpose(3, 2, 0, 1), requires_grad=True),
  ]
  y = torch.nn.functional.conv2d(*tensors, stride=2, padding=1, groups=2)
  y.backward(torch.tensor(np.float64(dy).transpose(0, 3, 1, 2)))
  wants = (
    y.detach().numpy().transpose(0, 2, 3, 1),
    tensors[0].grad.numpy().transpose(0, 2, 3, 1),
    tensors[1].grad.numpy().transpose(2, 3, 1, 0),
  )
  for a, want in zip(got, wants, strict=True):
    np.testing.assert_allclose(
      np.float64(a), want, rtol=0, atol=_TOLERANCES[dtype] * np.abs(want).max()
    )


def _count(x, kernel, stride=1, padding=1, groups=1):
  x, kernel = (jax.ShapeDtypeStruct(*a) for a in (x, kernel))
  program = jax.jit(lambda x, k: layers.convolve(x, k, stride, padding, PLATFORM, groups))
  return _calls(program, x, kernel)


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
  dy = _values(2, (2, 5, 4, 16), 'float32')
  y, dx, dkernel = _program(case)(x, kernel, dy)
  none = ((0, 0), (0, 0))
  wants = _reference(x[cut], kernel, 1, none, 1, dy)
  for a, want in zip((y, dx[cut], dkernel), wants, strict=True):
    limit = _TOLERANCES['float32'] * np.abs(want).max()
    np.testing.assert_allclose(a, want, rtol=0, atol=limit)
  np.testing.assert_array_equal(np.abs(dx).sum(), np.abs(dx[cut]).sum())


def test_float64_is_computed_in_float64(x64):
  case = _case((2, 9, 9, 4), 3, 5, 1, 1)
  x, kernel, pads, dy = _arrays(case, 'float64')
  got = _program(case)(x, kernel, dy)
  for a, want in zip(got, _reference(x, kernel, 1, pads, 1, dy), strict=True):
    np.testing.assert_allclose(a, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize('dtype', _DTYPES)
def test_an_empty_batch(dtype):
  x, kernel = _values(0, (0, 9, 9, 16), dtype), _values(1, (3, 3, 16, 8), dtype)

  def compute(x, kernel):
    return jax.vjp(lambda x, k: layers.convolve(x, k, 2, 1, PLATFORM), x, kernel)

  y, pull = jax.jit(compute)(x, kernel)
  assert y.shape == (0, 5, 5, 8)
  dx, dkernel = pull(y)
  assert dx.shape == x.shape
  np.testing.assert_array_equal(np.float32(dkernel), 0)


def test_a_kernel_of_another_dtype_is_not_read_as_the_images():
  x = _values(0, (2, 9, 9, 16), 'float32')
  kernel = _values(1, (3, 3, 16, 8), 'bfloat16')
  with pytest.raises(TypeError, match='same dtypes'):
    layers.convolve(x, kernel, 1, 1, PLATFORM)


def test_where_there_is_only_the_slow_reference_xla_computes(monkeypatch):
  def slow(api, spec, description, arguments):
    raise c_api.OneDnnError('only ref:any')

  monkeypatch.setattr(pieces, 'compile_fast', slow)
  shape = (2, 9, 9, 19)  # no other test makes a primitive for it
  assert _count((shape, 'float32'), ((3, 3, 19, 17), 'float32')) == 0
  x = jax.ShapeDtypeStruct((2, 81, 19), 'float32')
  scale = jax.ShapeDtypeStruct((19,), 'float32')
  assert not onednn_layers.takes_norm(x, scale, True, PLATFORM)


def _norm_reference(x, scale, bias, group, relu, dy):
  """y, the groups' statistics, and the gradients of x, scale and bias.

  Gradients go through variance and mean apart, as Ioffe and Szegedy write them.
  """
  shape = x.shape
  x = np.float64(x).reshape(len(x) // group, -1, shape[-1])
  mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
  root = np.sqrt(var + 1e-5)
  unit = (x - mean) / root
  y = unit * scale + bias
  dy = np.float64(dy).reshape(x.shape)
  if relu:
    dy = np.where(y > 0, dy, 0)
    y = np.maximum(y, 0)
  dunit = dy * scale
  dvar = (dunit * (x - mean)).sum(1, keepdims=True) * -0.5 * root**-3
  dmean = -dunit.sum(1, keepdims=True) / root
  dx = dunit / root + (dvar * 2 * (x - mean) + dmean) / x.shape[1]
  return (
    y.reshape(shape),
    mean[:, 0],
    var[:, 0],
    dx.reshape(shape),
    (dy * unit).sum((0, 1)),
    dy.sum((0, 1)),
  )


def _norm_arrays(shape, dtype, offset=3.0):
  random = np.random.default_rng(5)
  x = random.normal(size=shape) * 2 + offset
  # Rows differ in mean and spread, so that a wrong grouping shows.
  x = x * (1 + np.arange(len(x)) / 4)[:, None, None, None]
  scale, bias = random.normal(size=(2, shape[-1])).astype('float32')
  dy = random.normal(size=shape)
  kind = ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype
  return x.astype(kind), scale, bias, dy.astype(kind)


@functools.partial(jax.jit, static_argnums=0)
def _step(layer, x, scale, bias, dy):
  """y, what is sent back of dy, and new statistics of a BatchNorm."""
  channels = x.shape[-1]
  stats = {'mean': jnp.full(channels, 0.5), 'var': jnp.full(channels, 2.0)}

  def apply(x, scale, bias):
    variables = {'params': {'scale': scale, 'bias': bias}}
    return layer.apply(variables | {'batch_stats': stats}, x, True, mutable=['batch_stats'])

  y, pull, new = jax.vjp(apply, x, scale, bias, has_aux=True)
  return y, pull(dy), new['batch_stats']


@pytest.mark.parametrize('dtype', _DTYPES)
@pytest.mark.parametrize('relu', [False, True])
@pytest.mark.parametrize(
  'shape, group',
  [
    ((12, 5, 7, 16), 4),
    ((12, 3, 3, 5), 12),
    ((12, 5, 3, 33), 0),
    ((4, 6, 6, 64), 1),
    ((6, 1, 1, 3), 3),
  ],
)
def test_batch_norm_equals_numpy(shape, group, relu, dtype, monkeypatch):
  # As many as the float32 groups can be divided among.
  groups = shape[0] // (group or shape[0])
  threads = next(n for n in (3, 2, 1) if groups % n == 0)
  monkeypatch.setattr(onednn.find(), 'threads', threads)
  x, scale, bias, dy = _norm_arrays(shape, dtype)
  layer = layers.BatchNorm(group, momentum=0.75, dtype=dtype, platform=PLATFORM, relu=relu)
  assert _calls(_step, layer, x, scale, bias, dy) == 2
  y, (dx, dscale, dbias), new = _step(layer, x, scale, bias, dy)
  assert y.dtype == dx.dtype == x.dtype and dscale.dtype == np.float32
  wants = _norm_reference(x, scale, bias, group or len(x), relu, dy)
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
    if dtype not in _DTYPES:
      continue
    monkeypatch.setattr(onednn.find(), 'threads', threads)
    x = jax.ShapeDtypeStruct((groups, 30, 16), dtype)
    assert onednn_layers.takes_norm(x, scale, True, PLATFORM) == takes


def test_a_mean_of_a_thousand_deviations_does_not_cancel():
  x = np.float32(np.random.default_rng(5).normal(1e3, 1, (2, 4096, 16)))
  y, mean, var = onednn_layers.normalise(x, jnp.ones(16), jnp.zeros(16), 0.0, False)
  exact = np.float64(x)
  # oneDNN adds thousands of rows one by one in float32, each at 3e-8 of the
  # sum: of the mean 1e-6 was seen. E[x^2] - E[x]^2 would lose 0.06 of the
  # variance on these numbers.
  np.testing.assert_allclose(var, exact.var(1), rtol=2e-5)
  np.testing.assert_allclose(mean, exact.mean(1), rtol=3e-6)
  unit = exact - exact.mean(1, keepdims=True)
  unit /= exact.std(1, keepdims=True)
  np.testing.assert_allclose(y, unit, atol=3e-3)


@pytest.mark.parametrize('dtype', _DTYPES)
def test_constant_channels(dtype):
  """Their variance is 0, and y the bias; dx is dy less its mean, over eps."""
  values = jnp.asarray(np.linspace(-4, 1000, 16), dtype)
  x = np.asarray(jnp.broadcast_to(values, (8, 3, 3, 16)))
  bias = np.linspace(-1, 1, 16, dtype='float32')
  dy = _values(0, x.shape, dtype)
  layer = layers.BatchNorm(4, 0.0, dtype=dtype, platform=PLATFORM)
  y, (dx, dscale, dbias), new = _step(layer, x, np.ones(16, 'f4'), bias, dy)
  # float32 holds a mean near 1000 to 6e-5, which is 0.02 deviations, where eps
  # is all the variance; the sum is a few such off.
  np.testing.assert_allclose(new['var'], 0, atol=1e-7)
  np.testing.assert_allclose(np.float64(y), np.broadcast_to(bias, y.shape), atol=0.1)
  groups = np.float64(dy).reshape(2, -1, 16)
  want = (groups - groups.mean(1, keepdims=True)) / np.sqrt(1e-5)
  np.testing.assert_allclose(np.float64(dx), want.reshape(dx.shape), rtol=0, atol=1e-2 * want.max())
  np.testing.assert_allclose(dbias, groups.sum((0, 1)), atol=1e-4)
  assert np.isfinite(dscale).all()


def test_nothing_flows_back_through_statistics():
  def loss(x):
    _, mean, var = onednn_layers.normalise(x, jnp.ones(16), jnp.zeros(16), 1e-5, True)
    return mean.sum() + var.sum()

  x = _values(4, (2, 5, 16), 'float32')
  np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), 0)


def test_running_statistics_are_used_outside_training():
  x, scale, bias, _ = _norm_arrays((3, 5, 4, 8), 'float32')
  mean, var = np.linspace(-1, 1, 8), np.linspace(1, 3, 8)
  layer = layers.BatchNorm(2, platform=PLATFORM, relu=True)
  variables = {
    'params': {'scale': scale, 'bias': bias},
    'batch_stats': {'mean': np.float32(mean), 'var': np.float32(var)},
  }
  y = layer.apply(variables, x, False)
  want = (np.float64(x) - mean) / np.sqrt(var + 1e-5) * scale + bias
  np.testing.assert_allclose(y, np.maximum(want, 0), atol=1e-5)


@pytest.mark.parametrize('devices, calls', [(1, 2), (2, 0)])
def test_a_group_over_devices_falls_back(config, devices, calls, monkeypatch):
  monkeypatch.setattr(onednn.find(), 'threads', 1)
  x, scale, bias, dy = _norm_arrays((8, 5, 3, 16), 'float32')
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  layer = layers.BatchNorm(0, momentum=0.75, axis_name=mesh_lib.DATA, platform=PLATFORM, relu=True)

  def shard(x, dy, scale, bias):
    y, (dx, *rest), new = _step(layer, x, scale, bias, dy)
    return y, dx, lax.psum(rest, 'data'), lax.pmean(new, 'data')

  rows = P(mesh_lib.DATA)
  program = jax.jit(
    jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(rows, rows, P(), P()),
      out_specs=(rows, rows, P(), P()),
      check_vma=False,
    )
  )
  assert _calls(program, x, dy, scale, bias) == calls
  y, dx, rest, new = program(x, dy, scale, bias)
  want, mean, _, *gradients = _norm_reference(x, scale, bias, 8, True, dy)
  for got, right in zip((y, dx, *rest), (want, *gradients), strict=True):
    limit = 2e-5 * np.abs(right).max()
    np.testing.assert_allclose(got, right, rtol=0, atol=limit)
  np.testing.assert_allclose(new['mean'], 0.375 + mean[0] / 4, rtol=1e-5)
