"""Published weights: the same logits as PyTorch's, in both namings."""

import functools
import os

from flax import traverse_util
import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax.checkpoint.weights import families, naming
from anp_jax.models import resnet
from tests import builders, layer_references as references, weight_files

WIDTH, STAGES = 8, (2, 1, 1, 1)
PEERS = {naming.TIMM: 'torchvision', naming.TRANSFORMERS: 'transformers'}


def _published(kind, stages, bottleneck, **settings):
  pytest.importorskip('torch')
  pytest.importorskip('transformers')
  from tests import published

  return getattr(published, PEERS[kind])(stages, bottleneck, WIDTH, **settings), published


def _shapes(module):
  return traverse_util.flatten_dict(references.shapes(module), sep='/')


def _read(folder, network, published, module, bottleneck):
  """The variables from a file of a network; every tensor must be used."""
  path = os.path.join(folder, 'x.safetensors')
  safetensors_numpy.save_file(published.tensors(network), path)
  name = 'resnet50' if bottleneck else 'resnet18'
  config = builders.config({'model.name': name, 'model.width': WIDTH})
  return weight_files.variables(path, config, references.shapes(module))


@pytest.mark.parametrize(
  'kind, bottleneck, version',
  [
    pytest.param(naming.TIMM, False, 'v1.5', marks=pytest.mark.slow),
    (naming.TRANSFORMERS, False, 'v1.5'),
    pytest.param(naming.TIMM, True, 'v1.5', marks=pytest.mark.slow),
    pytest.param(naming.TRANSFORMERS, True, 'v1', marks=pytest.mark.slow),
  ],
)
def test_evaluation_and_training_equal_pytorchs(kind, bottleneck, version, tmp_path):
  """Logits of both, and the running statistics that training leaves behind."""
  settings = {'downsample_in_bottleneck': True} if version == 'v1' else {}
  network, published = _published(kind, STAGES, bottleneck, **settings)
  # One group of the whole batch, and torch's momentum of 0.1 for the new.
  fields = dict(width=WIDTH, version=version, group=0, momentum=0.9)
  module = resnet.ResNet(10, STAGES, bottleneck, **fields)
  variables = _read(tmp_path, network, published, module, bottleneck)
  images = published.images(4)

  def compare(got, network):
    want = network(published.pixels(images))
    want = getattr(want, 'logits', want).detach().numpy()
    # Logits of order one, float32 sums in another order: 1e-5 was seen.
    assert 0.1 < want.std() < 20 and want.std(0).max() > 0.01
    assert np.abs(np.asarray(got) - want).max() <= 1e-4

  compare(_evaluated(module, variables, images), network)
  got, new = _trained(module, variables, images)
  compare(got, network.train())
  after = _read(tmp_path, network, published, module, bottleneck)
  olds, news, afters = (
    traverse_util.flatten_dict(tree['batch_stats'], sep='/') for tree in (variables, new, after)
  )
  for name, old in olds.items():
    got = news[name]
    if name.endswith('/var'):  # theirs are unbiased: n / (n - 1) of ours, n values a channel
      count = len(images) * _map_side(name, bottleneck and version == 'v1.5') ** 2
      got = 0.9 * old + (got - 0.9 * old) * count / (count - 1)
    np.testing.assert_allclose(got, afters[name], rtol=1e-3, atol=1e-4, err_msg=name)


@functools.partial(jax.jit, static_argnums=0)
def _evaluated(module, variables, images):
  return module.apply(variables, images, False)


@functools.partial(jax.jit, static_argnums=0)
def _trained(module, variables, images):
  return module.apply(variables, images, True, mutable=['batch_stats'])


def _map_side(name, strides_late):
  """Pixels a side of what a norm sees, of images of 64."""
  place, norm, *_ = name.split('/')
  if place == 'stem_norm':
    return 32
  stage, block = (int(part[5:]) for part in place.split('_'))
  side = 16 >> (stage - 1)
  # v1.5: the first 1x1 of a bottleneck that strides still sees the larger map.
  larger = strides_late and norm == 'norm1' and stage > 1 and block == 1
  return 2 * side if larger else side


@pytest.mark.parametrize('kind', PEERS)
@pytest.mark.parametrize('depth', [18, 50])
def test_every_name_has_a_published_one_with_its_shape(kind, depth):
  network, published = _published(kind, *resnet.DEPTHS[depth])
  tensors = published.tensors(network)
  assert families.of_tensors('x', tensors) == (families.RESNET, kind)
  shapes = _shapes(resnet.ResNet(10, *resnet.DEPTHS[depth], width=WIDTH))
  prefix = '' if kind == naming.TIMM else 'resnet.'
  got = {
    name: families.RESNET.to_published(path, np.broadcast_to(0, shapes[path].shape), kind).shape
    for path, name in families.RESNET.published_names(shapes, kind, prefix).items()
  }
  assert got == {n: v.shape for n, v in tensors.items() if not n.endswith(naming.UNUSED)}
  # Back: the blocks of each stage.
  assert families.RESNET.blocks(tensors, kind) == resnet.DEPTHS[depth][0]


def test_axes_there_and_back():
  kernel = np.random.default_rng(0).normal(size=(3, 5, 2, 4))
  path = 'params/stem_conv/kernel'
  moved = families.RESNET.to_published(path, kernel, naming.TIMM)
  # Element by element: the published one is (out, in, height, width).
  for row, column, channel, feature in np.ndindex(kernel.shape):
    assert moved[feature, channel, row, column] == kernel[row, column, channel, feature]
  assert (families.RESNET.from_published(path, moved, naming.TIMM) == kernel).all()
