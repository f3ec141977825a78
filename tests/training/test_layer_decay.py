"""Layer-wise decay of the learning rate against its closed form."""

import jax
import numpy as np
import pytest

from anp_jax import config as config_lib, models
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.training import multipliers, optimizer
from tests import builders, launching, programs


def _config(name='convnextv2_atto', **keys):
  keys = {k.replace('__', '.'): v for k, v in keys.items()}
  return builders.config(
    {
      'model.name': name,
      'init.from': 'weights.safetensors',
      'optimizer.layer_decay': 0.5,
      'optimizer.name': 'sgd',
      'optimizer.weight_decay': 0.0,
      'optimizer.learning_rate': 0.1,
      **launching.CONSTANT,
      **keys,
    }
  )


def _abstract_params(config):
  network = models.create(config, 5, 'cpu')
  images = jax.ShapeDtypeStruct((1, 64, 64, 3), np.float32)
  key = jax.random.key(0)
  return jax.eval_shape(lambda x: network.init(key, x, False), images)['params']


def _numbers(name):
  """The layer of each module, which all parameters of it share."""
  params = _abstract_params(_config(name))
  names = list(mesh_lib.leaves_by_name(params))
  numbers = {}
  for path, number in multipliers.layer_numbers(names).items():
    assert numbers.setdefault(path.split('/')[0], number) == number
  return numbers


def _blocks(*stages):
  """The blocks of all stages, numbered from 1."""
  names = [f'stage{i}_block{j}' for i, count in enumerate(stages, 1) for j in range(1, count + 1)]
  return {name: i for i, name in enumerate(names, 1)}


def test_layers_of_a_resnet():
  assert _numbers('resnet34d') == {
    **{f'stem_{kind}{i}': 0 for kind in ('conv', 'norm') for i in (1, 2, 3)},
    **_blocks(3, 4, 6, 3),
    'head': 17,
  }


def test_layers_of_a_convnext():
  # Downsampling belongs to the first block of its stage, as in timm.
  downsampling = {2: 3, 3: 5, 4: 11}
  assert _numbers('convnextv2_atto') == {
    'stem_conv': 0,
    'stem_norm': 0,
    **_blocks(2, 2, 6, 2),
    **{f'stage{i}_{kind}': n for i, n in downsampling.items() for kind in ('norm', 'conv')},
    'head_norm': 13,
    'head': 13,
  }


def test_the_stem_of_airbench_has_another_name():
  numbers = _numbers('airbench94')
  assert numbers['whitened_bias'] == 0 and numbers['head'] == 4
  assert {numbers[f'stage{i}_conv1'] for i in (1, 2, 3)} == {1, 2, 3}


def test_stages_and_blocks_are_in_the_order_of_their_numbers():
  names = ['head_conv/kernel', 'head/bias', 'stem_conv/kernel'] + [
    f'stage{i}_block{j}/x' for i in (2, 10, 1) for j in (11, 2)
  ]
  assert multipliers.layer_numbers(names) == {
    'stem_conv/kernel': 0,
    'stage1_block2/x': 1,
    'stage1_block11/x': 2,
    'stage2_block2/x': 3,
    'stage2_block11/x': 4,
    'stage10_block2/x': 5,
    'stage10_block11/x': 6,
    'head_conv/kernel': 7,
    'head/bias': 7,
  }


_TREE = {
  name: {'kernel': np.full((2, 2), 1.5, np.float32)}
  for name in 'stem_conv stage1_block1 stage2_conv stage2_block1 stage2_block2 head'.split()
}


@pytest.mark.parametrize(
  'rules, factors',
  [
    ((), (1 / 16, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1)),
    ((('head', 10.0), ('stage2_block', 2.0), ('stem', 0)), (0, 1 / 8, 1 / 4, 1 / 2, 1, 10)),
  ],
)
def test_an_update_is_scaled(rules, factors):
  """Plain SGD: rate x 1/2 a layer x the user's factor x gradient."""
  config = _config(optimizer__multipliers=rules)
  assert multipliers.rate_factors(config, _TREE) == {
    f'{name}/kernel': factor for name, factor in zip(_TREE, factors)
  }
  chain = optimizer.create(config, 8, 640, 100)
  gradients = jax.tree.map(lambda x: 0 * x + 3, _TREE)
  updates, _ = chain.update(gradients, chain.init(_TREE), _TREE)
  for name, factor in zip(_TREE, factors):
    # Powers of two: one rounding of float32.
    np.testing.assert_allclose(updates[name]['kernel'], -0.1 * 3 * factor, 1e-6, err_msg=name)


def test_a_network_without_stages_is_refused():
  line = builders.refusal(programs.build, _config('lenet'), 1)
  assert line == (
    'config.optimizer.layer_decay=0.5: expected 1, or a network whose modules '
    'are stage1_block1 and so on; those of lenet are conv1, conv2, head, hidden'
  )
  for name, decay in (('lenet', 1.0), ('resnet18', 0.5)):
    config = _config(name, optimizer__layer_decay=decay)
    multipliers.check_layers(config, _abstract_params(config))


def test_it_belongs_to_a_run_that_begins_with_weights():
  plain = config_lib.flat(builders.config({'optimizer.layer_decay': 0.5}))
  assert 'optimizer.layer_decay' not in plain
  line = builders.refusal(config_lib.resolved, config_lib.base(), {'optimizer.layer_decay': '0.5'})
  assert line == ("config.optimizer.layer_decay belongs to init.from=a value, not ''")
  for value in (0.0, 1.5):
    builders.assert_refused('above 0, at most 1', _config, optimizer__layer_decay=value)
