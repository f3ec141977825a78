"""Tests of plan: what a step of a config costs."""

import jax
import jax.numpy as jnp
import pytest

from anp_jax.config import command_line, strategy as strategy_lib
from anp_jax.costs import collectives, device_step, hardware, steps
from anp_jax.tools.plan import machines, memory_traffic, plan_tables, workload
from tests import builders

_MODERN = 'configs/resnet_anp.py:modern'
_SMALL = {
  'data.source': 'synthetic',
  'data.image_size': '32',
  'model.name': 'tests.user_network:SmallNet',
}


@pytest.fixture(scope='module')
def resnet50():
  config = command_line.load(_MODERN, {'data.source': 'synthetic'})
  return workload.count(config, 1000, 1000)


def test_resnet50_has_its_published_counts(resnet50):
  assert resnet50.parameters == 25557032  # as torchvision counts them
  assert resnet50.statistics == 2 * 26560
  # 4.09 G multiplications an image; a backward pass of two products each, but
  # none for the images' gradient: 118 M of the first layer. Products with the
  # padding, some 3 %, are not made.
  expected = 3 * 2 * 4.089e9 - 2 * 118e6
  assert 0.95 * expected < resnet50.image_flops < expected
  assert sum(x.parameters for x in resnet50.layers) == 25557032
  # The first version strides in the 1x1 before: 3.86 G.
  keys = {'data.source': 'synthetic', 'model.version': 'v1'}
  first = workload.count(command_line.load(_MODERN, keys), 1000, 1000)
  expected = 3 * 2 * 3.858e9 - 2 * 118e6
  assert 0.95 * expected < first.image_flops < expected


def test_state_is_that_of_the_optimizer_and_the_averages(resnet50):
  # Weights, momentum and averages in float32; statistics and theirs; counters.
  numbers = 3 * 25557032 + 2 * 53120
  assert resnet50.state_bytes == pytest.approx(4 * numbers, abs=64)
  adam = {'optimizer.name': 'adam', 'ema': '0'}
  count = workload.count(command_line.load(_MODERN, _SMALL | adam), 100, 10)
  # Two moments, no averages.
  expected = 4 * (3 * count.parameters + count.statistics)
  assert count.state_bytes == pytest.approx(expected, abs=16)


def test_a_network_of_the_users_with_dropout():
  count = workload.count(command_line.load(_MODERN, _SMALL), 100, 10)
  # Kernels and biases of two convolutions, a norm of 6 channels, a classifier.
  convolutions = 3 * 3 * 3 * 6 + 6 + 3 * 3 * 6 * 8 + 8
  assert count.parameters == convolutions + 2 * 6 + 8 * 10 + 10
  assert count.statistics == 2 * 6


@pytest.mark.slow
def test_a_network_that_draws_numbers_for_each_example():
  config = command_line.load(
    _MODERN, {'data.source': 'synthetic', 'model.name': 'convnextv2_atto', 'model.drop_path': '0.5'}
  )
  count = workload.count(config, 1000, 1000)
  assert count.parameters == 3708400 and not count.statistics  # timm's count


def test_activations_are_the_inputs_and_outputs_of_layers():
  config = command_line.load('configs/lenet.py', {'data.source': 'synthetic'})
  lenet = workload.count(config, 100, 10)
  # By hand: 28 px of 3 channels; 24 px of 20; 12 of 20; 8 of 50; 4 of 50; 500.
  layers = [(28 * 28 * 3, 24 * 24 * 20), (12 * 12 * 20, 8 * 8 * 50), (4 * 4 * 50, 500), (500, 10)]
  assert [(x.inputs, x.outputs) for x in lenet.layers] == layers
  assert lenet.examples == 100 and lenet.total_images == 20 * 100 + 48
  assert lenet.statistics == 0


def test_a_chain_of_elementwise_work_is_one_pass():
  n = 1 << 16

  def function(x, w):
    hidden = jnp.tanh(x * 2 + 1)  # fused: x is read, hidden written
    y = hidden @ w
    return jnp.exp(y - 3).sum()  # fused into the reduction: y is read

  shapes = (jax.ShapeDtypeStruct((n, 4), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32))
  traffic = memory_traffic.count(jax.make_jaxpr(function)(*shapes))
  x, y, w = 4 * n * 4, 4 * n * 8, 4 * 32
  # x and hidden; hidden, w and y; y and the sum.
  assert traffic.size == (x + x) + (x + w + y) + (y + 4)
  assert traffic.kernels == 3


def test_calls_are_inlined_each_time():
  step = jax.jit(lambda x, w: jnp.tanh(x @ w))

  def function(x, w):
    return step(step(x, w), w)

  shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  traffic = memory_traffic.count(jax.make_jaxpr(function)(shape, shape))
  size = 4 * 64 * 64
  # Two products, three arrays each; two tanh, two each.
  assert (traffic.size, traffic.kernels) == (10 * size, 4)


def test_data_that_is_not_here_may_be_named(tmp_path):
  keys = {**_SMALL, 'data.source': 'folder', 'data.path': str(tmp_path)}
  config = command_line.load(_MODERN, keys)
  builders.assert_refused('--examples=N', workload.count, config)
  assert workload.count(config, 943017, 1200).examples == 943017


@pytest.mark.parametrize('pieces, expected', [(1, 0.9 + 0.6), (4, 1.0875)])
def test_emulated_gradients_come_at_the_ends_of_pieces(pieces, expected):
  """The closed form of tests/processes/test_emulated_processes.py.

  2 MB over a ring of four at 5 MB/s, 0.6 s, after a pass of 0.9 s or with it:
  pieces are there after 0.45, 0.6, 0.75 and 0.9 s, and the 16 arrays leave in
  buckets of 3, 4, 4, 4 and 1; each but the first needs one piece more.
  """
  config = command_line.load(
    'configs/resnet_anp.py:tiny',
    {
      'emulate.enabled': 'True',
      'emulate.megabytes': '2',
      'emulate.pieces': str(pieces),
      'emulate.step_seconds': '0.9',
      'emulate.bandwidth': '40mbit',
      'data.source': 'synthetic',
      'strategy.bucket_megabytes': '0.5',
    },
  )
  cost = workload.count(config, 64, 10)
  assert cost.parameters == 500000 and cost.statistics == 0
  link = hardware.Link('link', 1e9, 1e-12)
  cluster = collectives.Cluster(4, 1, link, link)
  device = plan_tables.load().device('cpu')
  setting = steps.Setting(config, cost, device, cluster, device_step.Efficiency(0.5, 1, 1, 0.5))
  setting = machines.with_given_times(setting)
  step = strategy_lib.find(config).predicted_step(setting, 4)
  assert step.seconds == pytest.approx(expected, rel=1e-6)
