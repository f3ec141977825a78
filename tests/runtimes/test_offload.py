"""Convolutions of which helpers compute some: devices that are in no mesh."""

from concurrent import futures
import itertools
import json
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax import train
from anp_jax.cluster import cluster_env
from anp_jax.cluster import preemption
from anp_jax.cluster import process_info
from anp_jax.config import command_line
from anp_jax.config import strategy as strategy_lib
from anp_jax.config import validation
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes import transport
from anp_jax.runtimes.calibration import calibrate
from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.runtimes.calibration import timing as timing_lib
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.runtimes.offload import operation
from anp_jax.runtimes.offload import remote
from anp_jax.runtimes.offload import timing
from anp_jax.system import xla_flags
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec
from tests import launching
from tests import splitting

# Compiling is most of the time here; the arithmetic is what is tested.
pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.fixture
def x64():
  """In all threads: programs call back from others than the test's."""
  jax.config.update('jax_enable_x64', True)
  yield
  jax.config.update('jax_enable_x64', False)


@pytest.fixture
def near():
  """Helpers of this process, one a device."""
  made = []

  def give(count):
    devices = jax.devices()[1 : 1 + count]
    made.extend(device_lib.LocalDevice(d, str(d)) for d in devices)
    return made

  yield give
  for helper in made:
    helper.close()


@pytest.fixture
def distant():
  """Helpers that are asked over Flight, as those of other processes are."""
  config, open_ = config_lib.base(), []

  def give(count):
    place = cluster_env.ClusterEnv('test', 0, 1)
    desk = remote.OffloadServer(
      config, place, 'token', jax.devices()[1 : 1 + count]
    )
    client = transport.connect(config, desk.address, 'token')
    open_.extend((client, desk))
    card = remote.describe(jax.devices()[1])
    helpers = [
      remote.RemoteDevice(client, i, f'far {i}', card) for i in range(count)
    ]
    open_.extend(helpers)
    return helpers

  yield give
  for one in reversed(open_):
    one.close()


@pytest.fixture(scope='module')
def whole():
  """Every network once on one device, synchronous."""
  kept = {}

  def make(**overrides):
    key = tuple(overrides.items())
    if key not in kept:
      kept[key] = splitting.trained(*splitting.parts('sync', 1, 1, **overrides))
    return kept[key]

  return make


def _same_step(helpers, whole, keys, **overrides):
  parts, mesh = splitting.parts(
    'kernel_split', 1, 1, helpers, **overrides, **keys,
    **{'strategy.helpers': ('processes',)},
  )  # fmt: skip
  found, values = splitting.trained(parts, mesh)
  want, want_values = whole(**overrides)
  splitting.same(found, want, splitting.TIGHT)
  np.testing.assert_allclose(
    values, want_values, rtol=splitting.TIGHT, atol=splitting.TIGHT
  )
  scores = parts.eval_step(found.params, found.stats, splitting.batch(mesh, 9))
  plain, plain_mesh = splitting.parts('sync', 1, 1, **overrides)
  want = plain.eval_step(
    want.params, want.stats, splitting.batch(plain_mesh, 9)
  )
  splitting.same(scores, want, splitting.TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
  'network, helpers, keys, more',
  [
    ('WithoutDropout', 1, {'strategy.shares': (2, 1)}, {}),
    ('WithoutDropout', 3, {'strategy.shares': (3, 0, 1, 2)}, {}),
    ('WithoutDropout', 7, {'strategy.shares': (5, 1, 1, 0, 3, 1, 2, 1)}, {}),
    ('WithOurLayers', 1, {'strategy.plan': 'conv2=0,10'}, {}),
    ('WithOurLayers', 1, {'strategy.plan': 'conv1=7,0; conv2=4,6'}, {}),
    ('WithOurLayers', 1, {'strategy.shares': (1, 1)}, {'accumulate': 2}),
    ('WithLayersUsedTwice', 1, {'strategy.shares': (2, 1)}, {}),
    ('WithMadeKernels', 1, {'strategy.shares': (2, 1)}, {}),
    # A frozen kernel: what helpers have of its gradient counts for nothing.
    ('WithoutDropout', 1, {'strategy.shares': (1, 1)},
     {'optimizer.multipliers': (('conv2', 0), ('conv1', 0.5))}),
  ],
)  # fmt: skip
def test_a_step_is_that_of_the_unsplit_network(
  x64, whole, near, network, helpers, keys, more
):
  name = {'model.name': f'tests.user_network:{network}'}
  _same_step(near(helpers), whole, keys, **name, **more)


@pytest.mark.parametrize('helpers', [1, 3])
def test_a_step_with_helpers_over_flight(x64, whole, distant, helpers):
  name = {'model.name': 'tests.user_network:WithOurLayers'}
  shares = {'strategy.shares': (2, 1, 3, 1)[: 1 + helpers]}
  _same_step(distant(helpers), whole, shares, **name)


def test_a_helper_that_is_given_nothing_is_heard(monkeypatch):
  monkeypatch.setattr(remote, '_PERIOD', 0.01)
  config, place = config_lib.base(), cluster_env.ClusterEnv('test', 0, 1)
  desks = [remote.OffloadServer(config, place, 'token', jax.devices()[1:2])
           for _ in range(3)]  # fmt: skip
  clients = [transport.connect(config, d.address, 'token') for d in desks]
  votes = remote.VotePoller(clients)
  assert votes.vote == preemption.CONTINUE
  # Of one that has gone nothing is heard, and the others are asked on.
  desks[0].close()
  desks[1].vote, desks[2].vote = preemption.STOP, preemption.TIME_LIMIT
  end = time.monotonic() + 30
  while votes.vote != preemption.STOP:
    assert time.monotonic() < end
    time.sleep(0.01)
  assert not any(desk.has_ended for desk in desks)
  votes.close()
  for one in (*clients, *desks[1:]):
    one.close()


@pytest.mark.soak
def test_a_resnet_is_that_of_the_unsplit_network(x64, whole, near):
  overrides = {'model.name': 'resnet18', 'model.width': 6}
  _same_step(near(1), whole, {'strategy.shares': (3, 1)}, **overrides)


@pytest.mark.slow
def test_images_have_no_gradient(near, monkeypatch):
  """Of the first convolution's input none is computed."""
  asked = []
  backward = device_lib.LocalDevice.backward

  def noted(self, task, dy, needs_dx):
    asked.append((task.x.shape[-1], needs_dx))
    return backward(self, task, dy, needs_dx)

  monkeypatch.setattr(device_lib.LocalDevice, 'backward', noted)
  float32 = {'model.dtype': 'float32', 'model.param_dtype': 'float32',
             'strategy.reduce_dtype': 'float32'}  # fmt: skip
  parts, mesh = splitting.parts(
    'kernel_split', 1, 1, near(1), **float32,
    **{'model.name': 'tests.user_network:WithOurLayers',
       'strategy.helpers': ('cpu:1',)},
  )  # fmt: skip
  splitting.trained(parts, mesh, steps=1)
  assert asked == [(7, True), (3, False)]


class _Rounded:
  """A helper whose gradients of a kernel are those that it is given."""

  def __init__(self, parts):
    self._parts = iter(parts)

  def backward(self, task, dy, needs_dx):
    del task, dy, needs_dx
    future = futures.Future()
    future.set_result(next(self._parts))
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
    operation.OffloadedConvolution(
      convolve, x, kernel, (3, 5), [_Rounded(half)]
    )
    for half in (parts[:8], parts[8:])
  ]
  for use in uses:
    for _ in range(8):
      use._start_backward(
        0, np.zeros((1, 8, 8, 8), jnp.bfloat16), needs_dx=False
      )
  own = jnp.zeros(kernel.shape, jnp.float32)
  (found,) = jax.jit(lambda g: operation.kernel_gradients([uses], [g]))(own)
  assert found.dtype == jnp.float32
  want = parts.astype(np.float64).sum(0)
  np.testing.assert_allclose(found, want, rtol=1e-6)


# Runs.


def _config(**overrides):
  overrides = {
    'data.source': 'synthetic', 'data.synthetic_classes': '12',
    'data.synthetic_examples': '64', 'data.image_size': '12',
    'data.resize': '12', 'model.kernels': '(8, 16)', 'batch_size': '8',
    'duration': '6 steps', 'schedule.warmup': '1 steps',
    'log.tensorboard': 'False', 'strategy.helpers': "('cpu:1',)", **overrides,
  }  # fmt: skip
  return command_line.load('configs/kernel_split_cifar10.py', overrides)


@pytest.mark.slow
def test_a_run_measures_plans_and_goes_on(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(calibrate, '_ROUNDS', (1, 1))
  train.run(_config(), str(tmp_path))
  said = capsys.readouterr().out
  assert ' (cpu:1), helpers from 1 on' in said
  assert f'offload  {device_lib.processor()} (cpu:1)\n' in said
  assert 'plan     conv2  16 features' in said
  kept = json.loads((tmp_path / 'kernel_split.json').read_text())
  assert kept['key']['helpers'] == [f'{device_lib.processor()} (cpu:1)']
  seconds = kept['costs']['layers']['conv2']['seconds']
  assert len(seconds) == 2 and all(t > 0 for row in seconds for t in row)
  # On the same devices the plan stands; without helpers there is none.
  train.run(_config(duration='8 steps'), str(tmp_path))
  assert 'continuing from step 6' in capsys.readouterr().out
  assert json.loads((tmp_path / 'kernel_split.json').read_text()) == kept
  # A run that is finished times nothing, on whatever devices.
  with monkeypatch.context() as m:
    m.delattr(calibrate, 'measure')
    elsewhere = _config(**{
      'duration': '8 steps', 'strategy.helpers': "('cpu:1', 'cpu:2')",
    })  # fmt: skip
    train.run(elsewhere, str(tmp_path))
  assert 'is finished: step 8 of 8' in capsys.readouterr().out
  alone = _config(**{'duration': '9 steps', 'strategy.helpers': '()'})
  alone.mesh.model, alone.mesh.data = 1, -1
  alone.strategy.name, alone.batch_size = 'sync', 8
  train.run(alone, str(tmp_path))
  assert 'continuing from step 8' in capsys.readouterr().out
  scores = train.run(_config(), str(tmp_path), mode='evaluate')
  assert scores['examples'] == 64


@pytest.mark.parametrize(
  'overrides, words',
  [
    ({'strategy.helpers': "('cpu:0',)"}, "'cpu:0' is the device that trains"),
    ({'strategy.helpers': "('cpu:99',)"}, "no 'cpu:99' here; expected cpu:0, "),
    ({'strategy.helpers': "('tpu:0',)"}, "no 'tpu:0' here; expected another"),
    ({'strategy.helpers': "('processes',)"}, 'there is no other process'),
    ({'strategy.shares': '(1, 2, 3)'}, 'expected 2, of the device that trains'),
    ({'mesh.data': '2'}, 'config.mesh (data=2, model=-1) does not fit 1 cpu'),
    ({'strategy.plan': 'conv1=4,4; conv3=8,8'}, "no convolution 'conv3'"),
  ],
)
def test_helpers_that_are_not_there(tmp_path, overrides, words):
  with pytest.raises(config_lib.ConfigError) as e:
    train.run(_config(**overrides), str(tmp_path))
  assert words in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize(
  'name, helpers, words',
  [
    ('kernel_split', "('cpu',)", "('cpu',): expected each once"),
    ('kernel_split', "('cpu:1', 'cpu:1')", 'expected each once'),
    ('sync', "('cpu:1',)", 'expected () where strategy.name is not kernel_sp'),
  ],
)
def test_bad_keys(name, helpers, words):
  with pytest.raises(config_lib.ConfigError) as e:
    validation.validate(
      _config(**{'strategy.name': name, 'strategy.helpers': helpers})
    )
  assert 'config.strategy.helpers' in str(e.value) and words in str(e.value)


@pytest.mark.slow
def test_what_a_helper_cannot_do_ends_the_run_by_name(tmp_path, monkeypatch):
  def full(self, *_):
    with self._context(np.float32):
      raise MemoryError('no room for the kernel')

  monkeypatch.setattr(device_lib.LocalDevice, '_forward', full)
  config = _config(**{'strategy.shares': '(1, 1)'})
  with pytest.raises(cluster.Failed) as e:
    train.run(config, str(tmp_path))
  name = f'{device_lib.processor()} (cpu:1)'
  assert str(e.value) == f'offload device {name}: no room for the kernel'


def test_platforms_may_differ_only_for_helpers():
  def shown(index, here, mixes):
    return {
      'index': index, 'host': f'node{index}', 'count': 2, 'platform': here,
      'problem': '', 'gpus': [], 'loopback': '', 'versions': {}, 'code': 'a',
      'mixes_platforms': mixes,
      'config': {}, 'command': {},
    }  # fmt: skip

  offloads = _config(**{'strategy.helpers': "('processes',)"})
  split = strategy_lib.find(offloads)
  assert split.mixes_platforms(offloads, 'train')
  assert not split.mixes_platforms(offloads, 'evaluate')
  assert not split.mixes_platforms(
    _config(**{'strategy.helpers': '()'}), 'train'
  )
  for mixes in (True, False):
    both = [shown(0, 'cpu', mixes), shown(1, 'tpu', mixes)]
    text = process_info.first_mismatch(both)
    assert (not text) == mixes
  assert 'rank 1 on node1 would compute on tpu' in text


def test_who_waits_has_threads_to_spare(monkeypatch):
  monkeypatch.setattr(xla_flags, '_devices_are_open', lambda: False)
  for set_before, want in ((None, True), ('3', False)):
    environment = {'JAX_PLATFORMS': 'cpu'}
    if set_before:
      environment['NPROC'] = set_before
    xla_flags.enable(environment, waiting=True)
    assert (int(environment['NPROC']) > 8) == want
  environment = {'JAX_PLATFORMS': 'cpu'}
  xla_flags.enable(environment)
  assert 'NPROC' not in environment


# The plan.


def _costs(rest, **layers):
  """Of layers with 24 features, of which each device does so many a second."""
  counts = (6, 12, 24)
  return timing.Costs(
    names=('trains', 'helps', 'helps too'),
    whole=(rest + sum(24 / rates[0] for rates in layers.values()),),
    layers={
      path: costs_lib.Layer(
        24, tuple(24 / r for r in rates), counts,
        tuple(tuple(n / r for n in counts) for r in rates), 1000, 1000, 1000,
      )
      for path, rates in layers.items()
    },
    others=0,
    link=costs_lib.Link((0.0, 0.0), (0.0, 0.0)),
    alike=False,
  )  # fmt: skip


def test_a_step_is_the_slowest_of_each_layer_and_the_rest():
  costs = _costs(5.0, first=(4, 2, 2), second=(8, 1, 1))
  assert costs.step({}) == costs.alone == pytest.approx(5 + 6 + 3)
  # Helpers compute nothing of a layer that is not split, and of the rest.
  plan = {'first': (12, 8, 4)}
  assert costs.step(plan) == pytest.approx(5 + max(3, 4, 2) + 3)
  assert costs.share == pytest.approx(9 / 14)
  assert costs.ideal() == pytest.approx(5 + 24 / 8 + 24 / 10)


@pytest.mark.parametrize('seed', range(6))
def test_no_division_is_better_than_the_plan(seed):
  random = np.random.default_rng(seed)
  costs = _costs(1.0, first=random.integers(1, 9, 3).tolist())
  plan = costs.best()
  every = [
    (a, b, 24 - a - b)
    for a, b in itertools.product(range(25), repeat=2)
    if a + b <= 24
  ]
  best = min(costs.step({'first': counts}) for counts in every)
  assert costs.step(plan) == pytest.approx(min(best, costs.step({})))


def test_times_are_put_where_they_belong(near, monkeypatch):
  """Every function is said to take what its layer, count and device tell."""

  def told(seconds):
    def make():
      run = lambda: None  # noqa: E731
      run.seconds = seconds
      return run

    return make

  def base(call, count):
    return count + 1000 * (call.layer == 'conv2')

  helpers = near(2)
  monkeypatch.setattr(calibrate, '_SECONDS', 0.0)
  monkeypatch.setattr(
    timing_lib, 'timed', lambda run: getattr(run, 'seconds', 0.0)
  )
  monkeypatch.setattr(timing_lib, '_step', lambda *_: told(9000.0))
  monkeypatch.setattr(
    timing_lib, '_convolution',
    lambda call, count, split, held: told(base(call, count) + 0.5 * split),
  )  # fmt: skip
  monkeypatch.setattr(
    timing, '_helping',
    lambda call, count, helper: told(
      base(call, count) * (2 + helpers.index(helper))
    ),
  )  # fmt: skip
  config = _config(accumulate='2')
  mesh = mesh_lib.create(config, jax.devices()[:1])
  objective = objective_lib.create(
    vocabulary_lib.Vocabulary(splitting.NAMES), config
  )
  spec = run_spec.RunSpec(config, mesh, objective, 8, 80, tuple(helpers))
  found = calibrate.measure(spec, cluster.Processes(config))
  assert found.whole == (9000.0,) and len(found.names) == 3
  for path, extra, counts in (
    ('conv1', 0, (2, 4, 8)), ('conv2', 1000, (4, 8, 16)),
  ):  # fmt: skip
    layer = found.layers[path]
    all_of_it = extra + counts[-1]
    # Twice: of two micro-batches each.
    want = [2 * r * all_of_it for r in (1, 2, 3)]
    assert layer.alone == pytest.approx(want)
    want = [
      [2 * (extra + n + 0.5) for n in counts],
      *([2 * r * (extra + n) for n in counts] for r in (2, 3)),
    ]
    np.testing.assert_allclose(layer.seconds, want)


# Processes.

_KEYS = {
  'model.dtype': 'float64', 'model.param_dtype': 'float64',
  'strategy.reduce_dtype': 'float64', 'schedule.name': 'constant',
  'schedule.warmup': '0 steps',
}  # fmt: skip
_HELPED = {
  'strategy.name': 'kernel_split', 'strategy.shares': '(2, 1)',
  'strategy.helpers': "('processes',)", 'mesh.model': '1',
}  # fmt: skip
_X64 = {'JAX_ENABLE_X64': '1'}


@pytest.mark.multiprocess
def test_a_process_helps_and_then_two_of_its_devices(tmp_path):
  def go(name, steps, processes, devices=1, **more):
    return launching.run(
      tmp_path / f'{name}{steps}', processes,
      launching.arguments(
        tmp_path / name, duration=f'{steps} steps', **_KEYS, **more
      ),
      devices, environment=_X64,
    )  # fmt: skip

  go('whole', 8, 1)
  go('split', 4, 2, **_HELPED)
  # Unlike numbers of devices, each of the second process a helper; what they
  # are worth is measured.
  said = go(
    'split', 8, 2, devices=[1, 2], **{**_HELPED, 'strategy.shares': '()'}
  )
  assert re.search(r'devices  0: .*; 1: .*; 2: .* \(rank 1 on', said[0])
  want, found = (launching.weights(tmp_path / n) for n in ('whole', 'split'))
  assert found.keys() == want.keys() and '8/params/conv1/kernel' in want
  for key, value in want.items():
    # Eight steps of sums in another order, in float64.
    scale = max(np.abs(value).max(initial=0), 1e-3)
    np.testing.assert_allclose(found[key], value, 0, 1e-11 * scale, err_msg=key)


def _started(ranks):
  end = time.monotonic() + 90
  while 'epoch' not in ranks.text(0):
    assert time.monotonic() < end, ranks.text(0)
    time.sleep(0.05)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
  'sent, shares, codes, words',
  [
    # The process that trains hears of it from its helper, idle as this may be.
    (signal.SIGTERM, '(1, 0)', [0, 0], 'run the same command to resume'),
    (signal.SIGKILL, '(2, 1)', [75, -9], 'rank 1 on '),
  ],
)
def test_a_helper_that_is_asked_to_stop_or_killed(
  tmp_path, sent, shares, codes, words
):
  arguments = launching.arguments(
    tmp_path / 'run', duration='20000 steps', **_KEYS,
    **{**_HELPED, 'strategy.shares': shares},
  )  # fmt: skip
  with launching.Ranks(
    tmp_path, 2, arguments, environment=_X64
  ) as ranks:  # fmt: skip
    _started(ranks)
    ranks.processes[1].send_signal(sent)
    assert ranks.wait(60) == codes, ranks.text(0)
    assert words in ranks.text(0)
    assert 'Traceback' not in ranks.text(0)
