"""A slice's update is the slice of the whole's update."""

import jax
import numpy as np
import optax
import pytest

from anp_jax.runtimes.server import layout
from anp_jax.runtimes.server import setup as setup_lib
from anp_jax.runtimes.server import shard as shard_lib
from tests import serving

pytestmark = pytest.mark.usefixtures('quick_compiles')

_STEPS = 4


def _shards(config, servers, ahead=0.0):
  config = serving.config_of(
    config,
    **{
      'strategy.servers': servers,
      'model.name': 'tests.user_network:SmallNet',
      'data.image_size': 8,
      'model.norm_momentum': 0.5,
    },
  )
  return setup_lib.create(config, ahead)


def _start(setup):
  """A state of random weights and moments, as after some steps."""
  rng = np.random.default_rng(1)

  def leaf(like):
    if not like.ndim:
      return np.zeros((), like.dtype)
    return np.abs(rng.normal(size=like.shape)).astype(like.dtype)

  return jax.tree.map(leaf, setup.parts.like)


def _gradients(setup, parts=1):
  rng = np.random.default_rng(0)
  return [
    (
      rng.normal(size=(parts, setup.flats[0].size)).astype(np.float32),
      rng.normal(size=(parts, setup.flats[1].size)).astype(np.float32),
    )
    for _ in range(_STEPS)
  ]


def _run(setup, parts=1, weights=(1.0,), staleness=0):
  states = [shard.start(_start(setup)) for shard in setup.shards]
  for gradients, terms in _gradients(setup, parts):
    for i, shard in enumerate(setup.shards):
      cut = slice(shard.part.start, shard.part.stop)
      states[i], finite = shard.apply(
        states[i], [g[cut] for g in gradients],
        [t[: shard.stats_size] for t in terms], weights, staleness,
      )  # fmt: skip
      assert finite
  return _whole(setup, states)


def _whole(setup, states):
  return shard_lib.whole(setup.flats, setup.shards, states, setup.parts.like)


def test_start_and_whole_are_inverse(config):
  for servers in (1, 2, 3, 5):
    setup = _shards(config, servers)
    start = _start(setup)
    states = [shard.start(start) for shard in setup.shards]
    back = _whole(setup, states)
    jax.tree.map(np.testing.assert_array_equal, start, back)


@pytest.mark.parametrize(
  'name', ['sgd', 'momentum', 'nesterov', 'rmsprop', 'adam', 'adamw']
)
def test_slices_are_those_of_the_whole(config, name):
  config.optimizer.name = name
  config.optimizer.weight_decay = 0.1
  config.optimizer.clip_value = 1.5
  config.ema = 0.9
  whole = _run(_shards(config, 1))
  cut = _run(_shards(config, 3))
  jax.tree.map(np.testing.assert_array_equal, whole, cut)


def test_update_is_that_of_the_closed_form(config):
  """Momentum with decay of matrices only, written out in NumPy."""
  config.optimizer.name = 'momentum'
  config.optimizer.weight_decay = 0.1
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  setup = _shards(config, 3)
  found = _run(setup, staleness=0)
  start = _start(setup)
  flat = setup.flats[0]
  value = flat.vector(start.params, np).astype(float)
  decays = flat.vector(
    jax.tree.map(lambda p: np.full(p.shape, p.ndim > 1, float), start.params),
    np,
  )
  stats = setup.flats[1].vector(start.stats, np).astype(float)
  trace = optax.tree.get(start.opt_state, 'trace')
  speed = flat.vector(trace, np).astype(float)
  for (gradient,), (term,) in _gradients(setup):
    speed = 0.9 * speed + gradient + 0.1 * decays * value
    value = value - config.optimizer.learning_rate * speed
    stats = 0.5 * stats + term
  # float32 against float64 over four updates.
  np.testing.assert_allclose(
    flat.vector(found.params, np), value, rtol=1e-5, atol=1e-5
  )
  np.testing.assert_allclose(
    setup.flats[1].vector(found.stats, np), stats, rtol=1e-5, atol=1e-5
  )
  assert found.step == _STEPS


def test_parts_count_by_their_examples(config):
  config.optimizer.name = 'sgd'
  config.optimizer.weight_decay = 0.0
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  setup = _shards(config, 2)
  found = _run(setup, 3, (4.0, 0.0, 12.0))
  flat = setup.flats[0]
  value = flat.vector(_start(setup).params, np).astype(float)
  for gradients, _ in _gradients(setup, 3):
    mean = (4 * gradients[0].astype(float) + 12 * gradients[2]) / 16
    value = value - config.optimizer.learning_rate * mean
  np.testing.assert_allclose(
    flat.vector(found.params, np), value, rtol=1e-5, atol=1e-5
  )


def test_stale_update_is_divided(config):
  config.optimizer.name = 'sgd'
  config.optimizer.weight_decay = 0.0
  config.strategy.compensation = 'staleness'
  setup = _shards(config, 2)
  start = setup.flats[0].vector(_start(setup).params, np)
  moved = [
    setup.flats[0].vector(_run(setup, staleness=s).params, np) - start
    for s in (0, 1, 4)
  ]
  np.testing.assert_array_equal(moved[0], moved[1])
  # Differences of float32 weights around 0.1.
  np.testing.assert_allclose(moved[2], moved[0] / 4, atol=1e-6)


@pytest.mark.parametrize('ahead', [0.0, 3.0])
def test_weights_that_travel_are_those_of_later(config, ahead):
  """As far on as so many updates like the last one, but not in the state."""
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  setup = _shards(config, 2, ahead)
  flat = setup.flats[0]
  plain = _shards(config, 2)
  states = [shard.start(_start(setup)) for shard in setup.shards]
  before = flat.vector(_start(setup).params, np)
  for shard, state in zip(setup.shards, states):
    cut = slice(shard.part.start, shard.part.stop)
    # Nothing is known yet of where they go.
    np.testing.assert_array_equal(
      np.concatenate(shard.weights(state)), before[cut]
    )
  jax.tree.map(np.testing.assert_array_equal, _run(setup), _run(plain))
  (gradient,), (term,) = _gradients(setup)[0]
  for i, shard in enumerate(setup.shards):
    cut = slice(shard.part.start, shard.part.stop)
    states[i], _ = shard.apply(
      states[i], [gradient[cut]], [term[: shard.stats_size]], (1.0,), 3
    )
  now = flat.vector(_whole(setup, states).params, np)
  sent = np.concatenate(
    [p for s, shard in zip(states, setup.shards) for p in shard.weights(s)]
  )
  # Of float32 weights of about 1, and three times their difference.
  np.testing.assert_allclose(
    sent, now + ahead * (now - before), rtol=1e-5, atol=2e-6
  )
  assert ahead == 0 or np.abs(sent - now).max() > 1e-3


@pytest.mark.parametrize('ahead', [0.0, 1.0])
def test_predicted_weights_hold_stale_momentum_together(config, ahead):
  """Each weight on a parabola of its own, each gradient one update late.

  The roots of x^3 - 1.9 x^2 + (0.9 + 0.15 (1 + ahead)) x - 0.15 ahead are at
  most 0.957 with prediction, and 1.025 without.
  """
  rate, keep = 0.15, 0.9
  config.optimizer.name = 'momentum'
  config.optimizer.momentum = keep
  config.optimizer.learning_rate = rate
  config.optimizer.weight_decay = 0.0
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  setup = _shards(config, 1, ahead)
  (shard,) = setup.shards
  start = _start(setup)
  state, flat = shard.start(start), setup.flats[0]
  value = first = flat.vector(start.params, np).astype(float)
  trace = optax.tree.get(start.opt_state, 'trace')
  speed = flat.vector(trace, np).astype(float)
  read = later = value
  sent = np.concatenate(shard.weights(state))
  term = np.zeros(shard.stats_size, np.float32)
  for _ in range(100):
    late, sent = sent, np.concatenate(shard.weights(state))
    state, _ = shard.apply(state, [late], [term], (1.0,), 1)
    gradient, read = read, later
    speed = keep * speed + gradient
    value = value - rate * speed
    later = value - ahead * rate * speed
  found = flat.vector(_whole(setup, [state]).params, np)
  # Of 100 updates in float32, each rounded by 2^-24 of what it is made of.
  scale = np.abs(value).max()
  np.testing.assert_allclose(found, value, atol=1e-3 * scale)
  grown = np.linalg.norm(found) / np.linalg.norm(first)
  assert grown < 0.1 if ahead else grown > 3


def test_clipping_by_norm_is_left_to_the_workers(config):
  config.optimizer.clip_norm = 1e-3
  clipped = _run(_shards(config, 2))
  config.optimizer.clip_norm = 0.0
  plain = _run(_shards(config, 2))
  jax.tree.map(np.testing.assert_array_equal, clipped.params, plain.params)


def test_slices_are_even_and_cover_all():
  tree = {'a': np.zeros((30, 5), np.float32), 'b': np.zeros(123, np.float32)}
  flat = layout.Flat(tree, 'float32')
  for count in (1, 2, 3, 5):
    slices = flat.slices(count)
    assert [s.start for s in slices[1:]] == [s.stop for s in slices[:-1]]
    assert slices[0].start == 0 and slices[-1].stop == 273
    sizes = [s.size for s in slices]
    assert max(sizes) - min(sizes) <= 2 * 64
  first, second = flat.slices(2)
  assert (first.stop, second.stop) == (128, 273)
  # Matrices end in the second slice, 22 elements after its beginning.
  assert [(b.start, b.stop, b.is_matrix) for b in second.blocks(100)] == [
    (0, 22, True), (22, 122, False), (122, 145, False),
  ]  # fmt: skip
  block = second.blocks(100)[2]
  cut = block.cut(np.arange(145.0), 100)
  assert cut.shape == (100,)
  assert cut.tolist() == [*range(122, 145), *[0] * 77]
  assert second.blocks(100)[0].cut(np.ones(145), 100).shape == (100, 1)


def test_matrices_come_first():
  tree = {'a': np.full(3, 1.0), 'b': np.full((2, 2), 2.0), 'c': np.full(1, 3.0)}
  flat = layout.Flat(tree, 'float64')
  assert flat.names == ['b', 'a', 'c'] and flat.matrices == 4
  vector = flat.vector(tree, np)
  assert vector.tolist() == [2, 2, 2, 2, 1, 1, 1, 3]
  jax.tree.map(np.testing.assert_array_equal, flat.tree(vector), tree)


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match='steps is int32'):
    layout.Flat({'steps': np.zeros(3, np.int32)}, 'float32')


def test_whole_chain_is_optax(config):
  """The state that comes out is one that `sync` goes on with."""
  config.optimizer.name = 'adam'
  config.optimizer.clip_norm = 1.0
  setup = _shards(config, 3)
  found = _run(setup)
  counts = [
    int(leaf) for leaf in jax.tree.leaves(found.opt_state) if not leaf.ndim
  ]
  assert counts == [_STEPS, _STEPS]
  like = setup.parts.like.opt_state
  assert jax.tree.structure(found.opt_state) == jax.tree.structure(like)
  assert optax.tree.get(found.opt_state, 'mu') is not None


@pytest.mark.parametrize('rules', [(), (('norm', 0),)], ids=['all', 'frozen'])
def test_averages_follow_their_recurrence(config, rules):
  """Those of frozen statistics stay; of all else, written out in NumPy."""
  config.ema = 0.15
  config.optimizer.name = 'sgd'
  config.optimizer.weight_decay = 0.0
  config.optimizer.multipliers = rules
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  setup = _shards(config, 2)
  begun = _start(setup)
  # As a new run has it.
  begun = begun.replace(average={'params': begun.params, 'stats': begun.stats})
  states = [shard.start(begun) for shard in setup.shards]
  value, stats = (
    flat.vector(tree, np).astype(float)
    for flat, tree in zip(setup.flats, (begun.params, begun.stats))
  )
  means = [value, stats]
  for step, ((gradient,), (term,)) in enumerate(_gradients(setup)):
    for i, shard in enumerate(setup.shards):
      cut = slice(shard.part.start, shard.part.stop)
      states[i], _ = shard.apply(
        states[i], [gradient[cut]], [term[: shard.stats_size]], (1.0,), 0
      )
    # 0.1 at first, then 2/11 and more are cut to 0.15.
    decay = min(0.15, (1 + step) / (10 + step))
    value = value - config.optimizer.learning_rate * gradient
    stats = 0.5 * stats + term
    means = [decay * m + (1 - decay) * n for m, n in zip(means, (value, stats))]
  found = _whole(setup, states).average
  # float32 against float64 over four updates.
  if rules:
    jax.tree.map(np.testing.assert_array_equal, found['stats'], begun.stats)
    jax.tree.map(
      np.testing.assert_array_equal, found['params']['norm'],
      begun.params['norm'],
    )  # fmt: skip
    return
  for flat, name, mean in zip(setup.flats, ('params', 'stats'), means):
    np.testing.assert_allclose(
      flat.vector(found[name], np), mean, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize('servers', [1, 2, 3, 5])
def test_rates_are_multiplied_wherever_slices_end(config, servers):
  """SGD with decay of matrices, each leaf by its factor, written in NumPy."""
  config.optimizer.name = 'sgd'
  config.optimizer.weight_decay = 0.1
  config.schedule.name = 'constant'
  config.schedule.warmup = '0 steps'
  config.optimizer.multipliers = (('norm|conv2/kernel', 0), ('conv', 0.25))
  setup = _shards(config, servers)
  found, start, flat = _run(setup), _start(setup), setup.flats[0]
  factors = {
    'conv1/kernel': 0.25, 'conv1/bias': 0.25, 'conv2/kernel': 0,
    'conv2/bias': 0.25, 'norm/scale': 0, 'norm/bias': 0, 'head/kernel': 1,
    'head/bias': 1,
  }  # fmt: skip
  assert set(factors) == set(flat.names)
  gradients = [flat.tree(gradient) for (gradient,), _ in _gradients(setup)]
  for name, factor in factors.items():
    module, leaf = name.split('/')
    value = start.params[module][leaf]
    got = found.params[module][leaf]
    if not factor:
      assert got.tobytes() == value.tobytes(), name
      continue
    for gradient in gradients:
      step = gradient[module][leaf] + 0.1 * (value.ndim > 1) * value
      value = value - config.optimizer.learning_rate * factor * step
    # float32 against float64 over four updates.
    np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)
  # All parameters of the norm are frozen, and so are its statistics.
  jax.tree.map(np.testing.assert_array_equal, found.stats, start.stats)
