"""What may differ when a run is resumed."""

import functools
import json

import jax
import pytest

from anp_jax import config as config_lib
from anp_jax.config import key_table, optimizers, strategy as strategy_lib
from anp_jax.training import optimizer
from tests import builders


def _saved(config):
  """Returns the flat config that a checkpoint keeps."""
  return json.loads(config_lib.to_json(config))


def test_difference_of_equals():
  config = config_lib.base()
  assert config_lib.difference(_saved(config), config) == ''
  again = config_lib.base()
  again.ema = 0  # an int that equals the float it stands for
  assert config_lib.difference(_saved(config), again) == ''


def test_difference_names_the_key_and_both_values():
  saved = _saved(config_lib.base())
  config = config_lib.base()
  config.data.crop_area = (0.5, 1.0)
  assert config_lib.difference(saved, config) == (
    'config.data.crop_area is [0.5, 1.0], but the run in this workdir was started with [0.35, 1.0]'
  )


def test_difference_sees_keys_of_another_version():
  config = config_lib.base()
  saved = _saved(config)
  saved['model.removed'] = 1
  assert 'config.model.removed' in config_lib.difference(saved, config)
  del saved['model.removed'], saved['seed']
  # The run began before there was such a key: with what is now its default.
  assert config_lib.difference(saved, config) == ''
  config.seed = 1
  assert 'config.seed' in config_lib.difference(saved, config)


# What a resume may change: where a run is, how long, how often it tells, and
# by whom it is computed. All else decides the weights, and a key that is new
# does until it is written down here. In the table's order; groups whole.
_MAY_CHANGE = tuple(
  """
  duration time_limit
  data.dir data.path data.lists data.pairs data.eval_split
  data.max_damaged data.prefetch data.threads
  mesh sharding eval checkpoint log compile_cache cluster profile
  emulate.step_seconds emulate.image_seconds emulate.spread emulate.slow
  emulate.pieces emulate.bandwidth
  strategy.rows
  """.split()
)
_OF_STRATEGIES = """
  servers dedicated mode parts backup_workers look_ahead in_flight
  bind tls_certificate tls_key shares split_layers plan offload_to
  models simulate.step_seconds simulate.image_seconds simulate.spread simulate.slow
  simulate.outage_chance simulate.outage_seconds simulate.pull_seconds simulate.push_seconds
""".split()
# Other keys choose what applies with them; see the tests below.
_CHOOSING = {'strategy.name'} | {
  d.only_if[0]
  for d in config_lib.known_keys().values()
  if d.only_if and d.only_if[0] != 'init.from'
}


def _may_change(key):
  group, _, leaf = key.partition('.')
  return (
    group in _MAY_CHANGE or key in _MAY_CHANGE or (group == 'strategy' and leaf in _OF_STRATEGIES)
  )


def _another(value):
  """Another value of the same type."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, (int, float)):
    return value + 1
  return value + ('another',) if isinstance(value, tuple) else f'{value}2'


@functools.cache
def _configs():
  """Valid configs; each key applies in one of them."""
  changes = (
    {},
    *({'strategy.name': name} for name in strategy_lib.BUILT_IN),
    *({'optimizer.name': name} for name in optimizers.OPTIMIZERS),
    {'optimizer.name': 'optax:lion'},
    *({'schedule.name': name} for name in key_table.SCHEDULES),
    {'model.name': 'two_convolutions'},
    {'model.name': 'convnext_tiny'},
    {'model.name': 'efficientnet_b0'},
    {'model.name': 'package.module:Net'},
    {'model.head': 'multitask'},
    {'model.head': 'bilinear'},
    {'data.source': 'features:x.npz'},
    {'data.source': 'folder'},
    {'data.source': 'synthetic'},
    {'data.augment': 'scale'},
    {'data.augment': 'strong_crop'},
    {'data.decode': 'bicubic'},
    {'init.from': 'weights.safetensors'},
    {'data.balance': 'weights'},
    {'emulate.enabled': True},
    {'ensemble.seeds': '0:2'},
    *(
      {'strategy.name': name, 'strategy.simulate.workers': 2}
      for name in ('parameter_server', 'local_sgd')
    ),
  )
  return [config_lib.replaced(config_lib.base(), c) for c in changes]


@pytest.mark.parametrize('key', config_lib.known_keys())
def test_a_resume_may_change_these_keys_and_no_other(key):
  if key in _CHOOSING:
    return
  before = next(c for c in _configs() if key in config_lib.flat(c))
  saved = _saved(before)
  value = _another(config_lib.flat(before)[key])
  config = config_lib.replaced(before, {key: value})
  now = _saved(config)[key]
  text = config_lib.difference(saved, config)
  assert (key in config_lib.resumable(before)) <= _may_change(key)
  refusal = f'config.{key} is {now!r}, but the run in this workdir was started with {saved[key]!r}'
  assert text == ('' if _may_change(key) else refusal)


def test_a_run_with_a_cache_that_is_gone_is_refused():
  """Its evaluation too, which takes the run's config."""
  config = config_lib.base()
  saved = _saved(config) | {'data.cache': 'encoded', 'data.cache_gigabytes': 4.0}
  refusal = "config.data.cache='encoded': expected one of none, mapped"
  builders.assert_refused(refusal, config_lib.resolved, config_lib.from_flat(saved))
  assert "started with 'encoded'" in config_lib.difference(saved, config)


def test_keys_that_may_change_are_listed_by_group():
  assert config_lib.resumable(config_lib.base()) == _MAY_CHANGE
  config = builders.config({'strategy.name': 'parameter_server'})
  assert 'strategy.servers' in config_lib.resumable(config)


def test_strategies_of_one_state_go_on_with_each_other():
  config = config_lib.base()
  saved = _saved(config)
  for name in ('parameter_server', 'channel_split'):
    other = config_lib.replaced(config, {'strategy.name': name})
    assert config_lib.difference(saved, other) == ''
    assert config_lib.difference(_saved(other), config) == ''
  other = config_lib.replaced(config, {'strategy.name': 'invariant'})
  assert 'strategy.name' in config_lib.difference(saved, other)


def test_a_simulated_run_goes_on_with_another_strategy():
  simulated = {
    'strategy.name': 'parameter_server',
    'strategy.simulate.workers': 4,
    'strategy.simulate.step_seconds': 2.0,
  }
  server = config_lib.replaced(config_lib.base(), simulated)
  assert config_lib.difference(_saved(server), config_lib.base()) == ''
  assert config_lib.difference(_saved(config_lib.base()), server) == ''
  # The clock of a strategy begins at step 0.
  sync = config_lib.replaced(server, {'strategy.name': 'sync'})
  other = config_lib.replaced(sync, {'strategy.simulate.workers': 8})
  assert 'simulate.workers is 8' in config_lib.difference(_saved(sync), other)


@pytest.mark.parametrize(
  'change',
  [
    {'optimizer.name': 'adam'},
    {'schedule.name': 'step'},
    {'model.name': 'lenet'},
    {'data.augment': 'none'},
  ],
)
def test_difference_names_what_was_chosen_not_what_follows(change):
  config = config_lib.base()
  (key,) = change
  other = config_lib.replaced(config, change)
  text = config_lib.difference(_saved(config), other)
  assert text.startswith(f'config.{key} is ')


def test_changes_of_the_keys_that_the_flag_names():
  before = builders.config({'schedule.name': 'step'})
  config = builders.config(
    {
      'optimizer.learning_rate': 0.01,
      'optimizer.weight_decay': 1e-4,
      'schedule.name': 'cosine',
      'schedule.end': 0.1,
    }
  )
  saved = _saved(before)
  assert config_lib.changes(saved, config) == {
    'optimizer.learning_rate': (0.05, 0.01),
    'optimizer.weight_decay': (5e-4, 1e-4),
    'schedule.name': ('step', 'cosine'),
    'schedule.every': ('30 epochs', None),
    'schedule.factor': (0.1, None),
    'schedule.end': (None, 0.1),
  }
  some = config_lib.changed(saved, config, 'schedule.name')
  assert some['schedule.end'] == 0.1 and 'schedule.every' not in some
  assert some['optimizer.learning_rate'] == 0.05
  assert 'learning_rate' in config_lib.difference(some, config)
  everything = 'schedule, optimizer.learning_rate,config.optimizer.weight_decay'
  changed = config_lib.changed(saved, config, everything)
  assert config_lib.difference(changed, config) == ''
  assert saved == _saved(before)


@pytest.mark.parametrize(
  'text, words',
  [
    ('optimizer.name', 'what a checkpoint holds of the optimizer'),
    ('optimizer.momentum', 'may not change'),
    ('model.name', 'may not change'),
    ('duration', 'may differ without it'),
    ('log.every', 'may differ without it'),
    ('optimizer.learning_rat', "did you mean 'optimizer.learning_rate'"),
    ('schedule,', "there is no key ''"),
    ('optimizer', "there is no key 'optimizer'"),
  ],
)
def test_a_flag_may_not_name_other_keys(text, words):
  config = config_lib.base()
  line = builders.refusal(config_lib.changed, _saved(config), config, text)
  assert words in line and f'--change={text}: ' in line


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
@pytest.mark.parametrize('key', ['weight_decay', 'clip_norm', 'clip_value'])
def test_an_effect_comes_or_goes_only_where_the_state_stays_the_same(name, key):
  """The structure is optax's."""
  configs = [
    builders.config({'optimizer.name': name, f'optimizer.{key}': value})
    for value in (0.0, 0.1, 0.2)
  ]
  without, some, more = (
    jax.tree.structure(optimizer.create(c, 4, 16, 9).init({'w': jax.numpy.ones((2, 2))}))
    for c in configs
  )
  flag = f'optimizer.{key}'
  assert some == more
  config_lib.changed(_saved(configs[1]), configs[2], flag)
  for before, after in ((0, 1), (1, 0)):
    saved = _saved(configs[before])
    if without == some:
      assert (
        config_lib.changed(saved, configs[after], flag)[flag]
        == (config_lib.flat(configs[after])[flag])
      )
      continue
    builders.assert_refused(
      'another structure at 0', config_lib.changed, saved, configs[after], flag
    )
