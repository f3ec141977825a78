"""The training step: the same numbers however it is divided."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import models
from anp_jax.cluster import preemption
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.training import train_step as step_lib
from tests import builders, stepping


@pytest.mark.slow
@pytest.mark.parametrize('devices, keys', [(8, {}), (4, {'fsdp': True}), (4, {'accumulate': 2})])
def test_loss_curve_is_that_of_one_device(x64, devices, keys):
  """Gradients through the weights, and the running statistics."""
  want, got = stepping.trained(20, 1), stepping.trained(20, devices, **keys)
  stepping.same_curve(got, want, stepping.TIGHT)
  stepping.assert_close(got[0], want[0], stepping.TIGHT)


def _plain_step(run, state, batch):
  """One update by hand: no mesh, no strategy, no optax, no objective."""
  d, params = run.config.data, state.params
  images = (np.float64(batch['image']) - d.mean) / np.float64(d.std)
  targets = np.full((len(images), stepping.CLASSES), stepping.SMOOTHING / stepping.CLASSES)
  targets[np.arange(len(images)), batch['label']] += 1 - stepping.SMOOTHING

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
    lambda g, p: g * min(1, clip / norm) + stepping.DECAY * p * (p.ndim > 1), gradients, params
  )
  after = jax.tree.map(lambda p, t: p - stepping.RATE * t, params, trace)
  hits = (logits.argmax(-1) == batch['label']).mean()
  return (
    after,
    trace,
    stats,
    {
      'loss': loss,
      'anp_top1': hits,
      'grad_norm': norm,
      'learning_rate': stepping.RATE,
      'finite': 1,
      'vote': 0,
    },
  )


def test_one_update_equals_one_by_hand(x64):
  run = stepping.divided_run(4)
  before, batch = stepping.weights_of(run.like), stepping.batch_of(0)
  params, trace, stats, metrics = _plain_step(run, before, batch)
  assert metrics['grad_norm'] > stepping.CLIP  # so that clipping is seen
  state, (got,) = run.steps(run.state(), [batch])
  stepping.assert_close(state.params, params, stepping.TIGHT)
  stepping.assert_close(state.stats, stats, stepping.TIGHT)
  moments = [
    leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state) if leaf.ndim
  ]
  stepping.assert_close(moments, jax.tree.leaves(trace), stepping.TIGHT)
  assert int(state.step) == 1
  for name, value in metrics.items():
    np.testing.assert_allclose(got[name], value, rtol=stepping.TIGHT, err_msg=name)


def test_rows_of_weight_0_count_for_nothing(x64):
  """Without batch norm the update is that of the other rows alone."""
  # Not clipped: that would hide a gradient of the right direction but size.
  config = stepping.config_of(**{'optimizer.clip_norm': 0.0})
  model = stepping.small_of(config, norm=False)
  run = stepping.Run(config, 4, model)
  batch = stepping.batch_of(0)
  # Uneven: the first device has no row that counts, the second one.
  kept_rows = np.array([5, 8, 9, 10, 11, 12, 13, 15])
  batch['weight'][:] = 0
  batch['weight'][kept_rows] = 1
  state, (got,) = run.steps(run.state(), [batch])

  rest = {k: v[kept_rows] for k, v in batch.items()}
  params, _, _, metrics = _plain_step(run, stepping.weights_of(run.like), rest)
  stepping.assert_close(state.params, params, stepping.TIGHT)
  for name, value in metrics.items():
    np.testing.assert_allclose(got[name], value, rtol=stepping.TIGHT, err_msg=name)


def test_rows_of_weight_0_are_seen_by_batch_norm_only(x64):
  config = stepping.config_of()
  run = stepping.Run(config, 2, stepping.small_of(config))
  batch = stepping.batch_of(0)
  batch['weight'][[3, 12]] = 0
  other = jax.tree.map(np.copy, batch)
  other['label'][[3, 12]] = (other['label'][[3, 12]] + 1) % stepping.CLASSES
  states = [run.steps(run.state(), [b]) for b in (batch, other)]
  stepping.assert_close(states[0], states[1], 0)
  other['image'][[3, 12]] = 255 - other['image'][[3, 12]]
  state, _ = run.steps(run.state(), [other])
  means = [s.stats['batch_stats']['norm']['mean'] for s in (states[0][0], state)]
  assert np.abs(means[0] - means[1]).max() > 1e-3


def test_a_batch_without_weight_changes_nothing_but_decay(x64):
  config = stepping.config_of()
  run = stepping.Run(config, 2, stepping.small_of(config, norm=False))
  batch = stepping.batch_of(0)
  batch['weight'][:] = 0
  before = stepping.weights_of(run.like).params
  state, (metrics,) = run.steps(run.state(), [batch])
  assert metrics['finite'] and metrics['loss'] == metrics['grad_norm'] == 0
  want = jax.tree.map(lambda p: p * (1 - stepping.RATE * stepping.DECAY * (p.ndim > 1)), before)
  stepping.assert_close(state.params, want, stepping.TIGHT)


@pytest.mark.slow
def test_averages_follow_their_recurrence(x64):
  config = stepping.config_of(ema=0.15)
  run = stepping.Run(config, 2, stepping.small_of(config))
  state = run.state()
  want = jax.device_get(state.average)
  for step in range(4):
    state, _ = run.steps(state, [stepping.batch_of(step)])
    # 0.1 at first, then 2/11 and more are cut to 0.15.
    decay = min(0.15, (1 + step) / (10 + step))
    new = jax.device_get({'params': state.params, 'stats': state.stats})
    want = jax.tree.map(lambda a, n, d=decay: d * a + (1 - d) * n, want, new)
    # The decay itself is a float32: 6e-8.
    stepping.assert_close(state.average, want, 1e-6)
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
  config = stepping.config_of('float32')
  run = stepping.Run(config, 1, stepping.small_of(config))
  state = run.state()
  assert state.average == {}
  assert state.evaluated() == (state.params, state.stats)


@pytest.mark.parametrize(
  'where, value', [('params', np.nan), ('params', np.inf), ('stats', np.nan), ('opt_state', np.inf)]
)
def test_what_is_not_finite_is_flagged(where, value):
  run = _flagged()
  assert run.steps(run.state(), [stepping.batch_of()])[1][0]['finite'] == 1

  def poison(state):
    leaves, treedef = jax.tree.flatten(getattr(state, where))
    # One number of the first array.
    i = next(i for i, leaf in enumerate(leaves) if leaf.ndim)
    leaves[i] = leaves[i].copy()
    leaves[i].flat[0] = value
    return state.replace(**{where: jax.tree.unflatten(treedef, leaves)})

  assert run.steps(run.state(poison), [stepping.batch_of()])[1][0]['finite'] == 0


@functools.cache
def _flagged():
  # Without clipping: a norm of infinity would turn the gradient into NaN.
  config = stepping.config_of('float32', **{'optimizer.clip_norm': 0.0})
  return stepping.Run(config, 4, stepping.small_of(config))


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
  batch = stepping.batch_of()
  assert run.steps(run.state(), [batch])[1][0]['vote'] == 0
  batch['vote'][:] = preemption.TIME_LIMIT
  batch['vote'][row] = preemption.STOP
  assert run.steps(run.state(), [batch])[1][0]['vote'] == preemption.STOP == 3


@pytest.mark.slow
def test_a_bfloat16_network_learns_a_batch():
  config = stepping.config_of('bfloat16')
  run = stepping.Run(config, 4, stepping.resnet_of(config))
  _, metrics = run.steps(run.state(), [stepping.batch_of()] * 30)
  losses = stepping.column(metrics)
  assert all(stepping.column(metrics, 'finite'))
  assert losses[-1] < losses[0] / 2


def test_the_state_is_donated():
  run = _flagged()
  state = run.state()
  old = jax.tree.leaves(state)
  new, _ = run.steps(state, [stepping.batch_of()])
  assert all(x.is_deleted() for x in old)
  assert not any(x.is_deleted() for x in jax.tree.leaves(new))


def _new_state(run):
  return state_lib.create(run.init, run.like, run.init.weights(run.like))


@pytest.mark.slow
def test_a_state_is_born_and_stays_where_its_parameters_lie():
  config = stepping.config_of('float32', sharding=stepping.FSDP, ema=0.9)
  run = stepping.Run(config, 4, stepping.small_of(config))
  state = _new_state(run)
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
    state, _ = run.steps(state, [stepping.batch_of()])
  # A function of the seed, not of the mesh.
  alone = stepping.Run(config, 1, stepping.small_of(config))
  stepping.assert_close(
    _new_state(run).params,
    _new_state(alone).params,
    1e-6,  # one float32 rounding: the shapes compile differently
  )
  config = stepping.config_of('float32', seed=1)
  other = stepping.Run(config, 1, stepping.small_of(config))
  different = _new_state(other).params
  same = _new_state(alone).params
  gap = np.abs(different['head']['kernel'] - same['head']['kernel'])
  assert gap.max() > 1e-3


@pytest.mark.slow
def test_a_users_module_with_dropout_trains():
  config = stepping.config_of('float32')
  config.model.name = 'tests.user_network:SmallNet'
  run = stepping.Run(config, 4, models.create(config, stepping.CLASSES, 'cpu', mesh_lib.DATA))
  assert run.model.drop == 0.5

  def loss(step):
    state = run.state(lambda s: s.replace(step=np.int32(step)))
    return run.steps(state, [stepping.batch_of()])[1][0]['loss']

  # The same step drops the same units; the next one others.
  assert loss(0) == loss(0) != loss(1)
  _, metrics = run.steps(run.state(), [stepping.batch_of()] * 40)
  losses = stepping.column(metrics)
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
  config = stepping.config_of('float32', **overrides)
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  builders.assert_refused(message, division.check, config, batch, mesh)


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
  config = stepping.config_of('float32', **overrides)
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  division.check(config, batch, mesh)
