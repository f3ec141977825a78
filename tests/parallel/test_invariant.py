"""The strategy `invariant`: the same bits on any number of devices."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.config import optimizers
from anp_jax.data.input import stream
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.invariant import invariant_step as invariant
from anp_jax.system import cores, onednn
from anp_jax.tools.portability import compiled_collectives
from anp_jax.training import build
from tests import builders, launching, programs, small_networks, stepping

SHARDS, BATCH, SIDE = 8, 32, 16
# Of this process's pool, whose size JAX has decided: a run's command line
# decides it before JAX starts, see test_invariant_processes.py.
THREADS = max(8, cores.count())


def _config(**overrides):
  return builders.config(
    {
      'batch_size': BATCH,
      'duration': '1000 steps',
      'data.image_size': SIDE,
      'model.name': 'resnet18',
      'model.width': 8,
      'model.norm_group': 2,
      'optimizer.learning_rate': 0.02,
      'schedule.warmup': '5 steps',
      'strategy.name': 'invariant',
      'strategy.logical_shards': SHARDS,
      'strategy.threads': THREADS,
      **overrides,
    }
  )


def _batch(step, size):
  # Examples that could not be read: sums of weights are no constant.
  weight = (np.random.default_rng(step).random(size) > 0.1).astype('float32')
  return programs.batch(step, size, SIDE) | {'weight': weight}


def _train(program, steps):
  """The host's copy of the state after steps, and losses."""
  parts, step = program
  run = parts.spec
  batches = (programs.put(_batch(i % 4, run.batch_size), run.mesh) for i in range(steps))
  state, values = programs.train(parts, batches, step)
  return jax.device_get(state), values[:, 0].tolist()


def _compiled(config, devices):
  parts = programs.build(config, devices)
  batch = build.abstract_batch(config, parts.spec.mesh, config.batch_size)
  return parts, parts.train_step.lower(parts.abstract_state, batch).compile()


def _differing(got, want):
  """Names of the leaves that differ in a bit."""
  got, want = (mesh_lib.leaves_by_name(jax.tree.map(np.asarray, tree)) for tree in (got, want))
  assert got.keys() == want.keys()
  return [name for name in got if got[name].tobytes() != want[name].tobytes()]


# The sums of the tree, written out.
_TREES = {
  3: lambda a: (a[0] + a[1]) + a[2],
  6: lambda a: ((a[0] + a[1]) + (a[2] + a[3])) + (a[4] + a[5]),
  7: lambda a: ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + a[6]),
  8: lambda a: ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])),
  12: lambda a: (
    (((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7])))
    + ((a[8] + a[9]) + (a[10] + a[11]))
  ),
}


def _shards(count):
  return np.random.default_rng(0).normal(size=(count, 1001)).astype('float32')


@pytest.mark.parametrize('count', _TREES)
def test_a_tree_adds_in_pairs(count):
  x = _shards(count)
  want = _TREES[count](x)
  got = jax.jit(invariant.tree_sum)(jnp.asarray(x))
  np.testing.assert_array_equal(got, want)
  # In another order bits differ: the test can fail.
  assert (np.add.reduce(x[::-1]) != want).any()


@pytest.mark.parametrize(
  'count, devices',
  [
    (12, 1),
    (12, 4),
    (6, 2),
    (7, 7),
    *(
      builders.soak(*case)
      for case in ((12, 2), (12, 3), (12, 6), (6, 1), (6, 3), (6, 6), (3, 1), (3, 3), (8, 4))
    ),
  ],
)
def test_devices_add_their_shards_in_the_tree(count, devices):
  """Gradients, metrics and scores have the bits of the tree written out."""
  x = _shards(count)
  config = _config(**{'strategy.logical_shards': count})
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  strategy = invariant.InvariantStep(config, {'kernel': mesh_lib.P()})

  def shard(x):
    shards = [({'kernel': row.reshape(7, 143)}, (row[0], row[:5]), jnp.int32(1)) for row in x]
    gradients, metrics, ones = strategy.add_shards(shards)
    scores = strategy.sum_scores((metrics, ones))
    return *strategy.reduce(gradients, metrics), scores

  summed = programs.mapped(shard, mesh, mesh_lib.P(mesh_lib.BATCH), mesh_lib.P())
  gradients, metrics, (scores, ones) = jax.device_get(summed(x))
  want = _TREES[count](x)
  np.testing.assert_array_equal(gradients['kernel'].ravel(), want)
  for first, row in (metrics, scores):
    assert first == want[0]
    np.testing.assert_array_equal(row, want[:5])
  assert ones == count
  # Eleven sums of twelve, each exact to 2^-24 of a partial sum below ten.
  exact = x.astype('float64').sum(0)
  np.testing.assert_allclose(want, exact, rtol=0, atol=11 * 10 * 2**-24)


_CASES = {
  'everything': {
    'ema': 0.99,
    'data.mixup': 0.2,
    'data.cutmix': 1.0,
    'optimizer.clip_norm': 0.5,
    'optimizer.weight_decay': 1e-3,
    'label_smoothing': 0.1,
  },
  **{
    name: {
      'optimizer.name': name,
      'optimizer.learning_rate': 1e-3,
      'model.name': 'tests.user_network:PlainNet',
    }
    for name in optimizers.OPTIMIZERS
  },
  # Convolutions over and in larger maps, batch norm, and what XLA computes.
  'onednn': {
    'model.name': 'tests.small_networks:ResNet',
    'model.cpu_library': 'onednn',
    'model.norm_group': 4,
  },
  # Six shards of a device are three sums of the tree.
  **{
    f'twelve of {name}': {
      'strategy.logical_shards': 12,
      'batch_size': 48,
      'model.name': name,
      'ema': 0.99,
      'optimizer.clip_norm': 0.5,
    }
    for name in ('tests.user_network:PlainNet', 'tests.user_network:SmallNet', 'resnet18')
  },
  # Depthwise, grouped and gated networks.
  **{name: {'model.name': name} for name in small_networks.NAMES},
}


# Two hundred in `make soak`.
_STEPS = int(os.environ.get('ANP_STEPS', 30))


@functools.cache
def _program(case, devices):
  return _compiled(_config(**_CASES[case]), devices)


@functools.cache
def _alone(case, steps):
  return _train(_program(case, 1), steps)


def _marks(case, devices):
  if case == 'onednn':
    absent = pytest.mark.skipif(
      onednn.find() is None, reason=f'no oneDNN: {onednn.missing_reason()}'
    )
    return pytest.mark.slow if devices == 8 else pytest.mark.soak, absent
  is_slow = (case, devices) in (
    ('adamw', 8),
    ('twelve of tests.user_network:PlainNet', 2),
    ('tests.small_networks:SEResNeXt', 4),
  )
  return (pytest.mark.slow if is_slow else pytest.mark.soak,)


@pytest.mark.parametrize(
  'case, steps, devices',
  [
    pytest.param(
      case, {'everything': _STEPS, 'onednn': 8}.get(case, 5), devices, marks=_marks(case, devices)
    )
    for case in _CASES
    for devices in ((2, 3, 4, 6) if case.startswith('twelve') else (2, 4, 8))
  ],
)
def test_no_bit_depends_on_the_number_of_devices(case, steps, devices):
  want, losses = _alone(case, steps)
  assert np.isfinite(losses).all() and len(set(losses)) > steps / 2
  program = _program(case, devices)
  if case == 'onednn':
    assert 'anp_onednn' in program[1].shard.as_text()
  got, again = _train(program, steps)
  assert not _differing(got, want)
  assert again == losses


@pytest.mark.soak
def test_sums_by_device_do_differ():
  """What the strategy is there for: `sync` fails this comparison."""
  config = _config(**_CASES['sgd'], **{'strategy.name': 'sync'})
  want, _ = _train(_compiled(config, 1), 3)
  got, _ = _train(_compiled(config, 4), 3)
  assert 'params/conv1/bias' in _differing(got, want)


@pytest.mark.slow
def test_the_sums_are_those_of_sync():
  """In float64: another order of sums costs 1e-15 each, over 2 steps."""
  keys = {**launching.FLOAT64, 'model.name': 'tests.user_network:PlainNet'}
  with jax.enable_x64(True):
    sync = _config(**keys, **{'strategy.name': 'sync'})
    want, _ = _train(_compiled(sync, 1), 2)
    got, _ = _train(_compiled(_config(**keys), 4), 2)
  stepping.assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices, shards, sums',
  [
    builders.soak(2, 8, 1),
    builders.soak(4, 8, 1),
    (8, 8, 1),
    builders.soak(3, 12, 1),
    builders.soak(4, 12, 3),
  ],
)
def test_it_sends_what_sync_sends(devices, shards, sums):
  """Bytes that a device sends, of the compiled programs."""
  sent = {}
  for name in ('sync', 'invariant'):
    keys = {'strategy.name': name, 'model.name': 'lenet', 'batch_size': 96}
    config = _config(**keys, **{'strategy.logical_shards': shards})
    parts, program = _compiled(config, devices)
    # A ring's sum sends all but its own part twice, either half of it once.
    halves = {'all-reduce': 2, 'all-to-all': 1, 'all-gather': 1}
    rows = compiled_collectives.totals(compiled_collectives.compiled(program.as_text()))
    sent[name] = sum(halves[r['kind']] * r['bytes'] for r in rows)
  parameters = sum(s.size for s in jax.tree.leaves(parts.abstract_state.params))
  assert sent['sync'] > 2 * 4 * parameters
  assert 0.95 < sent['invariant'] / sent['sync'] / ((sums + 1) / 2) <= 1.1


@pytest.mark.parametrize(
  'keys, devices, message',
  [
    (
      {'batch_size': 48},
      3,
      'logical_shards=8: 3 devices do not divide it, only 1, 2, 4, 8 do; '
      'expected a multiple of 3, the nearest is 6, the same for',
    ),
    # No multiple of 3 divides 32: the batch is refused next.
    ({}, 3, 'a multiple of 3, the nearest is 9, the same'),
    ({'strategy.logical_shards': 4}, 8, 'of 8, the nearest is 8, the same'),
    (
      {'strategy.logical_shards': 12},
      2,
      'batch_size=32 does not divide by config.strategy.logical_shards=12; '
      'the nearest that does is 36',
    ),
    ({'accumulate': 2}, 2, 'config.accumulate=2: expected 1 with'),
    ({'strategy.threads': 7}, 1, 'threads=7: this process has 8 CPU devices'),
    (
      {'strategy.threads': THREADS + 1},
      1,
      f'{THREADS} threads .NPROC is not set.*expected NPROC={THREADS + 1}',
    ),
    ({'strategy.reduce_dtype': 'bfloat16'}, 2, "reduce_dtype='bfloat16': exp"),
    ({'sharding': (('.*', 'fsdp'),)}, 2, "expected 'replicate' alone"),
    ({'model.norm_group': 0}, 2, 'norm_group=0: statistics of the whole'),
    ({'model.norm_group': 8}, 2, 'norm_group=8: a device computes 4 images'),
    ({'batch_size': 0}, 1, 'config.batch_size=0: expected a number of images where strategy'),
  ],
)
def test_what_cannot_keep_the_promise_is_refused(keys, devices, message):
  builders.assert_refused(message, lambda: programs.build(_config(**keys), devices))


@pytest.mark.parametrize('name, axis', [('invariant', None), ('sync', 'data')])
def test_a_module_is_given_the_axis_of_devices_by_other_strategies(name, axis):
  keys = {'strategy.name': name, 'model.name': 'tests.user_network:SmallNet'}
  assert programs.build(_config(**keys), 2).model.axis_name == axis


@pytest.mark.parametrize('devices', [1, 2, 8])
def test_a_batch_of_evaluation_is_whole_shards(devices):
  config = _config(**{'eval.batch_size': 20})
  # Twice eight shards of three images, on any number of devices.
  assert stream.evaluation_batch(config, 1000, devices) == 24
  assert stream.evaluation_batch(config, 5, devices) == 8


@pytest.mark.parametrize('name', ['NPROC', 'PJRT_NPROC'])
def test_a_pool_that_the_environment_names_is_refused(monkeypatch, name):
  threads = THREADS + 3
  monkeypatch.setenv(name, str(threads))
  text = f'pool of this process has {threads} threads (NPROC is {threads})'
  builders.assert_refused([text], programs.build, _config(), 2)
  programs.build(_config(**{'strategy.threads': threads}), 2)


def test_a_gpu_without_deterministic_algorithms_is_refused(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=false')
  text = 'on a gpu needs XLA_FLAGS=--xla_gpu_deterministic_ops=true; XLA_FL'
  builders.assert_refused([text], invariant.check, _config(), 2, 'gpu')
  monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_deterministic_ops=true')
  invariant.check(_config(), 2, 'gpu')
