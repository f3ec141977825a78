"""Learning-rate multipliers against closed forms; what is frozen stays."""

import jax
import numpy as np
import optax
import pytest

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.models import layers
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.training import build, multipliers, optimizer
from tests import builders, programs

_CLASSES, _BATCH, _SIDE = 5, 16, 8
_FLAX = 'tests.user_network:WithoutDropout'
_OURS = 'tests.user_network:WithOurLayers'


def _config(rules, **keys):
  config = command_line.load('configs/resnet_anp.py:tiny', {})
  settings = {
    'model__name': _FLAX,
    'data__image_size': _SIDE,
    'data__resize': _SIDE,
    'schedule__warmup': '0 steps',
    'schedule__name': 'constant',
    'model__norm_group': 2,
    'optimizer__multipliers': rules,
  }
  changes = {k.replace('__', '.'): v for k, v in {**settings, **keys}.items()}
  config = config_lib.resolved(config_lib.replaced(config, changes))
  return builders.editable(config)


def _parts(config, devices=1):
  return programs.build(config, devices, tuple('abcde'))


def _begun(parts):
  """A state with statistics that are not those of a new network."""
  state = parts.new_state()

  def changed(tree, template):
    random = np.random.default_rng(0)
    return jax.tree.map(
      lambda x, s: jax.device_put(
        random.uniform(0.5, 1.5, x.shape[-1:]).astype(x.dtype) * np.ones(x.shape, x.dtype),
        s.sharding,
      ),
      tree,
      template,
    )

  template = parts.abstract_state
  state = state.replace(stats=changed(state.stats, template.stats))
  if state.average:
    average = changed(state.average['stats'], template.average['stats'])
    state = state.replace(average={**state.average, 'stats': average})
  return state


def _steps(parts, state, count):
  """The state's leaves by path, on the host, after some steps."""
  for step in range(count):
    batch = programs.batch(step, parts.spec.batch_size, _SIDE, _CLASSES)
    state, values = parts.train_step(state, programs.put(batch, parts.spec.mesh))
  return _leaves(state), np.asarray(values)


def _leaves(state):
  return mesh_lib.leaves_by_name(jax.tree.map(np.array, jax.device_get(state)))


def _trained(config, devices=1, count=3):
  """Leaves at the start and after some steps, and the last step's values."""
  parts = _parts(config, devices)
  state = _begun(parts)
  return _leaves(state), *_steps(parts, state, count)


def _same(old, new, name):
  return old[name].tobytes() == new[name].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
  'model, keys',
  [
    (_FLAX, {'strategy__name': 'sync'}),
    (_OURS, {'strategy__name': 'invariant', 'strategy__threads': 8}),
    (_OURS, {'strategy__name': 'local_sgd', 'strategy__period': 2}),
    (_FLAX, {'sharding': (('.*', 'fsdp'),), 'accumulate': 2}),
    (
      _OURS,
      {
        'strategy__name': 'channel_split',
        'strategy__shares': (1, 2),
        'mesh__data': 1,
        'mesh__model': 2,
      },
    ),
  ],
)
def test_what_is_frozen_stays_to_the_bit(model, keys):
  rules = (('conv1|norm', 0), ('head', 0.5))
  config = _config(
    rules,
    model__name=model,
    ema=0.5,
    optimizer__name='adamw',
    optimizer__weight_decay=0.1,
    optimizer__clip_norm=1.0,
    **keys,
  )
  old, new, _ = _trained(config, devices=2)
  calls = {True: 0, False: 0}
  for name in old:
    if name.startswith(('params', 'average', 'stats')):
      frozen = 'conv1' in name or 'norm' in name
      assert _same(old, new, name) == frozen, name
      calls[frozen] += 1
  # A kernel, a scale and its bias, two statistics; with their averages.
  assert calls[True] >= 10 and calls[False] >= 8


def test_sums_of_three_parts_do_not_round_what_is_frozen():
  # (x + x + x) / 3 is not x for every x.
  config = _config((('norm', 0),), accumulate=3, model__norm_group=1)
  config.batch_size = 15
  old, new, _ = _trained(config, count=1)
  for name in ('mean', 'var'):
    assert _same(old, new, f'stats/batch_stats/norm/{name}')


@pytest.mark.slow
@pytest.mark.parametrize('model', [_FLAX, _OURS])
def test_a_frozen_norm_uses_its_running_statistics(model):
  """The loss of the step is that of the network as evaluation applies it."""
  config = _config((('conv1|norm', 0),), model__name=model)
  parts = _parts(config)
  state = _begun(parts)
  variables = jax.device_get({'params': state.params, **state.stats})
  batch = programs.batch(0, _BATCH, _SIDE, _CLASSES)
  mean, std = np.array(config.data.mean), np.array(config.data.std)
  pixels = ((batch['image'] - mean) / std).astype(np.float32)
  logits = parts.model.apply(variables, pixels, False)
  want = optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean()
  _, values = _steps(parts, state, 1)
  # Sixteen rows in float32, whose order of sums differs.
  assert abs(values[0] - want) < 1e-5
  values = _trained(_config((), model__name=model), count=1)[2]
  assert abs(values[0] - want) > 1e-3  # of the batch's statistics


def test_a_norm_that_trains_in_part_is_no_frozen_one():
  old, new, _ = _trained(_config((('norm/scale', 0),)))
  assert _same(old, new, 'params/norm/scale')
  assert not _same(old, new, 'params/norm/bias')
  assert not _same(old, new, 'stats/batch_stats/norm/mean')


def test_averages_of_what_is_frozen_stay():
  """Parameters and statistics, whatever an update has made of them."""
  params = {
    'norm': {'scale': np.ones(2), 'bias': np.zeros(2)},
    'head': {'kernel': np.ones((2, 2)), 'bias': np.ones(2)},
  }
  stats = {
    'batch_stats': {'norm': {'mean': np.ones(2), 'var': np.ones(2)}, 'last': {'mean': np.ones(2)}}
  }
  trees = {'params': params, 'stats': stats}
  state = state_lib.TrainState(np.array(0), params, stats, (), jax.tree.map(lambda x: x + 4, trees))
  frozen = multipliers.Frozen((('norm|head/bias', 0),), params)
  update = frozen.wrap_update(lambda state, _: (jax.tree.map(lambda x: x + 1, state), 'values'))
  new, values = update(state, None)
  assert values == 'values' and new.step == 1
  old, new = _leaves(state), _leaves(new)
  stay = {name for name in old if _same(old, new, name)}
  unchanged = (
    'params/norm/scale',
    'params/norm/bias',
    'params/head/bias',
    'stats/batch_stats/norm/mean',
    'stats/batch_stats/norm/var',
  )
  assert stay == {*unchanged, *(f'average/{name}' for name in unchanged)}


def test_a_frozen_norm_keeps_what_is_added_to_it():
  """A residual block has the running statistics, then the sum, then ReLU."""
  layer = layers.BatchNorm(group=2, relu=True, name='norm')
  x = np.random.default_rng(0).normal(size=(2, 3, 3, 4)).astype(np.float32)
  variables = layer.init(jax.random.key(0), x, False)
  frozen = multipliers.Frozen((('.*', 0),), {'': variables['params']})
  frozen.norms = {''}  # the path of a layer that is the whole network
  for added in ((x,), ()):
    with frozen.applied():
      out = layer.apply(variables, x, True, *added)
    # A new layer's statistics: mean 0, variance 1. Float32's rounding.
    want = np.maximum(x / np.sqrt(1 + 1e-5) + sum(added), 0)
    np.testing.assert_allclose(out, want, 1e-6, 1e-6)
  with frozen.applied():
    np.testing.assert_array_equal(layer.apply(variables, x, train=True), out)


def test_updates_are_multiplied():
  """Plain SGD: what a step adds is the gradient times rate and factor."""
  keys = {'optimizer__name': 'sgd', 'optimizer__weight_decay': 0.1}
  rules = (('conv2/kernel', 0.25), ('conv', 3.0), ('head/bias', 0.5))
  old, plain, _ = _trained(_config((), **keys), count=1)
  _, ruled, _ = _trained(_config(rules, **keys), count=1)
  factors = {
    'conv1/kernel': 3,
    'conv2/kernel': 0.25,
    'conv2/bias': 3,
    'norm/scale': 1,
    'norm/bias': 1,
    'head/kernel': 1,
    'head/bias': 0.5,
  }
  for name, factor in factors.items():
    name = f'params/{name}'
    want = (plain[name] - old[name]) * factor
    # Differences of weights below 1, each rounded to 6e-8.
    np.testing.assert_allclose(ruled[name] - old[name], want, 0, 4e-7)
    assert np.abs(want).max() > 1e-5, name


@pytest.mark.parametrize(
  'name, key, factors',
  [
    # Decoupled decay is multiplied with the learning rate.
    ('adamw', 'optimizer__multipliers', {'conv1': 0, 'head': 0.5}),
    ('sgd', 'optimizer__decay_multipliers', {'conv1': 0, 'head': 250.0}),
    ('momentum', 'optimizer__decay_multipliers', {'conv1': 0, 'head': 250.0}),
  ],
)
def test_decay_is_multiplied(name, key, factors):
  """No gradient: each step takes rate x factor x decay off kernels, vectors nothing."""
  keys = {key: tuple(factors.items()), 'optimizer__name': name}
  config = _config((), optimizer__weight_decay=0.01, optimizer__learning_rate=0.1, **keys)
  if name == 'momentum':
    config.optimizer.momentum = 0.0
  params = {
    name: {'kernel': np.full((2, 3), 1.5, np.float32), 'bias': np.full(3, 1.5, np.float32)}
    for name in ('conv1', 'conv2', 'head')
  }
  chain = optimizer.create(config, _BATCH, 640, 100)
  state, zeros = chain.init(params), jax.tree.map(np.zeros_like, params)
  for _ in range(2):
    updates, state = chain.update(zeros, state, params)
    params = optax.apply_updates(params, updates)
  for name, leaves in params.items():
    want = 1.5 * (1 - 0.1 * factors.get(name, 1) * 0.01) ** 2
    # Two roundings of float32 near 1.5.
    np.testing.assert_allclose(leaves['kernel'], want, 0, 4e-7)
    np.testing.assert_array_equal(leaves['bias'], 1.5)


def test_a_decay_rule_that_matches_nothing_is_refused():
  config = _config((), optimizer__decay_multipliers=(('haed', 2.0),))
  builders.assert_refused(r"decay_mul.*'haed'.*head", _parts, config)


def test_clipping_counts_what_trains():
  """The norm is that of the gradients that are computed, of one leaf here."""
  rules = (('head/bias', 1.0), ('.*', 0))
  config = _config(
    rules, optimizer__name='sgd', optimizer__weight_decay=0.0, optimizer__learning_rate=1.0
  )
  old, new, values = _trained(config, count=1)
  gradient = np.linalg.norm(new['params/head/bias'] - old['params/head/bias'])
  norms = _config((), optimizer__name='sgd', optimizer__weight_decay=0.0)
  everything = _trained(norms, count=1)[2]
  # Values are loss, top-1, norm; a difference of weights is good to 1e-7.
  assert abs(values[2] - gradient) < 1e-6
  assert everything[2] > 1.5 * values[2]
  config.optimizer.clip_norm = float(gradient) / 2
  old, clipped, _ = _trained(config, count=1)
  step = np.linalg.norm(clipped['params/head/bias'] - old['params/head/bias'])
  assert abs(step - gradient / 2) < 1e-6


def test_no_gradient_is_computed_of_what_is_frozen():
  """Only the last layer trains: no convolution's gradient is in the program."""
  counts = {}
  for rules in ((), (('head', 1.0), ('.*', 0))):
    parts = _parts(_config(rules))
    batch = build.abstract_batch(_config(rules), parts.spec.mesh, _BATCH)
    text = parts.train_step.lower(parts.abstract_state, batch).compile().as_text()
    counts[bool(rules)] = text.count(' convolution(')
  assert counts[True] == 2 < counts[False]


@pytest.mark.parametrize(
  'rules, words',
  [
    ((('conv9', 0),), ("'conv9' matches no", 'did you mean', "'conv")),
    ((('zzz', 0),), ("'zzz'", 'the modules are conv1, conv2, head, norm')),
    ((('.*', 0),), ('nothing trains',)),
  ],
)
def test_rules_that_do_not_fit_the_network(rules, words):
  builders.assert_refused(('config.optimizer.multipliers', *words), _parts, _config(rules))


@pytest.mark.parametrize(
  'rules, word',
  [
    (('conv', 0), 'pairs such as'),
    ((('conv(', 0),), 'regular expression'),
    (((1, 0),), 'regular expression'),
    ((('conv', -1),), '0 or more'),
    ((('conv', True),), '0 or more'),
    ((('conv', float('inf')),), '0 or more'),
  ],
)
def test_rules_of_another_form(rules, word):
  builders.assert_refused(('optimizer.multipl', word), _config, rules)
