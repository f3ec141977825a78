"""Convolutions that offload devices compute in part."""

from concurrent import futures
import contextlib
import itertools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from pyarrow import flight
import pytest

from anp_jax import cluster
from anp_jax.cluster import cluster_env
from anp_jax.runtimes import transport
from anp_jax.runtimes.calibration import costs as costs_lib, planner, timing
from anp_jax.runtimes.offload import (
  device as device_lib,
  offload_operation,
  remote_device,
  replaceable,
)
from tests import builders, splitting


@pytest.fixture
def local_devices():
  """Opens offload devices of this process."""
  devices = []

  def open_devices(count):
    for device in jax.devices()[1 : 1 + count]:
      devices.append(device_lib.LocalDevice(device, str(device)))
    return devices

  yield open_devices
  for device in devices:
    device.close()


@pytest.fixture
def x64():
  """In all threads: programs call back in threads of their own."""
  jax.config.update('jax_enable_x64', True)
  yield
  jax.config.update('jax_enable_x64', False)


@pytest.fixture
def remote_devices():
  """Opens offload devices that are called over Flight."""
  config = builders.config({'strategy.name': 'channel_split'})
  stack = contextlib.ExitStack()

  def open_devices(count):
    place = cluster_env.ClusterEnv('test', 0, 1, secret='5a' * 32)
    local = jax.devices()[1 : 1 + count]
    server = remote_device.OffloadServer(config, place, local)
    stack.enter_context(server)
    client = transport.Client(config, server.endpoint, place.secret)
    stack.enter_context(contextlib.closing(client))
    description = remote_device.describe(local[0])
    devices = [
      remote_device.RemoteDevice(client, i, f'remote {i}', description) for i in range(count)
    ]
    for device in devices:
      stack.enter_context(contextlib.closing(device))
    return devices

  with stack:
    yield open_devices


def _assert_trains_as_unsplit(devices, keys, **network):
  program, mesh = splitting.build(
    'channel_split', 1, 1, devices, **network, **keys, **{'strategy.offload_to': ('processes',)}
  )
  splitting.assert_trains_as_unsplit(program, mesh, **network)


@pytest.mark.slow
@pytest.mark.parametrize(
  'network, count, keys, more',
  [
    ('WithoutDropout', 3, {'strategy.shares': (3, 0, 1, 2)}, {}),
    ('WithOurLayers', 1, {'strategy.plan': 'conv1=7,0; conv2=0,10'}, {}),
    ('WithOurLayers', 1, {'strategy.shares': (1, 1)}, {'accumulate': 2}),
    ('WithLayersUsedTwice', 1, {'strategy.shares': (2, 1)}, {}),
    ('WithMadeKernels', 1, {'strategy.shares': (2, 1)}, {}),
    # A frozen kernel: the offload devices' gradients of it are dropped.
    (
      'WithoutDropout',
      1,
      {'strategy.shares': (1, 1)},
      {'optimizer.multipliers': (('conv2', 0), ('conv1', 0.5))},
    ),
  ],
)
def test_a_step_is_that_of_the_unsplit_network(x64, local_devices, network, count, keys, more):
  name = {'model.name': f'tests.user_network:{network}'}
  _assert_trains_as_unsplit(local_devices(count), keys, **name, **more)


@pytest.mark.slow
def test_a_step_over_flight_is_that_of_the_unsplit_network(x64, remote_devices):
  name = {'model.name': 'tests.user_network:WithOurLayers'}
  _assert_trains_as_unsplit(remote_devices(2), {'strategy.shares': (2, 1, 3)}, **name)


class _LostAt:
  """An offload device whose process is lost at one of its passes."""

  name, error, is_lost = 'lost', None, False

  def __init__(self, device, at: int, is_silent: bool):
    self._device, self._left, self._is_silent = device, at, is_silent

  def forward(self, *arguments):
    return self._passed(self._device.forward, arguments)

  def backward(self, task, dy, needs_dx):
    assert needs_dx == (task.x.shape[-1] != 3)  # images need no gradient
    dx, dkernel = self._device.backward(task, dy, needs_dx)
    return dx and self._passed(lambda: dx), self._passed(lambda: dkernel)

  def lose(self):
    self.is_lost = True

  def _passed(self, start, arguments=()):
    self._left -= 1
    if self._left >= 0:
      return start(*arguments)
    lost = futures.Future()
    if self._is_silent:  # until the coordinator has missed it
      threading.Timer(0.05, self.lose).start()
    else:
      self.is_lost = True
      lost.set_exception(flight.FlightUnavailableError('gone'))
    return lost


@pytest.mark.slow
# Steps have two convolutions of two passes, the second one with two results.
@pytest.mark.parametrize(
  'at, is_silent', [(0, True), (3, False), *(builders.soak(n, n % 2 > 0) for n in (1, 2, 4, 8))]
)
def test_a_step_whose_device_is_lost_is_that_of_the_unsplit_network(
  x64, local_devices, at, is_silent, monkeypatch
):
  monkeypatch.setattr(replaceable, '_POLL', 0.01)
  present, other, substitute = local_devices(3)
  lost = _LostAt(other, at, is_silent)
  devices = [present, replaceable.ReplaceableDevice(lost, substitute)]
  name = {'model.name': 'tests.user_network:WithOurLayers'}
  _assert_trains_as_unsplit(devices, {'strategy.shares': (2, 1, 2)}, **name)
  assert lost.is_lost and devices[1].is_lost and devices[1].error is None


def test_an_error_of_a_device_that_is_there_is_not_hidden(monkeypatch):
  monkeypatch.setattr(replaceable, '_POLL', 0.01)
  monkeypatch.setattr(replaceable, '_LOSS_SEEN_WITHIN', 0.05)
  future = futures.Future()
  future.set_exception(flight.FlightInternalError('no memory'))
  device = types.SimpleNamespace(name='bad', is_lost=False, forward=lambda *_: future)
  bad = replaceable.ReplaceableDevice(device, None)
  task = types.SimpleNamespace(number=1)
  with pytest.raises(flight.FlightInternalError, match='no memory'):
    bad.forward(task, None, None, keep=True).result()


@pytest.mark.parametrize(
  'error',
  [
    pa.ArrowInvalid('FlightClient is closed'),
    ValueError('7 bytes, expected 8'),
    MemoryError('no room'),
    flight.FlightInternalError('broken'),
    futures.CancelledError(),
  ],
  ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize('name', ['y', 'dx', 'dkernel'])
def test_no_error_of_a_lost_device_ends_the_run(error, name):
  """It is lost while its answer is waited for, which then is an error."""
  device = types.SimpleNamespace(name='bad', is_lost=False)

  class _Failing(futures.Future):
    def result(self, timeout=None):
      device.is_lost = True
      return super().result(timeout)

  failing = _Failing()
  failing.set_exception(error)
  done = futures.Future()
  done.set_result('by the substitute')
  device.forward = lambda *_: failing
  device.backward = lambda *_: (failing, failing)
  substitute = types.SimpleNamespace(
    forward=lambda *_, **__: done, backward=lambda *_: (done, done)
  )
  replaced = replaceable.ReplaceableDevice(device, substitute)
  task = types.SimpleNamespace(number=1)
  results = {'y': replaced.forward(task, None, None, keep=True)}
  if name != 'y':
    device.is_lost = False
    results['dx'], results['dkernel'] = replaced.backward(task, None, True)
  assert results[name].result() == 'by the substitute'


def test_a_closed_client_means_a_lost_device_and_a_refused_request_does_not(remote_devices):
  """A process that was started again has another client."""
  (device,) = remote_devices(1)
  task = types.SimpleNamespace(number=1, y=jax.ShapeDtypeStruct((1,), 'f4'))
  device._installed.add(1)  # which its process does not know
  x = np.zeros(1, np.float32)
  with pytest.raises(flight.FlightServerError, match='refused'):
    device.forward(task, x, x, keep=True).result(20)
  assert not device.is_lost and device.error
  device._client.close()
  with pytest.raises(pa.ArrowInvalid, match='FlightClient is closed'):
    device.forward(task, x, x, keep=True).result(20)
  assert device.is_lost


class _Replay:
  """An offload device that returns given gradients of a kernel."""

  def __init__(self, gradients):
    self._gradients = iter(gradients)

  def backward(self, task, dy, needs_dx):
    del task, dy, needs_dx
    future = futures.Future()
    future.set_result(next(self._gradients))
    return None, future


def test_gradients_in_bfloat16_are_added_in_float32():
  """Over micro-batches and over the uses of a layer."""
  random = np.random.default_rng(0)
  parts = random.normal(1, 0.1, (16, 3, 3, 2, 5)).astype(jnp.bfloat16)
  x = jax.ShapeDtypeStruct((1, 8, 8, 2), jnp.bfloat16)
  kernel = jax.ShapeDtypeStruct((3, 3, 2, 8), jnp.bfloat16)

  def convolve(x, kernel, platform=None):
    del platform
    return jax.lax.conv_general_dilated(
      x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )

  uses = [
    offload_operation.OffloadedConvolution(convolve, x, kernel, (3, 5), [_Replay(half)])
    for half in (parts[:8], parts[8:])
  ]
  for use in uses:
    for _ in range(8):
      use._start_backward(0, np.zeros((1, 8, 8, 8), jnp.bfloat16), needs_dx=False)
  local = jnp.zeros(kernel.shape, jnp.float32)
  (gradient,) = jax.jit(lambda g: offload_operation.kernel_gradients([uses], [g]))(local)
  assert gradient.dtype == jnp.float32
  expected = parts.astype(np.float64).sum(0)
  np.testing.assert_allclose(gradient, expected, rtol=1e-6)


# The cost model.


def _costs(rest, **rates):
  """Costs of a training device and two offload devices.

  Args:
    rest: seconds of everything else.
    **rates: by layer, features a second of each device.
  """
  layers = {path: splitting.layer(*r) for path, r in rates.items()}
  fields = splitting.costs(layers, rest).to_json()
  fields['unsplit'] = fields['unsplit'][:1]
  return costs_lib.OffloadCosts.from_json(fields)


def test_a_step_is_the_slowest_of_each_layer_and_the_rest():
  costs = _costs(5.0, first=(4, 2, 2), second=(8, 1, 1))
  assert costs.step_seconds({}) == costs.alone == pytest.approx(5 + 6 + 3)
  # Offload devices compute nothing of the rest, nor of a layer not split.
  plan = {'first': (12, 8, 4)}
  assert costs.step_seconds(plan) == pytest.approx(5 + max(3, 4, 2) + 3)
  assert costs.ideal_seconds() == pytest.approx(5 + 24 / 8 + 24 / 10)


@pytest.mark.parametrize('seed', range(6))
def test_no_division_is_better_than_the_plan(seed):
  random = np.random.default_rng(seed)
  costs = _costs(1.0, first=random.integers(1, 9, 3).tolist())
  divisions = [(a, b, 24 - a - b) for a, b in itertools.product(range(25), repeat=2) if a + b <= 24]
  best = min(costs.step_seconds({'first': counts}) for counts in divisions)
  expected = pytest.approx(min(best, costs.step_seconds({})))
  assert costs.step_seconds(planner.best_plan(costs)) == expected


def test_times_are_put_where_they_belong(local_devices, monkeypatch):
  """A program's seconds follow from its layer, count and device."""

  def seconds(call, count):
    return count + 1000 * (call.layer == 'conv2')

  devices = local_devices(2)
  splitting.pretend_times(
    monkeypatch,
    step=lambda *_: splitting.lasting(9000.0),
    convolution=lambda call, count, split, _: splitting.lasting(seconds(call, count) + 0.5 * split),
    offloaded_convolution=lambda call, count, device: splitting.lasting(
      seconds(call, count) * (2 + devices.index(device))
    ),
  )
  config = splitting.two_convolutions(accumulate='2')
  spec = splitting.spec(config, splitting.mesh(1, 1), offload_devices=devices)
  costs = timing.Timing(spec, cluster.Processes(config)).costs()
  assert costs.unsplit == [9000.0] and len(costs.names) == 3
  splitting.assert_times_of_two_convolutions(costs, rates=(1, 2, 3), split=(0.5, 0, 0))
