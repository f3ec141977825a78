"""Which keys a config has, by the values of others."""

import pytest

from anp_jax import config as config_lib, models
from anp_jax.config import command_line, key_table, keys, networks, optimizers, strategy
from anp_jax.runtimes.model_ring import candidates
from tests import builders

_MODEL_RING = 'configs/model_ring_anp.py'

_TINY = 'configs/resnet_anp.py:tiny'


class Mine(strategy.Strategy):
  """A strategy of a user's."""

  def default_config(self):
    return {
      'twist': keys.integer(3, 'turns', above=0),
      'turn': keys.text('left', 'first', ('left', 'right')),
      'size': keys.integer(3, 'of right', only_if=('strategy.turn', ('right',))),
    }


_MINE = f'{__name__}:Mine'


def _strategy_keys(config):
  keys = {
    key.removeprefix('strategy.') for key in config_lib.flat(config) if key.startswith('strategy.')
  }
  return keys - {'name', 'reduce_dtype', 'bucket_megabytes'}


@pytest.mark.parametrize('name', strategy.BUILT_IN)
def test_a_config_has_the_keys_of_its_strategy_alone(name):
  config = config_lib.replaced(config_lib.base(), {'strategy.name': name})
  values = config_lib.flat(config)
  assert _strategy_keys(config) == {
    leaf for leaf, key in strategy.by_name(name).default_config().items() if key.applies(values)
  }


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_a_config_has_the_keys_of_its_optimizer_alone(name):
  config = builders.config({'optimizer.name': name})
  common = {'name', 'learning_rate', 'weight_decay', 'clip_norm', 'clip_value', 'multipliers'}
  assert set(config.optimizer) == common | set(optimizers.OPTIMIZERS[name].keys)


@pytest.mark.parametrize('name', key_table.SCHEDULES)
def test_a_config_has_the_keys_of_its_schedule_alone(name):
  config = builders.config({'schedule.name': name})
  assert set(config.schedule) == {'name', 'warmup', *key_table.SCHEDULES[name]}


def test_what_is_typed_drops_the_recipes_keys_that_no_longer_apply():
  config = command_line.load(_MODEL_RING, {'strategy.name': 'sync'})
  assert config.strategy.name == 'sync'
  assert _strategy_keys(config) == {'rows', 'simulate.workers'}
  config = command_line.load(_MODEL_RING, {'strategy.name': 'channel_split'})
  # Of the same name, but not of the same meaning.
  assert config.strategy.shares == () and 'models' not in config.strategy


@pytest.mark.parametrize(
  'typed, line',
  [
    ({'strategy.period': '4'}, 'strategy.period belongs to strategy.name=local_sgd, not sync'),
    (
      {'strategy.shares': '(1, 2)'},
      'strategy.shares belongs to strategy.name=channel_split, model_ring, not sync',
    ),
    (
      {'optimizer.b1': '0.5'},
      'optimizer.b1 belongs to optimizer.name=adam, adamw, lamb, lion, not nesterov',
    ),
    (
      {'optimizer.name': 'adam', 'optimizer.momentum': '0.5'},
      'optimizer.momentum belongs to optimizer.name=momentum, nesterov, rmsprop, lars, not adam',
    ),
    (
      {'data.synthetic_classes': '5'},
      'data.synthetic_classes belongs to data.source=synthetic, not anp_shapes',
    ),
    (
      {'data.balance': 'sample', 'data.balance_power': '0.5'},
      'data.balance_power belongs to data.balance=weights, not sample',
    ),
    (
      {'model.kernels': '(1, 2)'},
      'model.kernels belongs to model.name=two_convolutions, not resnet50',
    ),
    # The default is refused alike.
    (
      {'strategy.mode': 'async', 'strategy.servers': '1'},
      'strategy.mode belongs to strategy.name=parameter_server, not sync',
    ),
    # What a wrong value is of comes first.
    ({'optimizer.name': 'adan', 'optimizer.b1': '0.5'}, "optimizer.name='adan': expected one of"),
  ],
)
def test_a_key_that_is_typed_must_apply(typed, line):
  text = builders.refusal(command_line.load, 'configs/resnet_anp.py', typed)
  assert text.startswith(f'config.{line}')
  if 'belongs' in line:
    builders.assert_refused('belongs to', config_lib.replaced, config_lib.base(), typed)


def test_a_mistyped_key_is_known_whichever_strategy_it_is_of():
  line = builders.refusal(command_line.load, _TINY, {'strategy.perod': '4'})
  assert line == "unknown key config.strategy.perod; did you mean 'strategy.period'?"


def test_a_strategy_of_ones_own():
  config = command_line.load(
    'configs/resnet_anp.py', {'strategy.name': _MINE, 'strategy.twist': '5'}
  )
  assert (config.strategy.twist, config.strategy.turn) == (5, 'left')
  assert 'size' not in config.strategy
  assert config_lib.resolved(config, {'strategy.turn': 'right'}).strategy.size == 3
  saved = config_lib.flat(config)
  assert config_lib.from_flat(saved) == config
  other = config_lib.replaced(config, {'strategy.twist': 4})
  assert 'config.strategy.twist is 4' in config_lib.difference(saved, other)
  for typed, line in (
    ({'strategy.twist': '0'}, 'strategy.twist=0: expected a number above 0'),
    ({'strategy.turn': 'lift'}, "did you mean 'left'"),
    ({'strategy.size': '4'}, 'belongs to strategy.turn=right, not left'),
    ({'strategy.period': '3'}, 'belongs to strategy.name=local_sgd, not '),
  ):
    builders.assert_refused(line, config_lib.resolved, config, typed)


def test_a_copy_of_another_strategy_is_whole():
  config = command_line.load(_MODEL_RING, {})
  copy = config_lib.replaced(config, {'strategy.name': 'sync', 'seed': 3})
  assert copy.strategy.name == 'sync'
  assert _strategy_keys(copy) == {'rows', 'simulate.workers'}
  assert config.strategy.name == 'model_ring' and config.seed == 0
  copy = config_lib.replaced(copy, {'strategy.name': 'local_sgd'})
  assert copy.strategy.period == '8'


def test_a_ring_has_the_keys_of_all_its_models():
  typed = {
    'model.name': 'two_convolutions',
    'model.norm_group': '4',
    'strategy.models': "('seed=1', 'model.name=resnet18; optimizer.name=adam')",
  }
  config = command_line.load(f'{_MODEL_RING}:tiny', typed)
  assert config.model.norm_group == 4  # of the ResNet
  assert config.model.width == 4  # as the recipe says
  assert config.model.kernels and config.optimizer.b1 == 0.9
  plain, resnet = candidates.create(config, 1)
  assert 'norm_group' not in plain.config.model
  assert 'b1' not in plain.config.optimizer
  assert (resnet.config.model.norm_group, resnet.config.model.width) == (4, 4)
  assert 'kernels' not in resnet.config.model
  saved = config_lib.from_flat(config_lib.flat(config))
  assert [c.config for c in candidates.create(saved, 1)] == [plain.config, resnet.config]


def test_networks_of_the_registry_are_the_configs():
  assert set(networks.CONVNETS) == set(models._CONVNETS)
  for name in networks.MODELS:
    config = builders.config({'model.name': name})
    assert models.create(config, 3, 'cpu')
    assert models.has_batch_norm(config) == ('norm_group' in config.model)


def test_every_key_that_does_not_apply_is_refused_at_its_default():
  recipe = builders.config()
  applying = config_lib.flat(recipe)
  inapplicable = config_lib.known_keys().keys() - applying.keys()
  assert len(inapplicable) > 60
  for key in inapplicable:
    default = config_lib.known_keys()[key].default
    builders.assert_refused(f'{key} belongs to ', config_lib.resolved, recipe, {key: str(default)})


def test_of_many_keys_those_that_apply_are_taken():
  typed = {
    'strategy.period': '3',
    'strategy.in_flight': '2',
    'model.width': '8',
    'seed': '4',
    'strategy.nonsense': '1',
  }

  def taken(**choice):
    choice = {key.replace('__', '.'): value for key, value in choice.items()}
    return command_line.applying(_TINY, typed | choice).keys() - choice.keys()

  assert taken() == {'model.width', 'seed', 'strategy.nonsense'}
  assert taken(strategy__name='local_sgd') == taken() | {'strategy.period'}
  assert taken(strategy__name='parameter_server') == taken() | {'strategy.in_flight'}
  assert taken(model__name='lenet') == taken() - {'model.width'}
