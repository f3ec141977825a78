"""The training step: the same numbers however it is divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import config as config_lib, models
from anp_jax.cluster import preemption
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.training import train_step as step_lib
from tests import stepping

CLASSES = stepping.CLASSES
FSDP = stepping.FSDP
RATE = stepping.RATE
DECAY = stepping.DECAY
SMOOTHING = stepping.SMOOTHING
CLIP = stepping.CLIP
TIGHT = stepping.TIGHT
_config = stepping.config_of
_resnet = stepping.resnet_of
_small = stepping.small_of
_weights = stepping.weights_of
_batch = stepping.batch_of
_divided = stepping.divided_run
_trained = stepping.trained
_column = stepping.column
_assert_close = stepping.assert_close
_same_curve = stepping.same_curve
Run = stepping.Run

# Compiling is most of the time here; the arithmetic is what is tested.
pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.mark.slow
def test_fifty_steps_halve_the_loss(x64):
  _, metrics = _trained(50, 1)
  losses = _column(metrics)
  assert losses[-2:].mean() < losses[:2].mean() / 2
  # The rate of each step is the one that is shown with it.
  want = RATE * 0.98 ** (np.arange(50) // 2)
  np.testing.assert_allclose(_column(metrics, 'learning_rate'), want, TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices', [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8]
)
def test_loss_curve_is_that_of_one_device(x64, devices):
  want, got = _trained(50, 1), _trained(50, devices)
  _same_curve(got, want, 1e-9)
  _assert_close(got[0], want[0], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize('devices', [4])
def test_loss_curve_of_divided_parameters(x64, devices):
  want, got = _trained(50, 1), _trained(50, devices, fsdp=True)
  _same_curve(got, want, 1e-9)
  _assert_close(got[0], want[0], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
  'devices', [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8]
)
def test_loss_curve_in_float32(devices):
  # float32 rounds at 6e-8, and five steps multiply that by some ten.
  want, got = (_trained(5, 1, 'float32'), _trained(5, devices, 'float32'))
  np.testing.assert_allclose(_column(got[1]), _column(want[1]), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('devices, accumulate', [(1, 4), (4, 2)])
def test_micro_batches_are_one_large_batch(x64, devices, accumulate):
  """Gradients through the weights, and the running statistics."""
  want, got = (_trained(5, 1), _trained(5, devices, accumulate=accumulate))
  _same_curve(got, want, TIGHT)
  _assert_close(got[0], want[0], TIGHT)


def _plain_step(run, state, batch):
  """One update by hand: no mesh, no strategy, no optax, no objective."""
  d, params = run.config.data, state.params
  images = (np.float64(batch['image']) - d.mean) / np.float64(d.std)
  targets = np.full((len(images), CLASSES), SMOOTHING / CLASSES)
  targets[np.arange(len(images)), batch['label']] += 1 - SMOOTHING

  def loss_fn(params):
    logits, stats = run.model.apply(
      {'params': params, **state.stats},
      images,
      True,
      mutable=['batch_stats'],
      rngs={'dropout': jax.random.key(0)},
    )
    shifted = logits - logits.max(-1, keepdims=True)
    log = shifted - jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))
    return -(targets * log).sum() / len(images), (logits, stats)

  (loss, (logits, stats)), gradients = jax.device_get(
    jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
  )
  norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
  clip = run.config.optimizer.clip_norm or np.inf
  trace = jax.tree.map(
    lambda g, p: g * min(1, clip / norm) + DECAY * p * (p.ndim > 1), gradients, params
  )
  after = jax.tree.map(lambda p, t: p - RATE * t, params, trace)
  hits = (logits.argmax(-1) == batch['label']).mean()
  return (
    after,
    trace,
    stats,
    {
      'loss': loss,
      'anp_top1': hits,
      'grad_norm': norm,
      'learning_rate': RATE,
      'finite': 1,
      'vote': 0,
    },
  )


def test_one_update_equals_one_by_hand(x64):
  run = _divided(4)
  before, batch = _weights(run.like), _batch(0)
  params, trace, stats, metrics = _plain_step(run, before, batch)
  assert metrics['grad_norm'] > CLIP  # so that clipping is seen
  state, (got,) = run.steps(run.state(), [batch])
  _assert_close(state.params, params, TIGHT)
  _assert_close(state.stats, stats, TIGHT)
  moments = [
    leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state) if leaf.ndim
  ]
  _assert_close(moments, jax.tree.leaves(trace), TIGHT)
  assert int(state.step) == 1
  for name, value in metrics.items():
    np.testing.assert_allclose(got[name], value, rtol=TIGHT, err_msg=name)


def test_rows_of_weight_0_count_for_nothing(x64):
  """Without batch norm the update is that of the other rows alone."""
  # Not clipped: that would hide a gradient of the right direction but size.
  config = _config(**{'optimizer.clip_norm': 0.0})
  model = _small(config, norm=False)
  run = Run(config, 4, model)
  batch = _batch(0)
  # Uneven: the first device has no row that counts, the second one.
  kept_rows = np.array([5, 8, 9, 10, 11, 12, 13, 15])
  batch['weight'][:] = 0
  batch['weight'][kept_rows] = 1
  state, (got,) = run.steps(run.state(), [batch])

  rest = {k: v[kept_rows] for k, v in batch.items()}
  params, _, _, metrics = _plain_step(run, _weights(run.like), rest)
  _assert_close(state.params, params, TIGHT)
  for name, value in metrics.items():
    np.testing.assert_allclose(got[name], value, rtol=TIGHT, err_msg=name)


def test_rows_of_weight_0_are_seen_by_batch_norm_only(x64):
  config = _config()
  run = Run(config, 2, _small(config))
  batch = _batch(0)
  batch['weight'][[3, 12]] = 0
  other = jax.tree.map(np.copy, batch)
  other['label'][[3, 12]] = (other['label'][[3, 12]] + 1) % CLASSES
  states = [run.steps(run.state(), [b]) for b in (batch, other)]
  _assert_close(states[0], states[1], 0)
  other['image'][[3, 12]] = 255 - other['image'][[3, 12]]
  state, _ = run.steps(run.state(), [other])
  means = [s.stats['batch_stats']['norm']['mean'] for s in (states[0][0], state)]
  assert np.abs(means[0] - means[1]).max() > 1e-3


def test_a_batch_without_weight_changes_nothing_but_decay(x64):
  config = _config()
  run = Run(config, 2, _small(config, norm=False))
  batch = _batch(0)
  batch['weight'][:] = 0
  before = _weights(run.like).params
  state, (metrics,) = run.steps(run.state(), [batch])
  assert metrics['finite'] and metrics['loss'] == metrics['grad_norm'] == 0
  want = jax.tree.map(lambda p: p * (1 - RATE * DECAY * (p.ndim > 1)), before)
  _assert_close(state.params, want, TIGHT)


@functools.cache
def _mixed(devices, mixup=0.4):
  config = _config(**{'data.mixup': mixup})
  run = Run(config, devices, _small(config))
  return _column(run.steps(run.state(), [_batch(0)] * 3)[1])


# The model's batch norm is the user's own, over the axis it is handed.
@pytest.mark.slow
@pytest.mark.parametrize('devices', [2, 4, 8])
def test_mixup_on_any_number_of_devices(x64, devices):
  want = _mixed(1)
  np.testing.assert_allclose(_mixed(devices), want, rtol=TIGHT)
  assert np.abs(want / _mixed(1, 0.0) - 1).max() > 1e-3  # it does mix


@pytest.mark.slow
def test_averages_follow_their_recurrence(x64):
  config = _config(ema=0.15)
  run = Run(config, 2, _small(config))
  state = run.state()
  want = jax.device_get(state.average)
  for step in range(4):
    state, _ = run.steps(state, [_batch(step)])
    # 0.1 at first, then 2/11 and more are cut to 0.15.
    decay = min(0.15, (1 + step) / (10 + step))
    new = jax.device_get({'params': state.params, 'stats': state.stats})
    want = jax.tree.map(lambda a, n, d=decay: d * a + (1 - d) * n, want, new)
    # The decay itself is a float32: 6e-8.
    _assert_close(state.average, want, 1e-6)
  params, stats = state.evaluated()
  assert params is state.average['params']
  assert stats is state.average['stats']
  assert np.abs(params['head']['kernel'] - state.params['head']['kernel']).max()


@pytest.mark.parametrize(
  'decay, step, want',
  [
    (0.999, 0, 0.1),
    (0.999, 1, 2 / 11),
    (0.999, 8, 0.5),
    (0.999, 890, 0.99),
    (0.999, 8989, 0.999),
    (0.999, 10**6, 0.999),
    (0.05, 0, 0.05),
  ],
)
def test_averages_forget_the_start_soon(decay, step, want):
  actual = state_lib.ema_decay(decay, step)
  np.testing.assert_allclose(actual, want, rtol=1e-6)
  old = {'params': {'w': np.full(3, 8.0)}, 'stats': {'mean': np.ones(2), 'count': np.array(3)}}
  state = state_lib.TrainState(np.array(step), None, None, None, old)
  params, stats = {'w': np.zeros(3)}, {'mean': np.zeros(2), 'count': 7}
  params, stats = jax.tree.map(jnp.asarray, (params, stats))
  new = state_lib.averaged(decay, state, params, stats)
  np.testing.assert_allclose(new['params']['w'], 8 * want, rtol=1e-6)
  np.testing.assert_allclose(new['stats']['mean'], want, rtol=1e-6)
  assert new['stats']['count'] == 7  # no average of whole numbers


def test_without_averages_the_weights_themselves_are_evaluated():
  config = _config('float32')
  run = Run(config, 1, _small(config))
  state = run.state()
  assert state.average == {}
  assert state.evaluated() == (state.params, state.stats)


@pytest.mark.parametrize(
  'where, value', [('params', np.nan), ('params', np.inf), ('stats', np.nan), ('opt_state', np.inf)]
)
def test_what_is_not_finite_is_flagged(where, value):
  run = _flagged()
  assert run.steps(run.state(), [_batch()])[1][0]['finite'] == 1

  def poison(state):
    leaves, treedef = jax.tree.flatten(getattr(state, where))
    # One number of the first array.
    i = next(i for i, leaf in enumerate(leaves) if leaf.ndim)
    leaves[i] = leaves[i].copy()
    leaves[i].flat[0] = value
    return state.replace(**{where: jax.tree.unflatten(treedef, leaves)})

  assert run.steps(run.state(poison), [_batch()])[1][0]['finite'] == 0


@functools.cache
def _flagged():
  # Without clipping: a norm of infinity would turn the gradient into NaN.
  config = _config('float32', **{'optimizer.clip_norm': 0.0})
  return Run(config, 4, _small(config))


@pytest.mark.parametrize('finite', [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_one_group_that_is_not_finite_is_flagged(finite):
  """The numbers of two groups, of 3 and 1 examples, as one line of a run."""
  values = {
    'loss': (2.0, 6.0),
    'grad_norm': (1.0, 3.0),
    'learning_rate': (0.5, 0.5),
    'damaged': (4.0, 2.0),
    'finite': finite,
    'vote': (1.0, 2.0),
  }
  values = {name: jnp.array(x, jnp.float32) for name, x in values.items()}
  got = step_lib._mean_values(values, jnp.array([3.0, 1.0]))
  want = {'loss': 3.0, 'grad_norm': 1.5, 'learning_rate': 0.5, 'damaged': 6, 'vote': 2}
  want['finite'] = float(finite == (1, 1))
  assert got.keys() == want.keys()
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-6)


@pytest.mark.parametrize('row', [0, 7, 15])
def test_the_largest_vote_of_all_wins(row):
  run = _flagged()
  batch = _batch()
  assert run.steps(run.state(), [batch])[1][0]['vote'] == 0
  batch['vote'][:] = preemption.TIME_LIMIT
  batch['vote'][row] = preemption.STOP
  assert run.steps(run.state(), [batch])[1][0]['vote'] == preemption.STOP == 2


@pytest.mark.slow
def test_a_bfloat16_network_learns_a_batch():
  config = _config('bfloat16')
  run = Run(config, 4, _resnet(config))
  _, metrics = run.steps(run.state(), [_batch()] * 30)
  losses = _column(metrics)
  assert all(_column(metrics, 'finite'))
  assert losses[-1] < losses[0] / 2


def test_the_state_is_donated():
  run = _flagged()
  state = run.state()
  old = jax.tree.leaves(state)
  new, _ = run.steps(state, [_batch()])
  assert all(x.is_deleted() for x in old)
  assert not any(x.is_deleted() for x in jax.tree.leaves(new))


@pytest.mark.slow
def test_a_state_is_born_and_stays_where_its_parameters_lie():
  config = _config('float32', sharding=FSDP, ema=0.9)
  run = Run(config, 4, _small(config))
  state = state_lib.create(run.init, run.like)
  kernel = 'conv2', 'kernel'  # (3, 3, 6, 8)
  for _ in range(2):
    for tree in (state.params, state.average['params']):
      shards = tree[kernel[0]][kernel[1]].addressable_shards
      assert {s.data.shape for s in shards} == {(3, 3, 6, 2)}
      assert tree['head']['bias'].addressable_shards[0].data.shape == (3,)
    # Of (3, 3, 3, 6) no axis divides by four: it stays whole.
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 4]
    shapes = {m.addressable_shards[0].data.shape for m in moments}
    assert shapes == {(3, 3, 3, 6), (3, 3, 6, 2)}
    assert state.stats['batch_stats']['norm']['mean'].is_fully_replicated
    where = jax.tree.map(lambda x: x.sharding.spec, state)
    assert where == jax.tree.map(lambda s: s.sharding.spec, run.like)
    state, _ = run.steps(state, [_batch()])
  # A function of the seed, not of the mesh.
  alone = Run(config, 1, _small(config))
  _assert_close(
    state_lib.create(run.init, run.like).params,
    state_lib.create(alone.init, alone.like).params,
    1e-6,  # one float32 rounding: the shapes compile differently
  )
  config = _config('float32', seed=1)
  other = Run(config, 1, _small(config))
  different = state_lib.create(other.init, other.like).params
  same = state_lib.create(alone.init, alone.like).params
  gap = np.abs(different['head']['kernel'] - same['head']['kernel'])
  assert gap.max() > 1e-3


@pytest.mark.slow
def test_a_users_module_with_dropout_trains():
  config = _config('float32')
  config.model.name = 'tests.user_network:SmallNet'
  run = Run(config, 4, models.create(config, CLASSES, 'cpu', mesh_lib.DATA))
  assert run.model.drop == 0.5

  def loss(step):
    state = run.state(lambda s: s.replace(step=np.int32(step)))
    return run.steps(state, [_batch()])[1][0]['loss']

  # The same step drops the same units; the next one others.
  assert loss(0) == loss(0) != loss(1)
  _, metrics = run.steps(run.state(), [_batch()] * 40)
  losses = _column(metrics)
  assert losses[-5:].mean() < losses[:5].mean()


@pytest.mark.parametrize(
  'batch, devices, overrides, message',
  [
    (12, 8, {}, 'config.batch_size=12 does not divide by 8 devices'),
    (16, 4, {'accumulate': 3}, 'does not divide.*config.accumulate=3'),
    (16, 4, {'model.norm_group': 8}, 'norm_group=8.*4 images'),
    (24, 4, {'model.norm_group': 4}, 'norm_group=4.*6 images'),
    (16, 2, {'model.norm_group': 8, 'accumulate': 2}, 'norm_group=8.*4 images'),
    (16, 2, {'model.norm_group': 0, 'accumulate': 2}, 'not in 2 parts'),
    (12, 4, {'model.norm_group': 1, 'data.mixup': 0.2}, 'pair.*3 images'),
    (12, 4, {'model.norm_group': 1, 'data.cutmix': 0.2}, 'pair.*3 images'),
  ],
)
def test_a_batch_that_does_not_divide_is_refused(batch, devices, overrides, message):
  config = _config('float32', **overrides)
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  with pytest.raises(config_lib.ConfigError, match=message):
    division.check(config, batch, mesh)


@pytest.mark.parametrize(
  'batch, devices, overrides',
  [
    (16, 8, {}),
    (16, 2, {'model.norm_group': 4, 'accumulate': 2}),
    (12, 4, {'model.norm_group': 1}),
    (12, 4, {'model.norm_group': 0}),
    (16, 4, {'data.mixup': 0.2}),
    # Networks without batch norm have no groups that must be whole.
    (100, 1, {'model.name': 'lenet', 'model.norm_group': 32}),
    (100, 1, {'model.name': 'cifar10_full', 'model.norm_group': 0, 'accumulate': 2}),
    # Two devices share each row: the batch divides by four.
    (4, 8, {'model.norm_group': 1, 'mesh.model': 2}),
  ],
)
def test_a_batch_that_divides_is_taken(batch, devices, overrides):
  config = _config('float32', **overrides)
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  division.check(config, batch, mesh)
