"""The fast network for CIFAR-10 against PyTorch's functions, and its whitening."""

import functools
import itertools
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from anp_jax.models import airbench
from tests import builders, launching, layer_references as references

_BATCH, _CLASSES = 6, 7


def _network(dtype=jnp.float32):
  return airbench.Airbench94(_CLASSES, group=0, dtype=dtype, param_dtype=dtype)


def _their_loss(params, images, labels, torch):
  """Loss of the network of the paper, written with PyTorch's functions, in training."""
  f = torch.nn.functional
  kernel = torch.from_numpy(airbench.whitening_kernel().astype(np.float64).transpose(3, 2, 0, 1))
  x = f.gelu(f.conv2d(images, kernel, params['whitened_bias']))
  for i in range(3):
    for j in range(2):
      conv, norm = (params[f'stage{i + 1}_{kind}{j + 1}'] for kind in ('conv', 'norm'))
      x = f.conv2d(x, conv['kernel'].permute(3, 2, 0, 1), padding=1)
      x = x if j else f.max_pool2d(x, 2)
      x = f.gelu(f.batch_norm(x, None, None, norm['scale'], norm['bias'], training=True))
  logits = f.max_pool2d(x, 3).flatten(1) @ params['head']['kernel'] + params['head']['bias']
  return f.cross_entropy(logits / 9, labels)


def test_loss_and_gradients_are_those_of_pytorch(x64):
  torch = pytest.importorskip('torch')
  random = np.random.default_rng(1)
  images, labels = random.standard_normal((_BATCH, 32, 32, 3)), np.arange(_BATCH)
  network = _network(jnp.float64)
  variables = jax.jit(network.init, static_argnums=2)(jax.random.key(0), images, False)
  params = references.random_variables(variables['params'], gain=1)

  def loss(params):
    rest = {'batch_stats': variables['batch_stats']}
    logits, _ = network.apply({'params': params, **rest}, images, True, mutable=['batch_stats'])
    return -jax.nn.log_softmax(logits)[np.arange(_BATCH), labels].mean()

  ours, gradients = jax.jit(jax.value_and_grad(loss))(params)
  tensors = jax.tree.map(lambda p: torch.from_numpy(p).requires_grad_(), params)
  channels_first = torch.from_numpy(images.transpose(0, 3, 1, 2))
  expected = _their_loss(tensors, channels_first, torch.from_numpy(labels), torch)
  expected.backward()
  np.testing.assert_allclose(ours, expected.item(), rtol=1e-9)
  # Sums in another order, in float64: 1e-9 of the largest is a thousand roundings.
  for gradient, p in zip(jax.tree.leaves(gradients), jax.tree.leaves(tensors)):
    scale = p.grad.abs().max().item()
    np.testing.assert_allclose(gradient, p.grad.numpy(), rtol=1e-7, atol=1e-9 * scale)


def test_images_without_room_for_the_pools_are_refused():
  shapes = functools.partial(jax.eval_shape, lambda x: _network().init(jax.random.key(0), x, False))
  shapes(jnp.zeros((1, 9, 32, 3)))
  builders.assert_refused('data.image_size=8: expected 9 or more', shapes, jnp.zeros((1, 8, 32, 3)))


def test_directions_of_the_whitening_are_orthogonal():
  kernel = airbench.whitening_kernel(0.0).reshape(12, 24).astype(np.float64)
  assert np.array_equal(kernel[:, :12], -kernel[:, 12:])
  unit = kernel[:, :12] / np.linalg.norm(kernel[:, :12], axis=0)
  # Colours are written with two digits.
  np.testing.assert_allclose(unit.T @ unit, np.eye(12), atol=0.02)


@pytest.mark.slow
def test_whitened_patches_of_photographs_have_unit_variance():
  path = launching.ROOT.parent / 'shared/data/cifar10/cifar10-jpeg.tar.xz'
  if not path.exists():
    pytest.skip('shared/data/cifar10 is not here')
  with tarfile.open(path, 'r|xz') as files:
    files_of_images = (f for f in files if f.name.endswith('.jpg'))
    every = itertools.islice(files_of_images, 0, None, 20)
    images = [np.asarray(PIL.Image.open(files.extractfile(f)), np.float32) for f in every]
  x = (np.stack(images) - (125.3, 123.0, 113.9)) / (63.0, 62.1, 66.7)
  corners = [x[:, i : 31 + i, j : 31 + j] for i in (0, 1) for j in (0, 1)]
  patches = np.stack(corners, -2).reshape(-1, 12)
  responses = patches @ airbench.whitening_kernel(0.0).reshape(12, 24)[:, :12]
  moments = responses.T @ responses / len(responses)
  # Of 3,000 images; the components are rounded, and not quite products.
  assert 0.7 < np.diag(moments).min() and np.diag(moments).max() < 1.4
  correlations = moments / np.sqrt(np.outer(np.diag(moments), np.diag(moments))) - np.eye(12)
  assert np.abs(correlations).max() < 0.5
