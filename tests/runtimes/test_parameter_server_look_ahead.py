"""Look-ahead by momentum: stability on a parabola, and the same iterates."""

import jax
import numpy as np
import optax
import pytest

from anp_jax.runtimes.parameter_server import look_ahead, parameter_store
from tests import builders, launching, serving

pytestmark = pytest.mark.usefixtures('small_blocks')

_MOMENTUM = 0.9


class _Plain:
  """Momentum, and workers that read the weights as they are."""

  def __init__(self, weights, momenta):
    """Starts at weights, with a momentum for each worker, or the first one."""
    self.weights, self.momenta = weights, momenta

  def apply(self, worker, gradient, rate):
    del worker
    self.momenta[:] = _MOMENTUM * self.momenta[0] + gradient
    self.weights = self.weights - rate * self.momenta[0]

  def read(self, rate):
    del rate
    return self.weights


class _Dana(_Plain):
  """DANA-Zero, as in arXiv 1907.11612."""

  def apply(self, worker, gradient, rate):
    self.momenta[worker] = _MOMENTUM * self.momenta[worker] + gradient
    self.weights = self.weights - rate * self.momenta[worker]

  def read(self, rate):
    return self.weights - rate * _MOMENTUM * self.momenta.sum(0)


def _spectral_radius(recursion, workers, curvature):
  """The factor by which an update of workers in turn changes the error."""
  start = np.eye(1 + 2 * workers)
  run = recursion(start[0], start[1 : 1 + workers].copy())
  reads = [*start[1 + workers :]]
  for worker in range(workers):
    run.apply(worker, curvature * reads[worker], 1.0)
    reads[worker] = run.read(1.0)
  cycle = np.stack([run.weights, *run.momenta, *reads])
  return np.abs(np.linalg.eigvals(cycle)).max() ** (1 / workers)


@pytest.mark.parametrize(
  'workers, plain, dana',
  # Fresh gradients: 2 (1 + k), and 2 (1 + k) / (1 + 2 k) of Nesterov.
  [(1, 3.8, 3.8 / 2.8), (4, 0.035, 0.220), (8, 0.016, 0.097)],
)
def test_largest_stable_rates(workers, plain, dana):
  """The rates that docs/strategies.md names."""
  for recursion, expected in ((_Plain, plain), (_Dana, dana)):
    low, high = 1e-3, 5.0
    for _ in range(14):
      middle = np.sqrt(low * high)
      is_stable = _spectral_radius(recursion, workers, middle) < 1
      low, high = (middle, high) if is_stable else (low, middle)
    # To the digits that are written, and 14 halvings of a factor of 5000.
    assert low == pytest.approx(expected, abs=6e-4, rel=1e-3), recursion


def _setup(config, workers, servers=1, in_flight=1, **keys):
  settings = look_ahead.Settings('dana', workers * in_flight, in_flight)
  plain = {
    'strategy.look_ahead': 'dana',
    **launching.CONSTANT,
    'optimizer.name': 'momentum',
    'optimizer.momentum': _MOMENTUM,
    'optimizer.weight_decay': 0.0,
  }
  return serving.small_setup(config, settings, servers, **{**plain, **keys})


def _trace(setup, state):
  return serving.flat(setup, optax.tree.get(state.opt_state, 'trace'))


@pytest.mark.parametrize('name', ['momentum', 'nesterov'])
def test_iterates_are_those_of_the_recursion(config, name):
  """Three workers in any order, with decay, multipliers and averages.

  Each weight is on a parabola of curvature 1.
  """
  rate, decay = 0.1, 0.01
  keys = {
    'optimizer.name': name,
    'optimizer.learning_rate': rate,
    'optimizer.weight_decay': decay,
    'ema': 0.5,
    'optimizer.multipliers': (('norm', 0), ('conv', 0.5)),
  }
  setup = _setup(config, 3, 2, **keys)
  start = serving.random_state(setup)
  start = start.replace(average={'params': start.params, 'stats': start.stats})
  factors = setup.layout.params.spread(
    lambda leaf: 0 if 'norm' in leaf else 0.5 if 'conv' in leaf else 1
  )
  is_matrix = jax.tree.map(lambda p: np.full(p.shape, p.ndim > 1), start.params)
  decays = decay * serving.flat(setup, is_matrix)
  average = first = serving.flat(setup, start.params)
  run = _Dana(first, np.stack([_trace(setup, start)] * 3))
  reads_kept = name == 'nesterov'
  if reads_kept:  # what they keep at the start has been moved already
    run.weights = 2 * run.weights - run.read(rate * factors)
  servers = serving.Servers(setup, start)
  reads, expected = [servers.read()] * 3, [run.read(rate * factors)] * 3
  rng = np.random.default_rng(2)
  for step in range(40):
    # As in a real run, a worker may be quick or slow, but not for ever.
    worker = step % 3 if step % 7 else int(rng.integers(3))
    weights = run.read(rate * factors) if reads_kept else run.weights
    run.apply(worker, expected[worker] + decays * weights, rate * factors)
    servers.apply([reads[worker]], worker=worker)
    expected[worker], reads[worker] = run.read(rate * factors), servers.read()
    # 40 updates in float32 of weights up to 5, each rounded by 2^-24 of them.
    np.testing.assert_allclose(reads[worker], expected[worker], atol=3e-5)
    weights = expected[worker] if reads_kept else run.weights
    ema = min(0.5, (1 + step) / (10 + step))
    average = ema * average + (1 - ema) * weights
  result = servers.state()
  np.testing.assert_allclose(serving.flat(setup, result.params), weights, atol=3e-5)
  np.testing.assert_allclose(serving.flat(setup, result.average['params']), average, atol=3e-5)
  frozen = factors == 0
  assert np.array_equal(servers.read()[frozen], first[frozen])
  assert np.linalg.norm(weights[~frozen]) < np.linalg.norm(first[~frozen])


@pytest.mark.parametrize('name', ['momentum', 'nesterov'])
def test_workers_read_the_same_after_a_resume(config, name):
  """The trace is what the checkpoint keeps of all momenta."""
  keys = {'optimizer.name': name, 'optimizer.learning_rate': 0.05}
  setup = _setup(config, 3, **keys)
  servers = serving.Servers(setup)
  for worker in (0, 1, 2, 1):
    servers.apply([servers.read()], worker=worker)
  state = servers.state()
  resumed = serving.Servers(setup, state)
  # Rounded once more.
  np.testing.assert_allclose(resumed.read(), servers.read(), atol=2e-6)
  abstract = setup.program.abstract_state.opt_state
  assert jax.tree.structure(state.opt_state) == jax.tree.structure(abstract)
  jax.tree.map(np.testing.assert_array_equal, resumed.state(), state)


def test_one_worker_has_the_nesterov_of_optax(config):
  """And loses nothing when it is interrupted."""
  keys = {'optimizer.name': 'nesterov', 'optimizer.learning_rate': 0.1}
  setup = _setup(config, 1, **keys)
  start = serving.random_state(setup)
  value, trace = serving.flat(setup, start.params), _trace(setup, start)
  servers, resumed = serving.Servers(setup, start), serving.Servers(setup, start)
  for _ in range(10):
    servers.apply([servers.read()])
    resumed = serving.Servers(setup, resumed.state())
    resumed.apply([resumed.read()])
    trace = _MOMENTUM * trace + value
    value = value - 0.1 * (value + _MOMENTUM * trace)
  # Ten updates in float32.
  np.testing.assert_allclose(servers.read(), value, atol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, servers.state(), resumed.state())


def test_no_bit_depends_on_the_number_of_servers(config):
  results = []
  for count in (1, 2):
    servers = serving.Servers(_setup(config, 2, count))
    for worker in (0, 0, 1, 0, 1):
      servers.apply([servers.read()], worker=worker)
    results.append((servers.read(), servers.state()))
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_workers_that_leave_and_join(config):
  """One that is gone holds nobody away from the weights; others take over."""
  setup = _setup(config, 2, **{'optimizer.learning_rate': 0.01})
  servers = serving.Servers(setup)
  start = _trace(setup, servers.state())
  momenta = {'a': start, 'b': start}

  def update(worker, replaced=None):
    if replaced:
      momenta[worker] = momenta.pop(replaced)
    gradient = servers.read()
    servers.apply([gradient], worker=worker)
    momenta[worker] = _MOMENTUM * momenta[worker] + gradient
    mean = sum(momenta.values()) / 2
    # Of a few momenta of up to 10 in float32.
    np.testing.assert_allclose(_trace(setup, servers.state()), mean, atol=1e-4)

  for worker in 'abba':
    update(worker)
  update('c', replaced='b')
  # `a` has made update 3: in update 36, 33 are more than 16 of each of two.
  for order in range(5, 40):
    if order == 36:
      momenta['a'] = 0 * start
    update('c')
  update('d', replaced='a')
  assert np.abs(momenta['d']).max() > 1e-3


def test_a_workers_gradients_in_flight_take_turns(config):
  setup = _setup(config, 2, in_flight=2)
  servers = serving.Servers(setup)
  momenta = {key: _trace(setup, servers.state()) for key in range(4)}
  turns = {'a': [0, 1], 'b': [2, 3]}
  for worker in 'aababbba':
    gradient = servers.read()
    servers.apply([gradient], worker=worker)
    turn = turns[worker].pop(0)
    turns[worker].append(turn)
    momenta[turn] = _MOMENTUM * momenta[turn] + gradient
  np.testing.assert_allclose(_trace(setup, servers.state()), sum(momenta.values()) / 4, atol=1e-5)


def test_sent_weights_follow_the_rate_of_the_next_update(config):
  keys = {
    'schedule.name': 'exponential',
    'schedule.factor': 0.5,
    'schedule.every': '1 steps',
    'optimizer.learning_rate': 0.1,
  }
  setup = _setup(config, 2, **keys)
  servers = serving.Servers(setup)
  servers.apply([servers.read()])
  state = servers.state()
  value, mean = serving.flat(setup, state.params), _trace(setup, state)
  np.testing.assert_allclose(servers.read(), value - 0.05 * _MOMENTUM * 2 * mean, atol=1e-6)


@pytest.mark.parametrize('keys, workers, under_way', [({}, 1, 1), ({'in_flight': 2}, 3, 6)])
def test_gradients_under_way(keys, workers, under_way):
  keys = {'name': 'parameter_server', 'look_ahead': 'dana', **keys}
  config = builders.config({f'strategy.{k}': v for k, v in keys.items()})
  assert look_ahead.settings(config, workers) == look_ahead.Settings(
    'dana', under_way, keys.get('in_flight', 1)
  )


def test_what_is_kept_to_be_saved_has_no_momenta_of_workers(config):
  """They are as large as the weights of all workers, and never saved."""
  setup = _setup(config, 2)
  (optimizer,) = setup.optimizers
  start = optimizer.start(serving.random_state(setup))
  store = parameter_store.ParameterStore(optimizer, start, lambda version: version == 1, 9)
  arrays = [np.ones(x.size, np.float32) for x in (setup.layout.params, setup.layout.stats)]
  for order, worker in enumerate('ab'):
    store.enqueue_gradient((order, 0), worker, *arrays)
    serving.submit(store, order, worker)
  assert len(store.read(2, 10)[1].momenta) == 2
  for version in (1, 2):  # kept, and the newest
    assert store.snapshot(version, 10).momenta == ()
  store.close()
