"""Old names of keys, values and recipes, through every door."""

import json
import os
import pathlib

import pytest

from anp_jax import config as config_lib
from anp_jax.config import aliases
from anp_jax.config import command_line
from anp_jax.config import table
from tests import builders

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TINY = f'{_ROOT}/configs/resnet_anp.py:tiny'
# For each old key: what it has a meaning with, and a value of it.
_OLD = {
  'optimizer.beta1': ({'optimizer.name': 'adam'}, 0.5),
  'optimizer.beta2': ({'optimizer.name': 'lamb'}, 0.5),
  'optimizer.epsilon': ({'optimizer.name': 'rmsprop'}, 1.0),
  'strategy.lanes': ({'strategy.name': 'server'}, 2),
  'strategy.ticket_timeout': ({'strategy.name': 'server'}, 3.0),
  'strategy.at_once': (
    {'strategy.name': 'relay', 'strategy.models': ('seed=1', 'seed=2')}, 1,
  ),
  'strategy.helpers': ({'strategy.name': 'channel_split'}, ('cpu:1',)),
  'strategy.weight_prediction': ({'strategy.name': 'server'}, 0.5),
}  # fmt: skip


def _is_set(config, key, value):
  if key == 'strategy.weight_prediction':
    value = 'smega2'
  return config_lib.flat(config)[aliases.KEYS[key]] == value


def test_every_old_name_is_tested():
  assert _OLD.keys() == aliases.KEYS.keys()


def test_names_of_now_are_names():
  assert set(aliases.KEYS.values()) <= config_lib.known_keys().keys()
  assert not aliases.KEYS.keys() & config_lib.known_keys().keys()
  for key, names in aliases.VALUES.items():
    for old, new in names.items():
      table.KEYS[key].validate(key, new)
      with pytest.raises(config_lib.ConfigError):
        table.KEYS[key].validate(key, old)
  for old, new in aliases.RECIPES.items():
    assert not (_ROOT / 'configs' / old).exists()
    assert (_ROOT / 'configs' / new).exists()


@pytest.mark.parametrize('key', _OLD)
def test_an_old_key_that_is_typed(key):
  context, value = _OLD[key]
  typed = {k: str(v) for k, v in {**context, key: value}.items()}
  assert _is_set(command_line.load(_TINY, typed), key, value)


@pytest.mark.parametrize('key', _OLD)
def test_an_old_key_in_a_recipe(key):
  context, value = _OLD[key]
  recipe = config_lib.base()
  recipe.update_from_flattened_dict({**context, key: value})
  assert _is_set(config_lib.resolved(recipe), key, value)
  # Of a recipe that began with a config that has the key.
  recipe = builders.config(context)
  recipe.update_from_flattened_dict({key: value})
  assert _is_set(config_lib.resolved(recipe), key, value)


@pytest.mark.parametrize('key', _OLD)
def test_an_old_key_in_the_config_of_a_run(key):
  """Which has the keys of all strategies, as all runs had."""
  context, value = _OLD[key]
  saved = config_lib.flat(builders.config(context))
  del saved[aliases.KEYS[key]]
  saved |= {'strategy.period': 8, 'data.scale_range': (256, 512), key: value}
  saved = json.loads(json.dumps(saved))
  config = config_lib.from_flat(saved)
  assert _is_set(config, key, value)
  # It is resumed, by either name, and with no other value unless it may be.
  assert config_lib.difference(saved, config) == ''
  new = aliases.KEYS[key]
  default = config_lib.known_keys(config.strategy.name)[new].default
  text = config_lib.difference(
    saved, config_lib.replaced(config, {key: default})
  )
  expected = new in config_lib.resumable(config)
  assert (text == '') == expected and (expected or f'config.{new} is' in text)


@pytest.mark.parametrize('value', [0, 0.0, '0', '0.0'])
def test_no_prediction_is_no_look_ahead(value):
  key = 'strategy.weight_prediction'
  assert aliases.renamed({key: value}) == {'strategy.look_ahead': 'none'}


@pytest.mark.parametrize('key, value', [
  ('optimizer.name', 'adam'), ('strategy.mode', 'synchronous'),
  ('strategy.compensation', 'staleness'),
])  # fmt: skip
def test_a_saved_run_that_look_ahead_cannot_have_is_read(key, value):
  """Prediction was there with all of them."""
  keys = {'strategy.name': 'server', key: value}
  saved = json.loads(config_lib.to_json(builders.config(keys)))
  del saved['strategy.look_ahead']
  old = saved | {'strategy.weight_prediction': 1.0}
  config = config_lib.resolved(config_lib.from_flat(old))
  assert config.strategy.look_ahead == 'none'


def test_an_old_value_that_is_none_is_refused():
  keys = {'strategy.name': 'server', 'strategy.weight_prediction': 'much'}
  with pytest.raises(config_lib.ConfigError, match="look_ahead='much'"):
    command_line.load(_TINY, keys)


def test_an_old_strategy_name():
  typed = command_line.load(_TINY, {'strategy.name': 'kernel_split'})
  recipe = config_lib.base()
  recipe.strategy.name = 'kernel_split'
  saved = json.loads(config_lib.to_json(typed)) | {
    'strategy.name': 'kernel_split'
  }
  for config in (
    typed, config_lib.resolved(recipe), config_lib.from_flat(saved),
    config_lib.replaced(typed, {'strategy.name': 'kernel_split'}),
  ):  # fmt: skip
    assert config.strategy.name == 'channel_split'
  assert config_lib.difference(saved, typed) == ''


@pytest.mark.parametrize('variant', ['', ':150x800'])
def test_an_old_recipe(variant, monkeypatch):
  new = command_line.load(
    f'{_ROOT}/configs/channel_split_cifar10.py{variant}', {}
  )
  old = f'configs/kernel_split_cifar10.py{variant}'
  for path in (f'{_ROOT}/{old}', old, os.path.basename(old)):
    folder = _ROOT if os.sep in path else _ROOT / 'configs'
    monkeypatch.chdir(folder)
    assert command_line.load(path, {}) == new


def test_a_recipe_of_ones_own_by_an_old_name_is_read(tmp_path):
  path = tmp_path / 'kernel_split_cifar10.py'
  path.write_text(
    'from anp_jax import config as config_lib\n'
    'def get_config(variant=""):\n'
    '  c = config_lib.base()\n'
    '  c.seed = 7\n'
    '  return c\n'
  )
  assert command_line.load(str(path), {}).seed == 7
