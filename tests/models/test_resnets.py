"""Residual networks that transformers does not have, against PyTorch."""

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax import models
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import families, naming, weights_source as source_lib
from anp_jax.data import vocabulary as vocabulary_lib
from tests import builders, layer_references as references, timm_peer, weight_files

_TABLE = families.RESNET.namings[naming.TIMM]


def _network(name, width, classes=10):
  keys = {'model.name': name, 'model.width': width}
  return models.create(builders.config(keys), classes, 'cpu')


def _named(path):
  return '/'.join(key.key for key in path)


def _cifar_peer(torch, blocks, width):
  """Section 4.2 as users of PyTorch write it, with torchvision's names."""
  nn, F = torch.nn, torch.nn.functional

  class Block(nn.Module):
    def __init__(self, channels, features, stride):
      super().__init__()
      self.conv1 = nn.Conv2d(channels, features, 3, stride, 1, bias=False)
      self.bn1 = nn.BatchNorm2d(features)
      self.conv2 = nn.Conv2d(features, features, 3, 1, 1, bias=False)
      self.bn2 = nn.BatchNorm2d(features)
      self.stride, self.around = stride, (features - channels) // 2

    def forward(self, x):
      y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
      if self.stride > 1:
        x = x[:, :, ::2, ::2]
        x = F.pad(x, (0, 0, 0, 0, self.around, self.around))
      return (y + x).relu()

  class Network(nn.Module):
    def __init__(self):
      super().__init__()
      self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
      self.bn1 = nn.BatchNorm2d(width)
      channels = width
      for i in range(3):
        stage = []
        for j in range(blocks):
          stage.append(Block(channels, width << i, 2 if i and not j else 1))
          channels = width << i
        setattr(self, f'layer{i + 1}', nn.Sequential(*stage))
      self.fc = nn.Linear(channels, 10)

    def forward(self, x):
      x = self.bn1(self.conv1(x)).relu()
      x = self.layer3(self.layer2(self.layer1(x)))
      return self.fc(x.mean((2, 3)))

  return Network()


# One block a stage, and, slower to compile, the three of ResNet-20.
@pytest.mark.parametrize('blocks', [1, pytest.param(3, marks=pytest.mark.slow)])
def test_networks_for_cifar_equal_pytorch(blocks):
  torch = pytest.importorskip('torch')
  from tests import published

  peer = published.randomised(_cifar_peer(torch, blocks, 4))
  tensors = published.tensors(peer)
  module = _network('resnet20', 4).copy(stages=(blocks,) * 3)
  variables = jax.tree_util.tree_map_with_path(
    lambda path, _: families.RESNET.from_published(
      _named(path), tensors[_TABLE.published(_named(path))], naming.TIMM
    ),
    references.shapes(module),
  )
  images = published.images(4, side=32)
  with torch.no_grad():
    want = peer(published.pixels(images)).numpy()
  got = jax.jit(lambda v, x: module.apply(v, x, False))(variables, images)
  # Logits of order one, float32 sums in another order.
  assert 0.1 < want.std() < 10
  np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
  'names',
  [
    pytest.param(('seresnext50_32x4d', 'resnet50d'), marks=pytest.mark.slow),
    pytest.param(('wide_resnet50_2', 'resnet18d'), marks=pytest.mark.soak),
  ],
)
def test_variants_equal_timm_and_go_back(tmp_path, names):
  """One block a stage; maps of odd sides, which pools cut."""
  blocks = (1, 1, 1, 1)
  arguments = {name: dict(model_name=name, num_classes=10, layers=blocks) for name in names}
  peers = timm_peer.compute(tmp_path, arguments, side=70)
  for name, peer in peers.items():
    module = _network(name, 64).copy(stages=blocks)
    config = builders.config({'model.name': name})
    variables = weight_files.variables(peer.path, config, references.shapes(module, 70))
    got = jax.jit(lambda v, x, m=module: m.apply(v, x, False))(variables, peer.images)
    # Logits of order one to ten, float32 sums in another order.
    assert 0.1 < peer.logits.std() < 30
    np.testing.assert_allclose(got, peer.logits, atol=1e-4)
    # Back: the same tensors, by the same names, in the same order of axes.
    vocabulary = vocabulary_lib.Vocabulary(tuple(f'c{i}' for i in range(10)))
    params = variables.pop('params')
    network = trained_lib.Trained('', config, vocabulary, 0, params, variables)
    back = families.tensors(network, naming.TIMM)
    assert set(back) == set(peer.tensors)
    for tensor, value in back.items():
      np.testing.assert_array_equal(value, peer.tensors[tensor])


def test_transformers_names_are_refused_where_it_has_no_such_network(tmp_path):
  path = str(tmp_path / 'model.safetensors')
  layers = ('embedder.embedder', 'encoder.stages.0.layers.0.layer.0')
  kinds = ('convolution', 'normalization')
  tensors = {f'resnet.{a}.{b}.weight': np.zeros(1) for a in layers for b in kinds}
  safetensors_numpy.save_file(tensors, path)
  config = builders.config({'model.name': 'seresnet50'})
  names = ['params/stage1_block1/se_fc1/kernel']
  builders.assert_refused('has no seresnet50', source_lib.read, path, config, names)


@pytest.mark.parametrize('name, width, least', [('resnext50_32x4d', 8, 16), ('resnet18d', 1, 2)])
def test_a_width_without_a_channel_a_group_is_refused(name, width, least):
  builders.assert_refused(f'width={width}: .* at least {least} ', _network, name, width)
