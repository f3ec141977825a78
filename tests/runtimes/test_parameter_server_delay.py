"""Delay compensation: the gradient of the weights now, in closed form."""

import time

import jax
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.runtimes.parameter_server import (
  delay_compensation,
  look_ahead,
  parameter_store,
  setup as setup_lib,
  slice_optimizer,
)
from tests import serving

pytestmark = pytest.mark.usefixtures('quick_compiles')

_RATE, _MOMENTUM = 0.1, 0.9


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  """Networks of some hundred weights are not padded to a quarter million."""
  for kind in ('_MATRICES', '_VECTORS'):
    monkeypatch.setattr(slice_optimizer, kind, 2**10)


def _setup(config, ahead=None, servers=1, **keys):
  ahead = ahead or look_ahead.Settings()
  config = serving.config_of(
    config,
    **{
      'strategy.servers': servers,
      'strategy.look_ahead': ahead.method,
      'strategy.delay_compensation': 2.0,
      'model.name': 'tests.user_network:SmallNet',
      'data.image_size': 8,
      'schedule.name': 'constant',
      'schedule.warmup': '0 steps',
      'optimizer.name': 'sgd',
      'optimizer.learning_rate': _RATE,
      'optimizer.weight_decay': 0.0,
      **keys,
    },
  )
  return setup_lib.create(config, ahead)


class _Servers:
  """Our servers, driven by hand, from random weights without momentum."""

  def __init__(self, setup):
    rng = np.random.default_rng(1)
    self._setup = setup
    start = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype), setup.program.abstract_state
    )
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), start.params)
    start = start.replace(params=params)
    self._states = [o.start(start) for o in setup.optimizers]

  def apply(self, worker, gradient, read):
    stats = np.zeros(self._setup.layout.stats.size, np.float32)
    part = {'weight': 1.0, 'reads': [0], 'worker': str(worker)}
    gradient = gradient.astype(np.float32)
    results = [
      o.apply(s, [gradient[o.slice]], [stats[: o.stats_size]], [part], read[o.slice])
      for o, s in zip(self._setup.optimizers, self._states, strict=True)
    ]
    assert all(finite for _, finite in results)
    self._states = [state for state, _ in results]

  def read(self):
    optimizers = zip(self._setup.optimizers, self._states, strict=True)
    return np.concatenate([b for o, s in optimizers for b in o.weights(s)])


def test_on_a_parabola_it_is_the_gradient_now(config):
  """Where lambda g g is the curvature, the model of DC-ASGD is exact."""
  servers = _Servers(_setup(config, servers=2))
  read = servers.read()
  rng = np.random.default_rng(2)
  gradient, other = rng.normal(size=(2, read.size))
  curvature = 2.0 * gradient**2
  minimum = read - gradient / curvature
  servers.apply('b', other, read)
  now = servers.read()
  # Its own gradient is of the weights now: nothing is corrected.
  np.testing.assert_allclose(now, read - _RATE * other, atol=1e-6)
  servers.apply('a', gradient, read)
  # Of float32 weights up to 4 and curvatures up to 20, rounded by 6e-8.
  np.testing.assert_allclose(servers.read(), now - _RATE * curvature * (now - minimum), atol=2e-5)


def test_the_adaptive_strength_is_divided_by_a_mean_of_squares(config):
  setup = _setup(config, **{'strategy.delay_decay': 0.75})
  servers = _Servers(setup)
  read = value = servers.read().astype(float)
  square, rng = 0.0, np.random.default_rng(2)
  for _ in range(4):
    gradient = rng.normal(size=value.size)
    square = 0.75 * square + 0.25 * gradient**2
    strength = 2.0 / np.sqrt(square + 1e-7)
    value = value - _RATE * (gradient + strength * gradient**2 * (value - read))
    servers.apply('a', gradient, read.astype(np.float32))
    # Up to four updates in float32.
    np.testing.assert_allclose(servers.read(), value, atol=1e-5)


@pytest.mark.parametrize('method, name', [('smega2', 'momentum'), ('dana', 'nesterov')])
def test_one_worker_is_not_corrected(config, method, name):
  """What it reads ahead is where its own momentum moves: Nesterov's."""
  setup = _setup(config, look_ahead.Settings(method), **{'optimizer.name': name})
  servers = _Servers(setup)
  weights, trace = servers.read().astype(float), 0.0
  for _ in range(6):
    read = servers.read()
    servers.apply(0, read, read)
    trace = _MOMENTUM * trace + weights
    weights = weights - _RATE * (weights + _MOMENTUM * trace)
  np.testing.assert_allclose(servers.read(), weights, atol=1e-5)


@pytest.mark.parametrize('name', ['momentum', 'nesterov'])
def test_with_dana_it_corrects_what_was_not_foreseen(config, name):
  """Three workers in any order, each weight on a parabola of curvature 1."""
  setup = _setup(
    config,
    look_ahead.Settings('dana', 3, 3, 1),
    2,
    **{'optimizer.name': name, 'strategy.delay_compensation': 0.5},
  )
  servers = _Servers(setup)
  reads = [servers.read()] * 3
  value, momenta = reads[0].astype(float), np.zeros((3, reads[0].size))
  expected = [value] * 3
  rng, corrections = np.random.default_rng(2), []
  for step in range(20):
    worker = step % 3 if step % 7 else int(rng.integers(3))
    gradient = expected[worker]
    aim = value - _RATE * _MOMENTUM * momenta[worker]
    corrections.append(0.5 * gradient**2 * (aim - expected[worker]))
    momenta[worker] = _MOMENTUM * momenta[worker] + gradient + corrections[-1]
    value = value - _RATE * momenta[worker]
    expected[worker] = value - _RATE * _MOMENTUM * momenta.sum(0)
    servers.apply(worker, reads[worker], reads[worker])
    reads[worker] = servers.read()
    # Twenty updates in float32.
    np.testing.assert_allclose(reads[worker], expected[worker], rtol=1e-5, atol=1e-5)
  assert np.abs(corrections).max() > 0.1


def test_weights_are_kept_until_their_ticket_is_used(config):
  setup = _setup(config)
  (optimizer,) = setup.optimizers
  start = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), setup.program.abstract_state)
  store = parameter_store.ParameterStore(
    optimizer, optimizer.start(start), lambda version: False, 9
  )
  sizes = setup.layout.params.size, setup.layout.stats.size
  arrays = [np.ones(size, np.float32) for size in sizes]
  part = {'ticket': [0, 0], 'worker': 'b', 'weight': 1.0, 'reads': [0]}
  # One that is gone, and the worker that computed for it; another ticket.
  for ticket, worker in (((0, 0), 'a'), ((0, 0), 'b'), ((1, 0), 'c')):
    store.note_read(ticket, worker, 0, [arrays[0] * 0])
  store.enqueue_gradient((0, 0), 'b', *arrays)
  store.submit(0, [part])
  assert store.read(1, 10)[0] == 1
  assert list(store._reads) == [((1, 0), 'c')]
  store.note_read((0, 0), 'a', 1, [arrays[0]])
  assert len(store._reads) == 1
  # What its log would say is not what it has read.
  store.enqueue_gradient((1, 0), 'c', *arrays)
  store.submit(1, [part | {'ticket': [1, 0], 'worker': 'c', 'reads': [1]}])
  deadline = time.monotonic() + 10
  while not store.error and time.monotonic() < deadline:
    time.sleep(0.01)
  assert store.error == 'update 1 is of weights 1, but 0 was read'
  store.close()


def test_what_is_kept_is_said():
  settings = delay_compensation.Settings(0.04, 0.95)
  assert delay_compensation.describe(settings, 8, 1.5) == (
    ', delays compensated with 0.04, adaptive with 0.95: at most 8 versions of '
    'the weights are kept, 12 MB'
  )
  assert not delay_compensation.describe(delay_compensation.Settings(), 8, 1.5)


@pytest.mark.parametrize(
  'keys, line',
  [
    (
      {'strategy.delay_compensation': 0.1, 'strategy.mode': 'synchronous'},
      "delay_compensation=0.1: expected 0 where strategy.mode is 'synchronous'",
    ),
    (
      {'strategy.delay_decay': 0.9},
      'delay_decay=0.9: expected 0 where strategy.delay_compensation is 0',
    ),
  ],
)
def test_what_cannot_be_is_refused(config, keys, line):
  with pytest.raises(config_lib.ConfigError, match=line):
    config_lib.resolved(serving.config_of(config, **keys))
