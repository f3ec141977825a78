"""The plain networks against PyTorch, and their layers against closed forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import models
from anp_jax.config import command_line
from anp_jax.models import convnets
from tests import builders, caffe_models, layer_references as references

CLASSES = 7
# (network, images): the size that it was made for, and one at which every pool
# has windows cut off at both far edges, or at one.
CASES = (
  ('lenet', (3, 28, 28, 1)),
  ('lenet', (2, 17, 23, 3)),
  ('cifar10_full', (3, 32, 32, 3)),
  ('cifar10_full', (2, 14, 17, 1)),
  ('two_convolutions', (2, 32, 32, 3)),
  ('two_convolutions', (2, 14, 17, 3)),
  ('caffenet', (2, 67, 79, 3)),
  # CaffeNet's layers in another order.
  pytest.param('bvlc_alexnet', (2, 67, 55, 3), marks=pytest.mark.slow),
)
NETS = {
  'lenet': convnets.LeNet,
  'cifar10_full': convnets.Cifar10Full,
  'two_convolutions': convnets.TwoConvolutions,
  'caffenet': convnets.CaffeNet,
  'bvlc_alexnet': functools.partial(convnets.CaffeNet, norm_first=True),
}


def _shapes(net, shape):
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.eval_shape(lambda x: net.init(jax.random.key(0), x, False), images)['params']


def _their_response(x, torch):
  pool = torch.nn.functional.avg_pool2d
  return x * (1 + 5e-5 * pool(x * x, 3, 1, 1)) ** -0.75


def _their_logits(name, x, w, torch):
  """The network in torch's functions; w: {layer: (weight, bias)}."""
  f = torch.nn.functional
  if name in caffe_models.NORM_FIRST:
    return caffe_models.logits(x, w, caffe_models.NORM_FIRST[name])
  if name == 'lenet':
    x = f.max_pool2d(f.conv2d(x, *w['conv1']), 2, 2, ceil_mode=True)
    x = f.max_pool2d(f.conv2d(x, *w['conv2']), 2, 2, ceil_mode=True)
    x = f.relu(f.linear(x.flatten(1), *w['hidden']))
    return f.linear(x, *w['head'])
  if name == 'two_convolutions':
    for layer in ('conv1', 'conv2'):
      x = f.relu(f.conv2d(x, *w[layer], padding=2))
      x = f.max_pool2d(x, 2, 2, ceil_mode=True)
    return f.linear(x.flatten(1), *w['head'])
  x = f.max_pool2d(f.conv2d(x, *w['conv1'], padding=2), 3, 2, ceil_mode=True)
  x = _their_response(f.relu(x), torch)
  x = f.relu(f.conv2d(x, *w['conv2'], padding=2))
  x = _their_response(f.avg_pool2d(x, 3, 2, ceil_mode=True), torch)
  x = f.relu(f.conv2d(x, *w['conv3'], padding=2))
  x = f.avg_pool2d(x, 3, 2, ceil_mode=True)
  return f.linear(x.flatten(1), *w['head'])


def _to_theirs(params, sides, torch):
  """Kernels transposed; the rows of what is flattened go channels first."""

  def one(leaf):
    kernel, bias = leaf['kernel'], leaf['bias']
    if kernel.ndim == 4:
      kernel = kernel.transpose(3, 2, 0, 1)
    elif flattened and kernel is params[flattened]['kernel']:
      kernel = kernel.reshape(*sides, -1, kernel.shape[-1])
      kernel = kernel.transpose(2, 0, 1, 3).reshape(-1, kernel.shape[-1]).T
    else:
      kernel = kernel.T
    return tuple(torch.from_numpy(a.copy()).requires_grad_() for a in (kernel, bias))

  # CaffeNet itself flattens channels first.
  flattened = 'hidden' if 'hidden' in params else None if 'fc6' in params else 'head'
  return {name: one(leaf) for name, leaf in params.items()}


def _flattened_sides(name, shape):
  """Pixels of the last map: every pool rounds up, lenet's convolutions cut."""
  if name in caffe_models.NORM_FIRST:
    return ()
  cut, pools, window = {
    'lenet': (4, 2, 2),
    'cifar10_full': (0, 3, 3),
    'two_convolutions': (0, 2, 2),
  }[name]
  sides = []
  for n in shape[1:3]:
    for _ in range(pools):
      n = -(-(n - cut - window) // 2) + 1
    sides.append(n)
  return sides


@pytest.mark.parametrize('name, shape', CASES)
def test_logits_and_gradients_equal_torch(name, shape):
  torch = pytest.importorskip('torch')
  few = {'kernels': (6, 9)} if name == 'two_convolutions' else {}
  net = NETS[name](CLASSES, **few)
  params = references.random_variables(_shapes(net, shape))
  random = np.random.default_rng(1)
  # Of the size of pixels, so that the response normalisation matters: without
  # it logits are off by half of the largest.
  images = (40 * random.normal(size=shape)).astype(np.float32)
  cotangent = random.normal(size=(shape[0], CLASSES)).astype(np.float32)

  @jax.jit
  def ours(params, images):
    logits, pull = jax.vjp(lambda p: net.apply({'params': p}, images, True), params)
    return logits, pull(cotangent)[0]

  logits, gradients = ours(params, images)
  peer_layers = _to_theirs(params, _flattened_sides(name, shape), torch)
  x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
  want = _their_logits(name, x, peer_layers, torch)
  want.backward(torch.from_numpy(cotangent))

  # float32 sums of at most 2,400 terms in another order: 1e-6 of the largest
  # value was seen; a wrong edge, bias or constant shows at 1e-2.
  def close(got, want, what):
    want = want.detach().numpy()
    assert got.shape == want.shape, what
    largest = np.abs(want).max()
    assert largest > 0, what
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * largest, err_msg=what)

  close(np.asarray(logits), want, 'logits')
  got = _to_theirs(jax.tree.map(np.asarray, gradients), _flattened_sides(name, shape), torch)
  for layer, pair in peer_layers.items():
    for part, a, b in zip(('weight', 'bias'), got[layer], pair):
      close(a.detach().numpy(), b.grad, f'{layer} {part}')


@pytest.mark.parametrize(
  'name, least, layer, width',
  [('lenet', 15, 'hidden', 50), ('cifar10_full', 12, 'head', 64), ('caffenet', 55, 'fc6', 256)],
)
def test_images_that_are_too_small_are_refused(name, least, layer, width):
  net = NETS[name](CLASSES)
  # At the least size each map that is flattened has one pixel.
  shapes = _shapes(net, (1, least, least, 3))
  assert shapes[layer]['kernel'].shape[0] == width
  for shape in ((1, least - 1, 60, 3), (1, 60, least - 1, 3)):
    line = builders.refusal(_shapes, net, shape)
    assert line == (f'config.data.image_size={least - 1}: expected {least} or more for {name}')


@pytest.mark.parametrize('name', NETS)
def test_the_command_line_reaches_them(name):
  config = command_line.load(
    'configs/resnet_anp.py:tiny', {'model.name': name, 'model.dtype': 'bfloat16'}
  )
  module = models.create(config, 9, 'gpu', 'data')
  assert module == NETS[name](9, dtype='bfloat16', param_dtype='float32', platform='gpu')


def test_windows_that_the_edge_cuts_off():
  # 0..19 in rows of 5. Of 3x3 windows at every second pixel the columns fit;
  # of the rows the second window has two, rows 2 and 3.
  x = np.arange(20, dtype='float32').reshape(1, 4, 5, 1)
  pool = jax.jit(convnets.pool, static_argnums=(1, 2, 3))
  highest = pool(-x, 'max', 3, 2)[0, ..., 0]
  np.testing.assert_array_equal(highest, [[0, -2], [-10, -12]])
  # Centres: (1, 1) and (1, 3); then between rows 2 and 3.
  mean = pool(x, 'mean', 3, 2)[0, ..., 0]
  np.testing.assert_allclose(mean, [[6, 8], [13.5, 15.5]], rtol=1e-6)
  # Also where both edges cut: the last pixel alone of a 3x3 map's 2x2 windows.
  corner = pool(x[:, :3, :3], 'mean', 2, 2)[0, ..., 0]
  np.testing.assert_allclose(corner, [[3, 4.5], [10.5, 12]], rtol=1e-6)


def test_response_normalisation_over_channels_in_closed_form():
  # Six channels of 200: 3, 4, 5, 5, 4 and 3 of 5 are within, each 40,000 of the mean.
  y = convnets.normalise_over_channels(jnp.full((1, 2, 1, 6), 200.0))
  want = 200 * (1 + 4 * np.array([3, 4, 5, 5, 4, 3]) / 5) ** -0.75
  np.testing.assert_allclose(y, np.broadcast_to(want, y.shape), rtol=1e-6)  # of float32


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_response_normalisation_in_closed_form(dtype):
  # A constant map of 200: the mean of squares is 40,000 inside, 2/3 of it at an
  # edge and 4/9 at a corner, so that bases are 3, 7/3 and 17/9.
  x = jnp.full((1, 5, 5, 2), 200, dtype)
  y = jax.jit(convnets.normalise_response)(x)
  assert y.dtype == x.dtype
  want = 200 * np.array([17 / 9, 7 / 3, 3]) ** -0.75
  # float32 rounds at 1e-7, bfloat16 at 4e-3; the mean is of the dtype.
  for channel in (0, 1):
    got = np.float32(y)[0, [0, 0, 2], [0, 2, 2]]
    np.testing.assert_allclose(got[:, channel], want, rtol=1e-6 if dtype == 'float32' else 1.2e-2)


def test_response_normalisation_adds_to_one_in_float32():
  # 1 + 5e-5 * 63.5 is 1 in bfloat16, and would leave x as it is. Divided by
  # 1.003175^0.75 it is 7.950, between 7.9375 and 7.96875 nearer to the former.
  x = jnp.full((1, 3, 3, 1), 7.96875, 'bfloat16')
  assert float(jax.jit(convnets.normalise_response)(x)[0, 1, 1, 0]) == 7.9375
