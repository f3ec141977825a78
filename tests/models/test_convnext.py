"""ConvNeXt against transformers and closed forms."""

import functools

from flax import traverse_util
import jax
import numpy as np
import pytest

from anp_jax import models
from anp_jax.checkpoint.weights import families, naming
from anp_jax.models import convnext
from tests import builders, layer_references as references, stepping, timm_peer, weight_files

CLASSES = 10
STAGES, WIDTH = (1, 1, 2, 1), 8


def _their_network(version):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  torch.manual_seed(version)
  suffix = 'V2' if version == 2 else ''
  config = getattr(transformers, f'ConvNext{suffix}Config')(
    hidden_sizes=[WIDTH * 2**i for i in range(4)], depths=list(STAGES), num_labels=CLASSES
  )
  kind = getattr(transformers, f'ConvNext{suffix}ForImageClassification')
  network = kind(config)
  # At their start scales, biases and GRN are 1, 0 and 0, and a swap would not
  # show; kernels of 0.02 would leave the logits to the classifier's bias.
  with torch.no_grad():
    for name, value in network.named_parameters():
      spread = torch.rand(value.shape)
      is_scale = 'layernorm.weight' in name or 'layer_scale' in name
      if value.squeeze().ndim > 1:
        fan_in = value[0].numel()
        value.copy_(torch.randn(value.shape) * fan_in**-0.5)
      else:
        value.copy_(0.5 + spread if is_scale else spread - 0.5)
  return network.eval(), torch


def _ours(tensors, version):
  """Their tensors by our names; each must be used."""
  module = convnext.ConvNeXt(CLASSES, version, STAGES, WIDTH)
  shapes = traverse_util.flatten_dict(references.shapes(module), sep='/')
  kind = naming.TRANSFORMERS
  prefix = families.CONVNEXT.namings[kind].prefixes[version - 1]
  published = families.CONVNEXT.published_names(shapes, kind, prefix)
  assert set(published.values()) == set(tensors)
  values = {
    name: families.CONVNEXT.from_published(name, tensors[published_name], kind)
    for name, published_name in published.items()
  }
  assert {n: v.shape for n, v in values.items()} == {n: s.shape for n, s in shapes.items()}
  return module, traverse_util.unflatten_dict(values, sep='/')


@pytest.mark.slow
@pytest.mark.parametrize('version', [pytest.param(1, marks=pytest.mark.soak), 2])
def test_logits_and_gradients_equal_transformers(version):
  network, torch = _their_network(version)
  arrays = {k: v.detach().numpy() for k, v in network.named_parameters()}
  module, variables = _ours(arrays, version)
  random = np.random.default_rng(0)
  # 70 is no multiple of 32: each stage leaves out what a patch does not fill.
  images = random.normal(size=(3, 70, 70, 3)).astype(np.float32)
  weights = random.normal(size=(3, CLASSES)).astype(np.float32)
  logits = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).logits
  (logits * torch.from_numpy(weights)).sum().backward()

  def score(variables):
    logits = module.apply(variables, images, False)
    return (logits * weights).sum(), logits

  gradients, got = jax.jit(jax.grad(score, has_aux=True))(variables)
  want = logits.detach().numpy()
  # Logits of order one, of float32 sums in another order.
  assert 0.1 < want.std() < 20 and want.std(0).max() > 0.01
  assert np.abs(got - want).max() <= 1e-4
  arrays = {k: v.grad.numpy() for k, v in network.named_parameters()}
  _, want = _ours(arrays, version)
  stepping.assert_close(gradients, want, 1e-4)


@pytest.mark.slow
def test_logits_equal_timms(tmp_path, monkeypatch):
  """Files with its names are read; their 1x1 kernels may be dense layers."""
  names = ('convnext_tiny', 'convnextv2_atto')
  size = {'depths': STAGES, 'dims': [WIDTH * 2**i for i in range(4)]}
  arguments = {n: {'model_name': n, 'num_classes': CLASSES, **size} for n in names}
  for version, name in enumerate(names, 1):
    monkeypatch.setitem(convnext.SIZES, name, (version, STAGES, WIDTH))
  for name, peer in timm_peer.compute(tmp_path, arguments).items():
    config = builders.config({'model.name': name})
    module = models.create(config, CLASSES, 'cpu')
    variables = weight_files.variables(peer.path, config, references.shapes(module))
    got = jax.jit(lambda v, x, m=module: m.apply(v, x, False))(variables, peer.images)
    assert peer.logits.std() > 0.01
    # float32, summed in another order: relative to the largest logit.
    scale = max(1, np.abs(peer.logits).max())
    assert np.abs(got - peer.logits).max() <= 1e-4 * scale, name


def test_response_norm_of_a_channel_that_is_zero():
  """The gradient of its norm, a root, is taken for 0 as PyTorch does."""
  x = np.zeros((2, 3, 3, 4), np.float32)
  x[..., 0] = 1
  params = {'scale': np.full(4, 2.0), 'bias': np.zeros(4)}

  def total(x):
    return convnext.ResponseNorm().apply({'params': params}, x).sum()

  # Norms are 3, 0, 0, 0, their mean 3/4: 9 pixels of 1 + 2 * 4, of 2 images.
  value, gradient = jax.jit(jax.value_and_grad(total))(x)
  assert value == pytest.approx(2 * 9 * (1 + 2 * 4), rel=1e-5)
  assert np.isfinite(gradient).all()


def test_the_branch_of_a_block_that_is_left_out():
  """An example whose factor is 0 keeps its map; 2 counts the branch twice."""
  conv = functools.partial(convnext.layers.Conv, use_bias=True)
  block = convnext.Block(1, conv, convnext.nn.LayerNorm)
  x = np.random.default_rng(0).normal(size=(2, 2, 2, 4)).astype(np.float32)
  shapes = jax.eval_shape(block.init, jax.random.key(0), x, None)
  variables = references.random_variables(shapes)
  apply = jax.jit(lambda factor: block.apply(variables, x, factor))
  references.assert_branch_is_scaled(apply, x)


def test_images_that_its_strides_leave_nothing_of_are_refused():
  module = models.create(builders.config({'model.name': 'convnextv2_atto'}), 3, 'cpu')

  def logits(height, width):
    images = np.zeros((1, height, width, 3))
    return jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), images, False)[0])

  assert logits(32, 32).shape == (1, 3)
  for height, width in ((31, 64), (64, 31)):
    builders.assert_refused('data.image_size=31: expected 32 or more', logits, height, width)
