"""What `kernel_split` plans: cost model, plan, calibration."""

import dataclasses
import itertools
import json

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import convolutions
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.runtimes.calibration import calibrate
from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.runtimes.calibration import timing as timing_lib
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec

# What is measured here has to be there, not to be fast.
pytestmark = pytest.mark.usefixtures('quick_compiles')

_NAMES = tuple(f'{a}_{n}' for a in 'abc' for n in 'wxyz')
_FREE = costs_lib.Link((0.0, 0.0), (0.0, 0.0))


def _layer(*rates, features=24, output=0, input=0, kernel=0):
  """Of devices that compute so many features a second."""
  counts = (features // 4, features // 2, features)
  return costs_lib.Layer(
    features=features,
    alone=tuple(features / r for r in rates),
    counts=counts,
    seconds=tuple(tuple(n / r for n in counts) for r in rates),
    output=output,
    input=input,
    kernel=kernel,
  )


def _costs(layers, rest=1.0, link=_FREE, others=0, multiple=1):
  devices = range(len(next(iter(layers.values())).alone))
  return costs_lib.Costs(
    names=tuple(f'device {d}' for d in devices),
    whole=tuple(
      rest + sum(layer.alone[d] for layer in layers.values()) for d in devices
    ),
    layers=layers,
    others=others,
    link=link,
    multiple=multiple,
  )


# The cost model, in closed form.


def test_a_step_is_the_sum_of_its_parts():
  link = costs_lib.Link((0.5, 1e-3), (0.25, 2e-3))
  layers = {
    'first': _layer(4, 2, output=600, kernel=240),
    'second': _layer(8, 4, output=1200, input=600, kernel=480),
  }
  costs = _costs(layers, rest=3.0, link=link, others=100)
  plan = {'first': (16, 8), 'second': (12, 12)}
  # Both need 4 s; in parts of 16, as wide as 32 of 24 features.
  first = 4 + (0.5 + 600 * 32 / 24 * 1e-3) + 240 * 32 / 24 * 1e-3
  # The slower one; parts are of one width.
  second = 12 / 4 + (0.5 + 1.2) + (0.25 + 600 * 2e-3) + 0.48
  gradients = 0.5 + 0.25 + 100 * 2e-3
  assert costs.layer('first', plan['first']) == pytest.approx(first)
  assert costs.layer('second', plan['second']) == pytest.approx(second)
  assert costs.step(plan) == pytest.approx(3 + first + second + gradients)
  # Whole, its gradient is summed with the others, and the slower counts.
  del plan['second']
  want = 3 + first + 24 / 4 + gradients + 480 * 2e-3
  assert costs.step(plan) == pytest.approx(want)
  # Nothing split: all do the same, and agree on a vote.
  assert costs.step({}) == pytest.approx(3 + 24 / 2 + 24 / 4 + 0.25)
  assert costs.baseline == 0 and costs.alone == pytest.approx(3 + 6 + 3)
  assert costs.share == pytest.approx(9 / 12)


def test_a_step_waits_for_the_slowest_of_each_layer():
  """One is slower on the first layer, the other on the second."""
  layers = {'first': _layer(4, 2), 'second': _layer(2, 4)}
  costs = _costs(layers, rest=3.0)
  plan = {'first': (12, 12), 'second': (12, 12)}
  assert costs.step(plan) == pytest.approx(3 + 6 + 6)


def test_devices_of_nearly_one_speed_are_of_one():
  layers = {'a': _layer(4.0, 3.8, 1.0)}
  found = costs_lib.pooled(_costs(layers, rest=1.0))
  mean = (24 / 4 + 24 / 3.8) / 2
  assert found.layers['a'].alone == pytest.approx((mean, mean, 24))
  assert found.whole == pytest.approx((1 + mean, 1 + mean, 25))
  assert found.layers['a'].seconds[0] == found.layers['a'].seconds[1]
  assert found.layers['a'].seconds[2] == layers['a'].seconds[2]


@pytest.mark.parametrize('devices', [1, 2, 3, 8])
def test_ideal_of_equal_devices(devices):
  costs = _costs(
    {'a': _layer(*[2] * devices), 'b': _layer(*[6] * devices)}, 4.0
  )
  f = 16 / 20
  assert costs.share == pytest.approx(f)
  want = 1 / ((1 - f) + f / devices)
  assert costs.alone / costs.ideal() == pytest.approx(want)


def test_times_between_and_below_what_was_measured():
  layer = costs_lib.Layer(16, (9.0,), (4, 8, 16), ((2.0, 3.0, 9.0),), 0, 0, 0)
  counts = [0, 2, 4, 6, 8, 12, 16]
  # On lines; below, on that of the first two.
  want = [0, 1.5, 2, 2.5, 3, 6, 9]
  np.testing.assert_allclose(layer.takes(0, counts), want)
  steep = costs_lib.Layer(16, (9.0,), (4, 8, 16), ((2.0, 6.0, 9.0),), 0, 0, 0)
  # Not less than in proportion, where the line would cross zero.
  assert steep.takes(0, 2) == pytest.approx(1.0)


def test_a_ring_in_closed_form():
  link = costs_lib.Link.ring(4, bandwidth=1e6, latency=1e-3)
  assert link.gathers(8e6) == pytest.approx(3e-3 + 6.0)
  assert link.sums(8e6) == pytest.approx(6e-3 + 12.0)


# The plan, against all there are.


@pytest.mark.parametrize('bandwidth', [1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize('rates', [(4, 4), (4, 2), (6, 3, 1)])
def test_the_plan_is_the_best_of_all(rates, bandwidth):
  """Every division of every layer, each measured by the model itself."""
  link = costs_lib.Link.ring(len(rates), bandwidth, 1e-3)
  layers = {
    'wide': _layer(*rates, features=12, output=900, kernel=500),
    'deep': _layer(*rates, features=8, output=100, input=900, kernel=9000),
    'small': _layer(*[50 * r for r in rates], features=4, output=90, input=90),
  }
  costs = _costs(layers, rest=0.5, link=link, others=50)
  ways = []
  for path, layer in layers.items():
    counts = [
      c for c in itertools.product(range(layer.features + 1), repeat=len(rates))
      if sum(c) == layer.features
    ]  # fmt: skip
    summed = layer.kernel * link.total[1]
    best = min(counts, key=lambda c, path=path: costs.layer(path, c))
    is_split = costs.layer(path, best) < costs.layer(path, None) + summed
    ways.append((path, best if is_split else None))
  all_split = {path: c for path, c in ways if c}
  want = min(costs.step(all_split), costs.step({}))
  assert costs.step(costs.best()) == pytest.approx(want, rel=1e-9)


def test_slower_links_split_less_and_at_last_nothing():
  layers = {
    'map': _layer(4, 4, output=9_000_000, kernel=100),
    'deep': _layer(1, 1, output=1_000_000, input=500_000, kernel=100),
  }
  split = {}
  for bandwidth in (1e9, 2e5 * 2, 1e4):
    link = costs_lib.Link.ring(2, bandwidth, 1e-4)
    costs = _costs(layers, link=link, others=1000)
    plan = costs.best()
    split[bandwidth] = set(plan)
    assert costs.step(plan) <= costs.step({})
  assert list(split.values()) == [{'map', 'deep'}, {'deep'}, set()]


def test_shares_follow_rates_in_whole_multiples():
  costs = _costs({'a': _layer(3, 1, features=100)}, multiple=8)
  assert costs.balanced('a', (0, 1)) == (76, 24)
  assert costs.balanced('a', (0,)) == (100, 0)


def test_a_slow_device_may_be_left_out():
  link = costs_lib.Link.ring(2, 1e4, 1e-3)
  layers = {'a': _layer(100, 0.1, output=10, input=10, kernel=10)}
  costs = _costs(layers, link=link)
  assert costs.best() == {'a': (24, 0)}
  assert any('all by 0' in line for line in costs.table(costs.best()))


def test_unlike_devices_that_split_nothing_sum_gradients():
  link = costs_lib.Link((0.5, 1e-3), (0.25, 2e-3))
  layers = {'a': _layer(4, 2, output=10**9, kernel=300)}
  costs = _costs(layers, rest=1.0, link=link, others=100)
  assert costs.step({}) == pytest.approx(13 + 0.25)
  unlike = dataclasses.replace(costs, alike=False)
  assert unlike.step({}) == pytest.approx(13 + 0.25 + 400 * 2e-3)


def test_each_use_of_a_layer_starts_collectives():
  link = costs_lib.Link((0.5, 1e-3), (0.25, 2e-3))
  once = _costs({'a': _layer(4, 4, output=600, input=60)}, link=link)
  layer = dataclasses.replace(once.layers['a'], uses=4)
  often = dataclasses.replace(once, layers={'a': layer})
  plan = {'a': (12, 12)}
  assert often.step(plan) - once.step(plan) == pytest.approx(3 * (0.5 + 0.25))


def test_a_plan_that_is_slower_than_one_device_says_so():
  link = costs_lib.Link.ring(2, 1e6, 1e-4)
  layers = {'a': _layer(100, 0.1, output=10, input=10, kernel=10)}
  # The rest is slow on the second device, too.
  costs = dataclasses.replace(_costs(layers, link=link), whole=(1.24, 340.0))
  plan = costs.best()
  assert plan and costs.step(plan) > costs.alone / 0.95
  assert costs.table(plan)[-1] == 'plan     alone, device 0 would be faster'


def test_the_table_tells_where_it_would_be_faster_alone():
  link = costs_lib.Link.ring(2, 1.0, 1.0)
  costs = _costs({'a': _layer(4, 2, output=900)}, link=link)
  lines = costs.table(costs.best())
  assert 'nothing is split' in lines[-2]
  assert lines[-1] == 'plan     alone, device 0 would be faster'


# A plan's text.


def test_a_plan_is_read_as_it_is_written():
  text = 'conv1=250,250; stage1_block1/conv2=3,0'
  plan = plan_lib.parse(text)
  assert str(plan) == text
  assert plan.counts('conv1', 500, 2) == (250, 250)
  assert plan.counts('conv9', 500, 2) is None
  assert str(plan_lib.parse('nothing')) == 'nothing'
  assert plan_lib.parse('nothing').layers == ()


@pytest.mark.parametrize(
  'text', ['conv1', 'conv1=1,2;', 'a=1,-2', 'a=x', '=', 'a=1,2; a=2,1']
)
def test_a_text_that_is_no_plan_is_refused(text):
  with pytest.raises(config_lib.ConfigError, match='expected a text such as'):
    plan_lib.parse(text)


def test_counts_of_another_network_are_refused():
  with pytest.raises(config_lib.ConfigError, match='expected 2 numbers, 7 in'):
    plan_lib.parse('a=3,3').counts('a', 7, 2)


# Measured on devices of this machine.


def _measurable(devices, mesh_data=1, **overrides):
  config = command_line.load(
    'configs/kernel_split_cifar10.py',
    {'model.kernels': '(8, 16)', 'batch_size': '8', 'data.image_size': '12',
     'data.resize': '12', 'duration': '9 epochs', **overrides},
  )  # fmt: skip
  config.mesh.data, config.mesh.model = mesh_data, devices
  mesh = mesh_lib.create(config, jax.devices()[: mesh_data * devices])
  objective = objective_lib.create(vocabulary_lib.Vocabulary(_NAMES), config)
  return run_spec.RunSpec(config, mesh, objective, config.batch_size, 80)


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices', [1, 2, 4, pytest.param(8, marks=pytest.mark.soak)]
)
def test_calibration_sees_every_layer_and_device(devices, monkeypatch):
  monkeypatch.setattr(calibrate, '_ROUNDS', (1, 1))
  spec = _measurable(devices)
  found = calibrate.measure(spec, cluster.Processes(spec.config))
  assert len(found.whole) == len(found.names) == devices
  assert found.alike  # devices of one process
  assert list(found.layers) == ['conv1', 'conv2']
  first, second = found.layers.values()
  # Of 8 images in float32: 12 x 12 x 8, pooled to 6 x 6 and 6 x 6 x 16.
  assert (first.output, first.input) == (4 * 8 * 144 * 8, 0)
  assert (second.output, second.input) == (4 * 8 * 36 * 16, 4 * 8 * 36 * 8)
  assert first.kernel == 4 * 25 * 3 * 8 and second.kernel == 4 * 25 * 8 * 16
  # Biases, and the head of 12 classes at 3 x 3 x 16.
  assert found.others == 4 * (8 + 16 + 9 * 16 * 12 + 12)
  assert second.counts == (4, 8, 16)
  assert {len(x.alone) for x in (first, second)} == {devices}


@pytest.mark.slow
@pytest.mark.parametrize('data, model', [(1, 4), (2, 2), (4, 1)])
def test_times_are_put_where_they_belong(data, model, monkeypatch):
  """Every function is said to take what its layer, count and device tell."""

  def told(base):
    def make():
      run = lambda: None  # noqa: E731
      run.seconds = base * (1 + jax.config.jax_default_device.id)
      return run

    return make

  monkeypatch.setattr(calibrate, '_SECONDS', 0.0)
  monkeypatch.setattr(costs_lib, '_ALIKE', 1.0)
  monkeypatch.setattr(
    timing_lib, 'timed', lambda run: getattr(run, 'seconds', 0.0)
  )
  monkeypatch.setattr(timing_lib, '_step', lambda *_: told(100.0))
  monkeypatch.setattr(
    timing_lib, '_convolution',
    lambda call, count, split, held: told(
      count + 1000 * (call.layer == 'conv2') + 0.5 * split
    ),
  )  # fmt: skip
  spec = _measurable(model, mesh_data=data, accumulate='2', batch_size='16')
  found = calibrate.measure(spec, cluster.Processes(spec.config))
  # Of those with other parts of the batch the slowest, that of the last row.
  rates = [1 + model * (data - 1) + i for i in range(model)]
  assert found.whole == pytest.approx([100 * r for r in rates])
  for path, extra, counts in (
    ('conv1', 0, (2, 4, 8)), ('conv2', 1000, (4, 8, 16)),
  ):  # fmt: skip
    layer = found.layers[path]
    # Twice: of two micro-batches each.
    want = [2 * r * (extra + counts[-1]) for r in rates]
    assert layer.alone == pytest.approx(want) and layer.uses == 2
    want = [[2 * r * (extra + n + 0.5) for n in counts] for r in rates]
    np.testing.assert_allclose(layer.seconds, want)


@pytest.mark.slow
def test_what_was_measured_is_used_again(tmp_path, monkeypatch):
  monkeypatch.setattr(calibrate, '_SECONDS', 0.0)
  spec = _measurable(2)
  processes = cluster.Processes(spec.config)
  text, lines = calibrate.planned(spec, str(tmp_path), processes)
  saved = json.loads((tmp_path / calibrate.FILE).read_text())
  assert plan_lib.parse(text).layers == tuple(saved['plan'])

  def never(*_):
    raise AssertionError('measured again')

  monkeypatch.setattr(calibrate, 'measure', never)
  again = calibrate.planned(spec, str(tmp_path), processes)
  assert again == (text, lines)
  # Of another network nothing is known yet.
  other = _measurable(2, **{'model.kernels': '(8, 24)'})
  with pytest.raises(AssertionError, match='measured again'):
    calibrate.planned(other, str(tmp_path), processes)


def test_a_pattern_that_no_layer_has_is_refused():
  spec = _measurable(2, **{'strategy.split_layers': 'stage'})
  with pytest.raises(config_lib.ConfigError, match="'stage': no convolution"):
    calibrate.measure(spec, cluster.Processes(spec.config))


@pytest.mark.slow
def test_layers_that_are_not_named_are_not_measured(monkeypatch):
  monkeypatch.setattr(calibrate, '_SECONDS', 0.0)
  spec = _measurable(2, **{'strategy.split_layers': 'conv2'})
  found = calibrate.measure(spec, cluster.Processes(spec.config))
  assert list(found.layers) == ['conv2']


class _OfAxes(nn.Module):
  """Convolutions along so many axes, one after another."""

  axes: int

  @nn.compact
  def __call__(self, x, train: bool):
    del train
    for features in (3, 5):
      size = (2,) * self.axes
      x = nn.Conv(features, size, padding='VALID', name=f'conv{features}')(x)
    return x


@pytest.mark.parametrize('axes', [1, 2, 3])
def test_what_is_timed_of_a_convolution_along_other_axes(axes):
  """Of the first features, with zeros for the gradient of the others."""
  model = _OfAxes(axes)
  x = jax.ShapeDtypeStruct((2, *[5, 4, 3][:axes], 2), jnp.float32)
  variables = jax.eval_shape(
    lambda x: model.init(jax.random.key(0), x, True), x
  )
  _, call = convolutions.find(model, variables, x)
  held = {}
  y, dx, dw = timing_lib._convolution(call, 2, True, held)()()
  x, kernel, dy = map(np.asarray, held['arguments'])
  windows = np.lib.stride_tricks.sliding_window_view(
    x, kernel.shape[:-2], tuple(range(1, 1 + axes))
  )
  windows = np.moveaxis(windows, 1 + axes, -1)
  want = np.tensordot(windows, kernel[..., :2], axes + 1)
  np.testing.assert_allclose(y, want, atol=1e-6)
  rows = tuple(range(1 + axes))
  of_kernel = np.tensordot(windows, dy[..., :2], (rows, rows))
  np.testing.assert_allclose(dw[..., :2], of_kernel, atol=1e-5)
  assert dx.shape == x.shape and dw.shape == kernel.shape
  assert not dw[..., 2:].any()
