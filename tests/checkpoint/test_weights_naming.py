"""Published weights: the same logits as PyTorch's, in both namings."""

import os

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming, weights_source as source_lib
from anp_jax.models import resnet

pytestmark = pytest.mark.usefixtures('quick_compiles')

WIDTH = 8
NAMINGS = ('torchvision', 'transformers')
# Compiling them takes long, not computing.
DEPTHS = [
  18,
  pytest.param(50, marks=pytest.mark.slow),
  *(pytest.param(n, marks=pytest.mark.soak) for n in (34, 101, 152)),
]


def _published(kind, depth, width=WIDTH, **settings):
  pytest.importorskip('torch')
  if kind == 'transformers':
    pytest.importorskip('transformers')
  from tests import published

  network = getattr(published, kind)(*resnet.DEPTHS[depth], width, **settings)
  return network, published


def _ours(depth, width=WIDTH, **fields):
  stages, bottleneck = resnet.DEPTHS[depth]
  return resnet.ResNet(10, stages, bottleneck, width=width, **fields)


def _names(model):
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), False))
  return {
    name: tuple(leaf.shape) for name, leaf in traverse_util.flatten_dict(shapes, sep='/').items()
  }


def _config(depth, width=WIDTH, version='v1.5'):
  config = config_lib.base()
  config.model.name, config.model.width = f'resnet{depth}', width
  config.model.version = version
  return config


def _save(folder, tensors):
  path = os.path.join(folder, 'x.safetensors')
  safetensors_numpy.save_file(tensors, path)
  return path


@pytest.mark.parametrize('depth', DEPTHS)
@pytest.mark.parametrize('kind', NAMINGS)
def test_logits_equal_pytorchs(kind, depth, tmp_path):
  network, published = _published(kind, depth)
  ours = _ours(depth)
  names = _names(ours)
  path = _save(tmp_path, published.tensors(network))
  source = source_lib.read(path, _config(depth), names)
  assert set(source.tensors) == set(names) and not source.unused
  variables = traverse_util.unflatten_dict(
    {name: value for name, (_, value) in source.tensors.items()}, sep='/'
  )
  images = published.images(3)
  want = network(published.pixels(images))
  want = getattr(want, 'logits', want).detach().numpy()
  got = jax.jit(lambda v, x: ours.apply(v, x, False))(variables, images)
  # Logits of up to 20, through up to 155 float32 convolutions that are summed
  # in another order: up to 1e-5 was seen.
  assert 0.1 < want.std() < 20 and want.std(0).max() > 0.01
  assert np.abs(np.asarray(got) - want).max() <= 1e-4


@pytest.mark.parametrize('kind', NAMINGS)
def test_every_name_has_a_published_one_with_its_shape(kind):
  for depth in (18, 50):
    network, published = _published(kind, depth)
    shapes = {
      name: value.shape
      for name, value in published.tensors(network).items()
      if not name.endswith('tracked')
    }
    detected = naming.detect(shapes)
    got = {
      naming.published_name(name, detected): naming.published_shape(name, shape)
      for name, shape in _names(_ours(depth)).items()
    }
    assert got == shapes


def test_axes_there_and_back():
  kernel = np.random.default_rng(0).normal(size=(3, 5, 2, 4))
  moved = naming.to_published('params/stem_conv/kernel', kernel)
  # Element by element: the published one is (out, in, height, width).
  for index in np.ndindex(kernel.shape):
    row, column, channel, feature = index
    assert moved[feature, channel, row, column] == kernel[index]
  assert (naming.from_published('params/stem_conv/kernel', moved) == kernel).all()


def test_names_of_other_networks_are_refused():
  for name in ('params/conv1/kernel', 'params/stem_conv/table', 'x'):
    with pytest.raises(ValueError, match='is not of a ResNet'):
      print(naming.published_name(name, naming.TORCHVISION))
