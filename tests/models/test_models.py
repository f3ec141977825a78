"""Networks against closed forms; test_weights_naming.py has their logits."""

import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import models
from anp_jax.models import resnet
from tests import builders, layer_references as references

CLASSES = 10
WIDTH = 8


def _net(depth, **fields):
  stages, bottleneck = resnet.DEPTHS[depth]
  return resnet.ResNet(CLASSES, stages, bottleneck, **{'width': WIDTH, **fields})


def _count(tree):
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize('depth, zero_init', [(18, True), (50, True), (18, False)])
def test_zero_init_zeroes_the_last_scale_only(depth, zero_init):
  module = _net(depth, zero_init=zero_init)
  last = 'norm3' if depth == 50 else 'norm2'

  def scales(key):
    params = module.init(key, jnp.zeros((1, 32, 32, 3)), False)['params']
    # Only these: XLA drops the random kernels, which take long to compile.
    return {
      (block, norm): leaves['scale']
      for block, modules in params.items()
      if 'block' in block
      for norm, leaves in modules.items()
      if 'norm' in norm
    }

  scale_means = jax.jit(scales)(jax.random.key(0))
  assert any(norm == last for _, norm in scale_means)
  for (block, norm), scale in scale_means.items():
    want = 0.0 if zero_init and norm == last else 1.0
    np.testing.assert_array_equal(scale, want, err_msg=f'{block}/{norm}')


@pytest.mark.parametrize('depth', [34, 101])
def test_create_hands_every_choice_down(config, depth):
  config.model.name = f'resnet{depth}'
  config.model.width = 24
  config.model.version = 'v1'
  config.model.zero_init = False
  config.model.norm_group = 4
  config.model.norm_momentum = 0.8
  config.model.dtype = 'bfloat16'
  module = models.create(config, 7, 'gpu', 'data')
  want = resnet.ResNet(
    num_classes=7,
    stages=resnet.DEPTHS[depth][0],
    bottleneck=depth >= 50,
    width=24,
    version='v1',
    zero_init=False,
    group=4,
    momentum=0.8,
    axis_name='data',
    dtype='bfloat16',
    param_dtype='float32',
    platform='gpu',
  )
  assert module == want


def test_a_module_of_the_users_own_is_made_with_the_fields_it_has(config):
  config.model.name = 'tests.user_network:SmallNet'
  config.model.dtype = 'bfloat16'
  module = models.create(config, 7, 'cpu', 'data')
  # It has no field `platform` and `drop` is its own.
  assert (module.num_classes, module.dtype, module.axis_name, module.drop) == (
    7,
    'bfloat16',
    'data',
    0.5,
  )
  variables = references.shapes(module)
  # 3*3*3*6 + 6, 2*6, 3*3*6*8 + 8, 8*7 + 7.
  assert _count(variables['params']) == 168 + 12 + 440 + 63
  logits = module.apply(references.random_variables(variables), jnp.ones((2, 32, 32, 3)), False)
  assert logits.shape == (2, 7)


@pytest.mark.parametrize(
  'name, message',
  [
    ('tests.no_such_module:Net', "No module named 'tests.no_such_module'"),
    ('tests.user_network:SmalNet', "no 'SmalNet'.*did you mean 'SmallNet'"),
    ('tests.models.test_models:WithoutClasses', "expected a class with an argument 'num_classes'"),
    ('os:_exit', 'inherits from flax.*Module'),
    ('tests.user_network:', 'expected package.module:Class'),
  ],
)
def test_what_cannot_be_made_is_said_in_one_line(config, name, message):
  config.model.name = name
  text = builders.assert_refused([f'config.model.name={name!r}'], models.create, config, 5, 'cpu')
  assert re.search(message, text)


class WithoutClasses(nn.Module):
  """What a user may point at by mistake."""

  features: int
