"""Grouped convolutions against sums over each group, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.models import layers
from anp_jax.parallel.channel_split import convolutions
from anp_jax.system import onednn
from tests import layer_references as references, onednn_here

_SIDE = 9


def _check(convolve, x, kernel, dy, stride, groups):
  """Compares a function of x and the kernel, and its gradients, with float64."""
  pads = ((len(kernel) // 2,) * 2,) * 2
  wants = references.convolution(x, kernel, stride, pads, groups, dy)
  results = references.with_gradients(convolve)(dy, x, kernel)
  for result, want, dtype in zip(results, wants, (x.dtype, x.dtype, kernel.dtype), strict=True):
    assert result.shape == want.shape and result.dtype == dtype
    error = np.abs(np.float64(result) - want).max() / np.abs(want).max()
    # A rounding to 8 bits is 2^-9; float32 sums of up to 256 products.
    assert error < (2e-6 if x.dtype == 'float32' else 2**-7)


@pytest.mark.parametrize(
  'platform, dtype',
  [
    ('cpu', 'float32'),
    ('cpu_onednn', 'float32'),
    pytest.param('cpu', 'bfloat16', marks=pytest.mark.slow),
    pytest.param('cpu_onednn', 'bfloat16', marks=pytest.mark.slow),
    pytest.param('gpu', 'float32', marks=pytest.mark.soak),
  ],
)
@pytest.mark.parametrize(
  'channels, features, groups, stride',
  # Blocks of dense ones, all groups in one; more features; depthwise.
  [
    (128, 128, 32, 1),
    (6, 12, 3, 2),
    (8, 8, 8, 2),
    pytest.param(24, 24, 24, 1, marks=pytest.mark.soak),
  ],
)
def test_groups_are_convolved_by_themselves(platform, dtype, channels, features, groups, stride):
  if platform == 'cpu_onednn' and not onednn.find():
    pytest.skip('no oneDNN here')
  if platform == 'cpu_onednn' and dtype not in onednn.opened().dtypes:
    pytest.skip(f'oneDNN has no {dtype} here')
  random = np.random.default_rng(0)
  conv = layers.Conv(features, 3, stride, groups=groups, dtype=dtype, platform=platform)
  rows = -(-_SIDE // stride)
  x = jnp.asarray(random.normal(size=(2, _SIDE, _SIDE, channels)), dtype)
  dy = jnp.asarray(random.normal(size=(2, rows, rows, features)), dtype)
  kernel = jnp.asarray(random.normal(size=(3, 3, channels // groups, features)), dtype)
  kernel = kernel.astype('float32')
  _check(lambda x, k: conv.apply({'params': {'kernel': k}}, x), x, kernel, dy, stride, groups)


@pytest.mark.parametrize(
  # The first two by pairs of pixels, on maps smaller than the window.
  'side, size, stride, dtype',
  [(3, 7, 3, 'float32'), (3, 7, 3, 'bfloat16'), (4, 5, 1, 'float32')],
)
def test_depthwise_kernels_on_small_maps(side, size, stride, dtype):
  random = np.random.default_rng(0)
  rows = -(-side // stride)
  x, dy = (jnp.asarray(random.normal(size=(16, n, n, 6)), dtype) for n in (side, rows))
  kernel = jnp.asarray(random.normal(size=(size, size, 1, 6)), dtype)
  _check(lambda x, k: layers.convolve(x, k, stride, size // 2, 'cpu', 6), x, kernel, dy, stride, 6)


@onednn_here.needed
def test_no_map_is_kept_padded_for_the_gradient():
  depth, side, size, channels = 6, 4, 7, 64

  def network(kernels, x):
    for kernel in kernels:
      x = layers.convolve(x, kernel, 1, size // 2, onednn.PLATFORM, channels)
    return (x * x).sum()

  x = jnp.zeros((16, side, side, channels))
  kernels = [jnp.zeros((size, size, 1, channels))] * depth
  compiled = jax.jit(jax.grad(network)).lower(kernels, x).compile()
  arrays = compiled.memory_analysis().temp_size_in_bytes / x.nbytes
  # The maps between layers, and what one layer's gradient needs: a padded map,
  # kernels of each image and two gradients. Kept from the forward pass on,
  # padded maps alone would be depth times 6.25.
  padded = ((side + size - 1) / side) ** 2
  assert arrays < depth + padded + (size / side) ** 2 + 2.5


def test_what_cannot_be_grouped_is_refused():
  conv = layers.Conv(8, 3, groups=4)
  with pytest.raises(ValueError, match='6 channels and 8 features: expected'):
    conv.init(jax.random.key(0), jnp.zeros((1, 4, 4, 6)))


def test_no_device_gets_a_part_of_a_grouped_convolution():
  conv = layers.Conv(8, 3, groups=2)
  images = jax.ShapeDtypeStruct((1, 4, 4, 4), jnp.float32)
  kernel = jax.ShapeDtypeStruct((3, 3, 2, 8), jnp.float32)
  variables = {'params': {'kernel': kernel}}

  def never(*unused):
    raise AssertionError

  with convolutions.computed_by(never):
    y = jax.eval_shape(conv.apply, variables, images)
  assert y.shape == (1, 4, 4, 8)
