"""A network is timed on this machine's devices, and the times are kept."""

import json
from unittest import mock

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import cluster
from anp_jax.parallel.channel_split import convolutions, split as split_lib
from anp_jax.runtimes.calibration import (
  calibrate,
  costs as costs_lib,
  rounds,
  similar,
  timing,
  workloads,
)
from anp_jax.training import build
from tests import builders, splitting


def _spec(model, data=1, **overrides):
  config = splitting.two_convolutions(**overrides)
  config.mesh.data, config.mesh.model = data, model
  return splitting.spec(config, splitting.mesh(data, model))


def _measured(spec):
  return timing.Timing(spec, cluster.Processes(spec.config)).costs()


@pytest.mark.slow
@pytest.mark.parametrize('devices', [2, *(builders.soak(n) for n in (1, 8))])
def test_every_layer_and_device_is_measured(devices, monkeypatch):
  monkeypatch.setattr(rounds, '_ROUNDS', (1, 1))
  costs = _measured(_spec(devices))
  # Also after a round trip through a file.
  text = json.dumps(costs.to_json())
  assert json.dumps(costs_lib.Costs.from_json(json.loads(text)).to_json()) == text
  assert len(costs.unsplit) == len(costs.names) == devices
  assert list(costs.layers) == ['conv1', 'conv2']
  first, second = costs.layers.values()
  # 8 images in float32: 12 x 12 x 8, pooled to 6 x 6, and 6 x 6 x 16, to 3 x 3.
  assert (first.output, first.input) == (4 * 8 * 36 * 8, 0)
  assert (second.output, second.input) == (4 * 8 * 9 * 16, 4 * 8 * 36 * 8)
  assert (first.reads, second.reads) == ('', 'conv1')
  assert first.kernel == 4 * 25 * 3 * 8 and second.kernel == 4 * 25 * 8 * 16
  # Biases, and the head of 12 classes at 3 x 3 x 16.
  assert costs.other_bytes == 4 * (8 + 16 + 9 * 16 * 12 + 12)
  assert second.counts == (4, 8, 16)
  assert {len(x.alone) for x in (first, second)} == {devices}


@pytest.mark.slow
@pytest.mark.parametrize('data, model', [(2, 2), builders.soak(1, 4)])
def test_times_are_put_where_they_belong(data, model, monkeypatch):
  """A program's seconds follow from its layer, count and device."""

  def on_device(seconds):
    return splitting.lasting(seconds * (1 + jax.config.jax_default_device.id))

  splitting.pretend_times(
    monkeypatch,
    step=lambda *_: on_device(100.0),
    convolution=lambda call, count, split, _: on_device(
      count + 1000 * (call.layer == 'conv2') + 0.5 * split
    ),
  )
  monkeypatch.setattr(similar, '_SIMILAR', 1.0)
  costs = _measured(_spec(model, data, accumulate='2', batch_size='16'))
  # The slowest with another part of the batch is in the last row.
  rates = [1 + model * (data - 1) + i for i in range(model)]
  assert costs.unsplit == pytest.approx([100 * r for r in rates])
  assert [layer.uses for layer in costs.layers.values()] == [2, 2]
  splitting.assert_times_of_two_convolutions(costs, rates, [0.5] * model)


@pytest.mark.slow
def test_measurements_are_used_again(tmp_path, monkeypatch):
  monkeypatch.setattr(rounds, '_SECONDS', 0.0)
  spec = _spec(2)
  processes = cluster.Processes(spec.config)
  workdir = tmp_path / 'of_a_trial'  # which nothing has made yet
  plan = calibrate.choose_plan(spec, str(workdir), processes)
  saved = json.loads((workdir / calibrate.FILE).read_text())
  assert str(split_lib.parse(plan[0])) == str(split_lib.Split(saved['plan']))
  never = mock.Mock(side_effect=AssertionError('measured again'))
  monkeypatch.setattr(timing, 'Timing', never)
  assert calibrate.choose_plan(spec, str(workdir), processes) == plan
  # Another network has not been measured yet.
  other = _spec(2, **{'model.kernels': '(8, 24)'})
  with pytest.raises(AssertionError, match='measured again'):
    calibrate.choose_plan(other, str(workdir), processes)


@pytest.mark.slow
def test_only_layers_of_the_pattern_are_measured(monkeypatch):
  splitting.pretend_times(monkeypatch)
  assert list(_measured(_spec(2, **{'strategy.split_layers': 'conv2'})).layers) == ['conv2']
  spec = _spec(2, **{'strategy.split_layers': 'stage'})
  builders.assert_refused(["'stage': no convolution"], _measured, spec)


class _Convolutions(nn.Module):
  """Two convolutions along some number of axes."""

  axes: int

  @nn.compact
  def __call__(self, x, train: bool):
    del train
    for features in (3, 5):
      size = (2,) * self.axes
      x = nn.Conv(features, size, padding='VALID', name=f'conv{features}')(x)
    return x


@pytest.mark.parametrize('axes', [1, 3])
def test_a_part_of_a_convolution_along_other_axes(axes):
  """The first features are computed; the others' gradient is zero."""
  model = _Convolutions(axes)
  x = jax.ShapeDtypeStruct((2, *[5, 4, 3][:axes], 2), jnp.float32)
  variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, True), x)
  _, call = convolutions.find(model, variables, x)
  operands = workloads.operands(call)
  y, dx, dw = workloads.convolution(call, 2, True, operands)()
  x, kernel, dy = map(np.asarray, operands)
  windows = np.lib.stride_tricks.sliding_window_view(
    x, kernel.shape[:-2], tuple(range(1, 1 + axes))
  )
  windows = np.moveaxis(windows, 1 + axes, -1)
  expected = np.tensordot(windows, kernel[..., :2], axes + 1)
  np.testing.assert_allclose(y, expected, atol=1e-6)
  rows = tuple(range(1 + axes))
  kernel_gradient = np.tensordot(windows, dy[..., :2], (rows, rows))
  np.testing.assert_allclose(dw[..., :2], kernel_gradient, atol=1e-5)
  assert dx.shape == x.shape and dw.shape == kernel.shape
  assert not dw[..., 2:].any()


def test_steps_in_a_row_are_waited_for_once(monkeypatch):
  """The host starts a step during the one before, as in training."""
  spec, waits = _spec(1), []
  batches = iter([workloads.images(spec, 8)] * 5)  # the first one compiles
  run = workloads.step(build.create(spec), spec, 8, batches)
  monkeypatch.setattr(jax, 'block_until_ready', waits.append)
  run(3)
  assert len(waits) == 1 and len(list(batches)) == 1
