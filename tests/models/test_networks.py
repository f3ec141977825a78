"""Every family's networks: their sizes, and what a file of weights tells of them."""

import re

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import models
from anp_jax.checkpoint.weights import families, naming
from anp_jax.config import networks
from anp_jax.models import convnets, convnext, efficientnet, resnet
from anp_jax.system import flops, onednn
from tests import builders, launching, onednn_here

# torchvision's and timm's with 1,000 classes; millions as timm's
# results-imagenet.csv has them.
PARAMETERS = {
  'resnet18': 11_689_512,
  'resnet34': 21_797_672,
  'resnet50': 25_557_032,
  'resnet101': 44_549_160,
  'resnet152': 60_192_808,
  'resnet18d': 11_708_744,
  'resnext50_32x4d': 25_028_904,
  'wide_resnet50_2': 68_883_240,
  'seresnet50': 28_088_024,
  'seresnext101_32x8d': 93_569_048,
  'convnext_tiny': 28.59,
  'convnext_small': 50.22,
  'convnext_base': 88.59,
  'convnextv2_atto': 3.71,
  'convnextv2_femto': 5.23,
  'convnextv2_pico': 9.07,
  'convnextv2_nano': 15.62,
  'convnextv2_tiny': 28.64,
  'convnextv2_base': 88.72,
  # The papers have 5.3, 7.8, 9.2, 12, 19 and 22 million.
  'efficientnet_b0': 5_288_548,
  'efficientnet_b1': 7_794_184,
  'efficientnet_b2': 9_109_994,
  'efficientnet_b3': 12_233_232,
  'efficientnet_b4': 19_341_616,
  'efficientnetv2_s': 21_458_488,
  'tf_efficientnet_b0': 5_288_548,
  'tf_efficientnet_lite0': 4_652_008,
  'tf_efficientnet_lite1': 5.42,
  'tf_efficientnet_lite2': 6.09,
}
# With 10 classes. Of the residual ones shortcuts have no parameters: those that
# implementations in PyTorch with option A report (Idelbayev 2018,
# github.com/akamaster/pytorch_resnet_cifar10).
SMALL = {
  'resnet20': ((32, 32, 3), 269_722),
  'resnet32': ((32, 32, 3), 464_154),
  'resnet56': ((32, 32, 3), 853_018),
  'lenet': ((28, 28, 1), 431_080),
  'cifar10_full': ((32, 32, 3), 89_578),
  # (75 + 1) 500 + (25 500 + 1) 1500 + (64 1500 + 1) 10.
  'two_convolutions': ((32, 32, 3), 19_749_510),
  # 3x3 kernels of 24 64 + 64 64 + 64 256 + 3 256 256; 2 (2 64 + 4 256) of norms; 24; 257 10.
  'airbench94': ((32, 32, 3), 1_972_514),
  # The paper's 60 million: those of bvlc_reference_caffenet, less 990 classes of 4,097.
  'caffenet': ((227, 227, 3), 60_965_224 - 990 * 4097),
}
# Network, width, pixels, millions of parameters and billions of operations.
_ROWS = re.findall(
  r'^\| `(\w+)`(?:, width (\d+))? \| (\d+) \| ([\d.]+) \| ([\d.]+) \|',
  (launching.ROOT / 'docs' / 'networks.md').read_text(),
  re.MULTILINE,
)
# Endings of the names of networks that are one of several of their kind.
_SLOW = ('_b1', '_b2', '_b3', '_b4', 'tf_efficientnet_b0', '101', '152', '32x8d', 'seresnet50')
_SLOW = (*_SLOW, '_lite1', '_lite2', '_small', '_base', 'v2_tiny', 'wide_resnet50_2')
_SLOW = (*_SLOW, 'resnet34', '_femto', '_pico', '_nano')


def test_the_config_offers_the_networks_that_there_are():
  assert set(networks.RESNETS) == set(resnet.NETWORKS)
  assert set(networks.CONVNEXTS) == set(convnext.SIZES)
  assert set(networks.EFFICIENTNETS) == set(efficientnet.NETWORKS)


def _shapes(config, shape, classes):
  module = models.create(config, classes, 'cpu')
  images = jax.ShapeDtypeStruct((1, *shape), 'float32')
  return jax.eval_shape(lambda x: module.init(jax.random.key(0), x, False), images)


def _count(variables):
  return sum(x.size for x in jax.tree.leaves(variables['params']))


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[pytest.mark.slow] * n.endswith(_SLOW)) for n in PARAMETERS]
)
def test_parameters_and_what_a_file_tells_of_them(name):
  width = {'model.width': 64} if name in networks.RESNETS else {}
  config = builders.config({'model.name': name, **width})
  variables = _shapes(config, (32, 32, 3), 1000)
  count, expected = _count(variables), PARAMETERS[name]
  assert (count if isinstance(expected, int) else round(count / 1e6, 2)) == expected
  # A file of timm's: its arrays' shapes, and the name of its config.json.
  family, kind = families.of_config(config), naming.TIMM
  flat = traverse_util.flatten_dict(variables, sep='/')
  shapes = {
    published: family.to_published(path, np.broadcast_to(0, flat[path].shape), kind).shape
    for path, published in family.published_names(flat, kind).items()
  }
  assert families.of_tensors('x', shapes) == (family, kind)
  keys = family.network('x', shapes, kind, {'architecture': name})
  assert keys['model.name'] == name and keys['model.head'] == 'joint'
  assert {key: keys[key] for key in width} == width


@onednn_here.needed  # its lowering has a network's own products alone
@pytest.mark.parametrize(
  'name, width, side, millions, billions',
  [pytest.param(*row, marks=[pytest.mark.slow] * row[0].endswith(_SLOW)) for row in _ROWS],
)
def test_sizes_of_the_page_of_networks(name, width, side, millions, billions):
  config = builders.config({'model.name': name, **({'model.width': int(width)} if width else {})})
  shape, classes = (int(side), int(side), 3), 10 if side == '32' else 1000
  variables = _shapes(config, shape, classes)
  digits = len(millions.partition('.')[2])
  assert f'{_count(variables) / 1e6:.{digits}f}' == millions
  module = models.create(config, classes, onednn.PLATFORM)
  images = jax.ShapeDtypeStruct((1, *shape), 'float32')
  operations = flops.count_call(lambda v, x: module.apply(v, x, False), variables, images)
  digits = len(billions.partition('.')[2])
  assert f'{operations / 1e9:.{digits}f}' == billions


@pytest.mark.parametrize('name', SMALL)
def test_parameters_of_small_networks(name):
  shape, count = SMALL[name]
  width = {'model.width': 16} if name in networks.RESNETS else {}
  kernels = {'model.kernels': (500, 1500)} if name == 'two_convolutions' else {}
  config = builders.config({'model.name': name, **width, **kernels})
  assert _count(_shapes(config, shape, 10)) == count


@pytest.mark.parametrize(
  'module',
  [
    convnets.LeNet(7, dtype='bfloat16'),
    convnets.Cifar10Full(7, dtype='bfloat16'),
    convnets.TwoConvolutions(7, dtype='bfloat16'),
    resnet.ResNet(7, (2, 2), False, 8, group=2, dtype='bfloat16'),
  ],
  ids=lambda module: type(module).__name__,
)
def test_bfloat16_computes_on_float32_parameters(module):
  images = jax.ShapeDtypeStruct((4, 16, 16, 3), jnp.bfloat16)
  variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, False), images)
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(variables))
  logits, state = jax.eval_shape(
    lambda v, x: module.apply(
      v, x, True, capture_intermediates=True, mutable=['batch_stats', 'intermediates']
    ),
    variables,
    images,
  )
  assert logits.dtype == jnp.float32
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.get('batch_stats', {})))
  for layer, leaf in state['intermediates'].items():
    if layer not in ('head', '__call__'):
      assert leaf['__call__'][0].dtype == jnp.bfloat16, layer
