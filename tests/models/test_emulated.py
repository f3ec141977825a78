"""The emulated network: its times, its bytes, and what a step makes of it."""

import math
import socket
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import config as config_lib, models
from anp_jax.models import emulated
from anp_jax.system import emulation
from anp_jax.tools.portability import compiled_collectives
from anp_jax.training import build
from tests import builders, programs

_CLASSES = 12


@pytest.fixture(autouse=True)
def own_process():
  """What a test says of this process ends with it."""
  yield
  emulation.begin(0, 0.0, False)


def _emulating(config, **keys):
  keys = {f'emulate.{name}': value for name, value in keys.items()}
  config = config_lib.resolved(config)
  config = config_lib.replaced(config, {'emulate.enabled': True})
  return config_lib.replaced(config, keys)


def _network(config, classes=_CLASSES):
  return models.create(config, classes, 'cpu')


class _Clock(builders.Clock):
  """A clock that only sleeping moves."""

  def __init__(self):
    super().__init__()
    self.sleeps = []

  def sleep(self, seconds):
    self.sleeps.append(seconds)
    self.now += seconds


def _gradient(network, variables, images):
  """The outputs' sum and its gradient, by parameter."""
  rngs = {'dropout': jax.random.key(0)}

  def loss(params):
    changed = {**variables, 'params': params}
    outputs, _ = network.apply(changed, images, True, mutable=[], rngs=rngs)
    return outputs.sum()

  return jax.jit(jax.value_and_grad(loss))(variables['params'])


# torchvision's ResNet-50 and Caffe's LeNet (20 and 50 kernels, 500 units; of
# three colours, which are 2 x 25 x 20 weights more than one has).
@pytest.mark.parametrize(
  'name, side, classes, parameters',
  [('resnet50', 32, 1000, 25_557_032), ('lenet', 28, 10, 431_080 + 2 * 25 * 20)],
)
def test_parameters_are_those_of_the_network(config, name, side, classes, parameters):
  config.model.update(name=name, width=64)
  network = _network(_emulating(config), classes)
  images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
  shapes = jax.eval_shape(lambda x: network.init({'params': jax.random.key(0)}, x, False), images)
  sizes = [math.prod(s.shape) for s in jax.tree.leaves(shapes['params'])]
  assert sum(sizes) == parameters


@pytest.mark.parametrize('megabytes', [0.5, 2.5, 102.228128])
def test_megabytes_are_equal_arrays(tiny_config, megabytes):
  network = _network(_emulating(tiny_config, megabytes=megabytes))
  params = jax.eval_shape(lambda: network.init({}, None, False))['params']
  sizes = [leaf.size * 4 for leaf in jax.tree.leaves(params)]
  assert sum(sizes) == round(megabytes * 10**6)
  assert len(sizes) == 16 and max(sizes) - min(sizes) <= 4


def test_a_pass_takes_its_time_and_its_gradients_come_in_turn(tiny_config):
  """A third forward; then each piece at its share of what remains."""
  clock = _Clock()
  config = _emulating(tiny_config, step_seconds=6.0, pieces=4)
  network = _network(config)
  network = emulated.Emulated(network.network, config.emulate, clock, clock.sleep)
  images = jnp.zeros((4, 8, 8, 3))
  variables = network.init({'params': jax.random.key(0)}, images, False)
  loss, gradients = jax.block_until_ready(_gradient(network, variables, images))
  assert loss == 0.0
  np.testing.assert_allclose(clock.sleeps, [2.0, 1.0, 1.0, 1.0, 1.0])
  assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, variables['params'])
  assert not any(g.any() for g in jax.tree.leaves(gradients))
  # An evaluation waits for nothing.
  outputs = network.apply(variables, images, False)
  assert outputs.shape == (4, _CLASSES) and len(clock.sleeps) == 5


def test_a_late_piece_does_not_delay_the_next(tiny_config):
  clock = _Clock()
  config = _emulating(tiny_config, step_seconds=3.0, pieces=2)
  network = emulated.Emulated(None, config.emulate, clock, clock.sleep)
  timer = emulated._PassTimer(network, 4)
  words = np.array([1, 2], np.uint32)
  timer.forward(words, 0.0)
  clock.now += 0.75  # of the second that the next piece has
  timer.backward(0, words, 0.0)
  timer.backward(1, words, 0.0)
  np.testing.assert_allclose(clock.sleeps, [1.0, 0.25, 1.0])


def test_images_and_slow_processes_count(tiny_config):
  settings = _emulating(tiny_config, step_seconds=0.5, image_seconds=0.25, slow=((3, 2.0),)).emulate
  assert emulation.pass_seconds(settings, 8, (1, 2)) == 2.5
  emulation.begin(3, 0.0, False)
  assert emulation.pass_seconds(settings, 8, (1, 2)) == 5.0


def test_the_draw_has_its_mean_and_spread(tiny_config):
  """And is a function of its words alone."""
  settings = _emulating(tiny_config, step_seconds=2.0, spread=0.25).emulate
  draws = [emulation.pass_seconds(settings, 1, (7, i)) for i in range(20_000)]
  # Standard errors: 2 x 0.25 / sqrt(20,000) = 0.0035; of the spread 0.0013.
  assert abs(np.mean(draws) - 2.0) < 0.015
  assert abs(np.std(draws) / np.mean(draws) - 0.25) < 0.006
  logs = np.log(draws)
  skewness = ((logs - logs.mean()) ** 3).mean() / logs.std() ** 3
  assert abs(skewness) < 0.1  # the logarithm is normal
  assert emulation.pass_seconds(settings, 1, (7, 3)) == draws[3]


def _timed_step(config, devices):
  """The compiled step, its second call's values, and the seconds of that."""
  size = config.batch_size
  program = programs.build(config, devices)
  batch = build.abstract_batch(config, program.spec.mesh, size)
  compiled = program.train_step.lower(program.abstract_state, batch).compile()
  state = program.new_state()
  arrays = {n: np.zeros(s.shape, s.dtype) for n, s in batch.items()}
  arrays['row'] = np.arange(size, dtype=np.int32)
  arrays['weight'] = np.ones(size, np.float32)
  images = {n: jax.device_put(arrays[n], s.sharding) for n, s in batch.items()}
  state, values = jax.block_until_ready(compiled(state, images))
  start = time.monotonic()
  state, values = jax.block_until_ready(compiled(state, images))
  return compiled, np.asarray(values), time.monotonic() - start


@pytest.mark.slow
def test_a_step_sends_all_gradients_and_waits(tiny_config):
  """What the compiled step of four devices sums is their bytes, and is late."""
  tiny_config.batch_size = 8
  tiny_config.model.norm_group = 2
  config = _emulating(tiny_config, step_seconds=0.4, megabytes=3.0)
  compiled, values, seconds = _timed_step(config, 4)
  rows = compiled_collectives.totals(compiled_collectives.compiled(compiled.as_text()))
  sent = sum(r['bytes'] for r in rows if r['kind'] == 'all-reduce')
  assert 3e6 <= sent < 3e6 + 1000  # and metrics, votes
  assert 0.4 <= seconds < 0.8
  assert np.isfinite(values).all()
  np.testing.assert_allclose(values[0], math.log(_CLASSES), rtol=1e-6)


@pytest.mark.parametrize(
  'changes, passes',
  [
    pytest.param({'accumulate': 2}, 2, marks=pytest.mark.slow),
    pytest.param({'sharding': (('.*', 'fsdp'),)}, 1, marks=pytest.mark.soak),
    pytest.param(
      {'strategy.name': 'invariant', 'strategy.logical_shards': 8, 'strategy.threads': 8},
      4,
      marks=pytest.mark.slow,
    ),
    pytest.param({'strategy.name': 'local_sgd', 'strategy.groups': 2}, 1, marks=pytest.mark.soak),
  ],
  ids=['accumulate', 'fsdp', 'invariant', 'local_sgd'],
)
def test_strategies_take_it_as_they_take_any_network(tiny_config, changes, passes):
  """A device's micro-batches take the time of a pass each."""
  tiny_config.batch_size = 16
  tiny_config.model.norm_group = 2
  config = config_lib.replaced(tiny_config, changes)
  config = _emulating(config, step_seconds=0.2)
  _, values, seconds = _timed_step(config, 2)
  assert 0.2 * passes <= seconds < 0.2 * passes + 0.3
  assert np.isfinite(values).all()


def test_a_link_carries_so_many_bytes_a_second():
  clock = _Clock()
  link = emulation.Link(1000.0, clock, clock.sleep)
  link.carry(emulation.UP, 500, link.now())
  link.carry(emulation.DOWN, 250, link.now())  # the other way is free
  assert clock.sleeps == [0.5, 0.25]
  # What two threads send at one time passes one after the other.
  clock.sleep = clock.sleeps.append
  link = emulation.Link(1000.0, clock, clock.sleep)
  clock.sleeps.clear()
  link.carry(emulation.UP, 500, link.now())
  link.carry(emulation.UP, 500, link.now())
  assert clock.sleeps == [0.5, 1.0]
  assert not emulation.link(local=True).bytes_per_second


def test_a_thread_that_wakes_late_does_not_hold_up_the_link():
  """Four batches of half a second; each sleep lasts 0.2 s too long."""
  clock = _Clock()

  def oversleep(seconds):
    clock.sleep(seconds + 0.2 * (seconds > 0))

  link = emulation.Link(1000.0, clock, oversleep)
  batches = [np.zeros(500, np.uint8)] * 4
  start = clock()
  for _ in link.upload(batches):
    pass
  assert clock() - start == pytest.approx(4 * 0.5 + 0.2)
  # After a pause the link is as slow as before.
  clock.sleep(10)
  start = clock()
  for _ in link.upload(batches[:1]):
    pass
  assert clock() - start == pytest.approx(0.7)


@pytest.mark.parametrize('rate', [100_000, 12_500_000_000])  # 100 Gbit/s
def test_connections_over_ip_are_paced_once(monkeypatch, rate):
  """What the kernel says of both ends; not of a pair of this machine alone."""
  with socket.socket() as server:
    server.bind(('127.0.0.1', 0))
    server.listen()
    with (
      socket.create_connection(server.getsockname()) as client,
      server.accept()[0] as peer,
      socket.socketpair()[0] as local,
    ):
      emulation.begin(0, float(rate), True)
      emulation.pace_sockets()
      rates = [
        int.from_bytes(
          s.getsockopt(socket.SOL_SOCKET, emulation._SO_MAX_PACING_RATE, 8), sys.byteorder
        )
        for s in (client, peer)
      ]
      assert rates == [rate] * 2
      # No limit is 2^32 - 1, which Python shows as -1.
      unlimited = local.getsockopt(socket.SOL_SOCKET, emulation._SO_MAX_PACING_RATE)
      assert unlimited != rate
      monkeypatch.setattr(emulation, '_SO_MAX_PACING_RATE', -1)
      emulation.pace_sockets()  # would fail if it paced them again


def test_channel_split_is_refused(tiny_config):
  tiny_config.strategy.name = 'channel_split'
  tiny_config.emulate.enabled = True
  builders.assert_refused('emulate.enabled=True', config_lib.resolved, tiny_config)


@pytest.mark.parametrize(
  'text, nearest', [('1gb', 'gbit'), ('100', ''), ('0gbit', ''), ('1Mbit', '')]
)
def test_bandwidths_are_refused(tiny_config, text, nearest):
  tiny_config.emulate.enabled = True
  typed = {'emulate.bandwidth': text}
  line = builders.refusal(config_lib.resolved, tiny_config, typed)
  assert line.startswith(f'config.emulate.bandwidth={text!r}: expected')
  assert nearest in line


def test_a_network_that_computes_has_no_time_of_a_sleep():
  config = builders.config(
    {'emulate.enabled': True, 'emulate.sleep': False, 'emulate.bandwidth': '100mbit'}
  )
  assert emulation.describe(config.emulate) == 'computation is real, links of 100mbit'
