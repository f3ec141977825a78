"""A slice's update is the slice of the whole update."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anp_jax.runtimes.parameter_server import layout as layout_lib
from tests import builders, serving

pytestmark = pytest.mark.usefixtures('small_blocks')

_STEPS = 4


@pytest.fixture
def sgd(config):
  """Plain SGD at a constant rate, whose updates have a closed form."""
  config.optimizer.name = 'sgd'
  config.optimizer.weight_decay = 0.0
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  return config


def _setup(config, servers):
  return serving.small_setup(config, servers=servers)


def _gradients(setup, data_shards=1):
  rng = np.random.default_rng(0)
  sizes = setup.layout.params.size, setup.layout.stats.size
  return [
    [rng.normal(size=(data_shards, n)).astype(np.float32) for n in sizes] for _ in range(_STEPS)
  ]


def _run(setup, state=None, data_shards=1, weights=(1.0,)):
  """The whole state after all updates."""
  servers = serving.Servers(setup, state)
  for gradients, deltas in _gradients(setup, data_shards):
    servers.apply(gradients, deltas, weights=weights)
  return servers.state()


def _leaves(setup, *trees):
  """By path: the leaf of each tree like the parameters, and of each gradient."""
  names = setup.layout.params.names
  gradients = [setup.layout.params.unflatten(g) for (g,), _ in _gradients(setup)]
  for name in names:
    module, leaf = name.split('/')
    yield name, [t[module][leaf] for t in trees], [g[module][leaf] for g in gradients]


def _same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _close(a, b):
  # float32 against float64 over four updates.
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_start_and_join_are_inverse(config):
  config.ema = 0.9
  for servers in (1, 3):
    setup = _setup(config, servers)
    state = serving.random_state(setup)
    _same(state, serving.Servers(setup, state).state())


_SLOW = [builders.slow(name) for name in ('sgd', 'nesterov', 'adam')]


@pytest.mark.parametrize('name', ['momentum', 'rmsprop', 'adamw', *_SLOW])
def test_slices_are_those_of_the_whole(config, name):
  config.optimizer.name = name
  config.optimizer.weight_decay = 0.1
  config.optimizer.clip_value = 1.5
  config.ema = 0.9
  _same(_run(_setup(config, 1)), _run(_setup(config, 3)))


def test_data_shards_count_by_their_examples(sgd):
  setup = _setup(sgd, 2)
  result = _run(setup, data_shards=3, weights=(4.0, 0.0, 12.0))
  value = serving.flat(setup, serving.random_state(setup).params)
  for gradients, _ in _gradients(setup, 3):
    mean = (4 * gradients[0].astype(float) + 12 * gradients[2]) / 16
    value = value - sgd.optimizer.learning_rate * mean
  _close(serving.flat(setup, result.params), value)


def test_clipping_by_norm_is_left_to_the_workers(config):
  config.optimizer.clip_norm = 1e-3
  clipped = _run(_setup(config, 2))
  config.optimizer.clip_norm = 0.0
  _same(clipped.params, _run(_setup(config, 2)).params)


def test_slices_are_even_and_cover_all():
  tree = {'a': np.zeros((30, 5), np.float32), 'b': np.zeros(123, np.float32)}
  flat = layout_lib.FlatTree(tree, 'float32')
  for count in (1, 2, 3, 5):
    slices = flat.slices(count)
    assert [s.start for s in slices[1:]] == [s.stop for s in slices[:-1]]
    assert slices[0].start == 0 and slices[-1].stop == 273
    sizes = [s.stop - s.start for s in slices]
    assert max(sizes) - min(sizes) <= 2 * 64
  first, second = flat.slices(2)
  assert (first.stop, second.stop) == (128, 273)
  # Matrices end in the second slice, 22 elements after its beginning.
  blocks = flat.blocks(second, 40, 100)
  assert [(b.start, b.stop, b.is_matrix) for b in blocks] == [
    (0, 22, True),
    (22, 122, False),
    (122, 145, False),
  ]
  padded = blocks[2].cut(np.arange(145.0))
  assert padded.tolist() == [*range(122, 145), *[0] * 77]
  assert blocks[2].trim(padded).tolist() == [*range(122, 145)]
  assert blocks[0].cut(np.ones(145)).shape == (40, 1)


def test_matrices_come_first():
  tree = {'a': np.full(3, 1.0), 'b': np.full((2, 2), 2.0), 'c': np.full(1, 3.0)}
  flat = layout_lib.FlatTree(tree, 'float64')
  assert flat.names == ['b', 'a', 'c'] and flat.matrices == 4
  vector = flat.flatten(tree, np)
  assert vector.tolist() == [2, 2, 2, 2, 1, 1, 1, 3]
  _same(flat.unflatten(vector), tree)


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match='steps is int32'):
    layout_lib.FlatTree({'steps': np.zeros(3, np.int32)}, 'float32')


def test_whole_chain_is_optax(config):
  """The joined state is one that `sync` can continue."""
  config.optimizer.name = 'adam'
  config.optimizer.clip_norm = 1.0
  config.optimizer.decay_multipliers = (('head', 2.0),)
  setup = _setup(config, 3)
  opt_state = _run(setup).opt_state
  counts = [int(leaf) for leaf in jax.tree.leaves(opt_state) if not leaf.ndim]
  assert counts == [_STEPS, _STEPS]
  assert jax.tree.structure(opt_state) == jax.tree.structure(setup.program.abstract_state.opt_state)
  assert optax.tree.get(opt_state, 'mu') is not None


@pytest.mark.parametrize('rules', [(), (('norm', 0),)], ids=['all', 'frozen'])
def test_averages_follow_their_recurrence(sgd, rules):
  """Those of frozen statistics stay; the others are written out in NumPy."""
  sgd.ema = 0.15
  sgd.optimizer.multipliers = rules
  setup = _setup(sgd, 2)
  start = serving.random_state(setup)
  # As a new run has it.
  start = start.replace(average={'params': start.params, 'stats': start.stats})
  flat_stats = setup.layout.stats
  value, stats = serving.flat(setup, start.params), flat_stats.flatten(start.stats, np)
  means = [value, stats]
  for step, ((gradient,), (delta,)) in enumerate(_gradients(setup)):
    # 0.1 at first, then 2/11 and more are cut to 0.15.
    decay = min(0.15, (1 + step) / (10 + step))
    value = value - sgd.optimizer.learning_rate * gradient
    stats = 0.5 * stats + delta
    means = [decay * m + (1 - decay) * n for m, n in zip(means, (value, stats))]
  result = _run(setup, start)
  average = result.average
  assert result.step == _STEPS
  if rules:
    _same(average['stats'], start.stats)
    _same(average['params']['norm'], start.params['norm'])
    return
  _close(flat_stats.flatten(result.stats, np), stats)
  _close(serving.flat(setup, average['params']), means[0])
  _close(flat_stats.flatten(average['stats'], np), means[1])


_RATES = ('norm|conv2/kernel', 0), ('conv', 0.25)
_DECAYS = ('head', 25.0), ('conv1', 0)


def _factor(rules, name):
  """That of the first rule with the name."""
  return next((factor for pattern, factor in rules if re.search(pattern, name)), 1)


@pytest.mark.parametrize(
  'name, servers, rates, decays',
  [
    ('sgd', 1, _RATES, ()),
    ('sgd', 3, _RATES, ()),
    ('sgd', 1, (), _DECAYS),
    ('momentum', 3, (), _DECAYS),
  ],
)
def test_rates_and_decays_are_multiplied_wherever_slices_end(sgd, name, servers, rates, decays):
  """Decay is not clipped, and is of matrices alone; written in NumPy."""
  sgd.optimizer.name, sgd.optimizer.clip_value = name, 0.5
  sgd.optimizer.weight_decay = 0.1
  sgd.optimizer.multipliers, sgd.optimizer.decay_multipliers = rates, decays
  setup = _setup(sgd, servers)
  result, start = _run(setup), serving.random_state(setup)
  keep = sgd.optimizer.momentum if name == 'momentum' else 0.0
  traces = optax.tree.get(start.opt_state, 'trace') if keep else start.params
  trees = result.params, start.params, traces
  for path, (weights, value, trace), gradients in _leaves(setup, *trees):
    rate = sgd.optimizer.learning_rate * _factor(rates, path)
    decay = 0.1 * _factor(decays, path) * (value.ndim > 1)
    if not rate:
      assert weights.tobytes() == value.tobytes(), path
    for gradient in gradients:
      trace = keep * trace + np.clip(gradient, -0.5, 0.5) + decay * value
      value = value - rate * trace
    _close(weights, value)
  if rates:  # All parameters of the norm are frozen, and so are its statistics.
    _same(result.stats, start.stats)


@pytest.mark.parametrize('xp', [np, jnp])
def test_a_vector_has_the_dtype_of_its_leaves(xp):
  """Weights are float32; a gradient on the wire may be bfloat16."""
  tree = layout_lib.FlatTree({'a': np.ones((2, 3), np.float32)}, np.float32)
  vector = tree.flatten({'a': np.ones((2, 3), jnp.bfloat16)}, xp)
  assert vector.dtype == jnp.bfloat16 and vector.shape == (6,)
