"""The strategy `local_sgd`: groups that exchange weights now and then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import config as config_lib, train
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel import division, mesh as mesh_lib
from anp_jax.parallel.local_sgd import exchanges
from anp_jax.system import cores
from anp_jax.tools.portability import compiled_collectives
from anp_jax.training import build
from tests import builders, launching, programs, serving, splitting, stepping, user_network

BATCH, DECAY, CLIP = splitting.BATCH, splitting.DECAY, splitting.CLIP
CLASSES, RATE, MOMENTUM = 12, 0.1, 0.9
# float64 rounds at 1e-16; sums in another order were seen to differ by 1e-14
# after twenty steps.
TIGHT = 1e-11


def _config(**overrides):
  keys = {
    'model.name': 'tests.user_network:WithoutDropout',
    'optimizer.learning_rate': RATE,
    'optimizer.momentum': MOMENTUM,
  }
  return splitting.config('local_sgd', **keys | overrides)


def _train(config, devices, steps, change=lambda batch: batch):
  """The parts, the device's state after steps, and each step's metrics."""
  parts = programs.build(config, devices)
  batches = [change(programs.batch(i)) for i in range(steps)]
  run = parts.spec
  return parts, *stepping.steps(
    parts.train_step, parts.new_state(), batches, run.mesh, run.objective
  )


def _assert_close(got, want, tolerance=TIGHT):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, want)
  stepping.assert_close(got, want, tolerance)


_LINEAR = {'model.name': 'tests.user_network:PlainNet', 'optimizer.clip_norm': 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
  'optimizer, devices', [('sgd', 1), ('sgd', 4), ('momentum', 4), builders.soak('sgd', 8)]
)
def test_an_exchange_every_step_is_synchronous_training(x64, optimizer, devices):
  """Where updates are linear in the gradient, and there are no groups else."""
  keys = {**_LINEAR, 'optimizer.name': optimizer, 'strategy.period': 1}
  if optimizer == 'momentum':
    keys['strategy.moments'] = 'average'
  parts, state, metrics = _train(_config(**keys), devices, 8)
  _, want, losses = _synchronous(optimizer)
  _assert_close(parts.eval_state_fn(state).params, want.params)
  for got, loss in zip(metrics, losses, strict=True):
    for name in ('loss', 'anp_top1', 'learning_rate', 'finite', 'damaged'):
      np.testing.assert_allclose(got[name], loss[name], 1e-6, err_msg=name)


@functools.cache
def _synchronous(optimizer):
  keys = {**_LINEAR, 'optimizer.name': optimizer, 'strategy.name': 'sync'}
  return _train(_config(**keys), 1, 8)


class ByHand:
  """Groups of the small network, each trained alone: no mesh, no optax."""

  def __init__(self, config, start):
    self.config = config
    self.strategy = config.strategy
    self.net = user_network.WithoutDropout(CLASSES, dtype='float64', param_dtype='float64')
    self.groups = [
      jax.tree.map(
        np.array,
        {
          'params': start.params,
          'stats': start.stats,
          'trace': jax.tree.map(np.zeros_like, start.params),
          'average': {'params': start.params, 'stats': start.stats},
        },
      )
      for _ in range(self.strategy.groups)
    ]
    self.steps = 0
    self.step = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

  def _loss(self, params, stats, images, labels):
    d = self.config.data
    images = (images.astype('float64') - jnp.array(d.mean)) / jnp.array(d.std)
    logits, stats = self.net.apply(
      {'params': params, **stats}, images, True, mutable=['batch_stats']
    )
    log = logits - jax.scipy.special.logsumexp(logits, -1, keepdims=True)
    return -log[jnp.arange(len(labels)), labels].mean(), stats

  def train(self, batch):
    losses = []
    for i, group in enumerate(self.groups):
      size = BATCH // len(self.groups)
      rows = slice(i * size, (i + 1) * size)
      (loss, group['stats']), gradient = jax.device_get(
        self.step(group['params'], group['stats'], batch['image'][rows], batch['label'][rows])
      )
      losses.append(loss)
      # Of a group's own gradient, not of all.
      norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
      assert norm > CLIP  # so that clipping is seen
      gradient = jax.tree.map(
        lambda g, p, norm=norm: g * CLIP / norm + DECAY * p * (p.ndim > 1),
        gradient,
        group['params'],
      )
      group['trace'] = jax.tree.map(lambda t, g: MOMENTUM * t + g, group['trace'], gradient)
      group['params'] = jax.tree.map(lambda p, t: p - RATE * t, group['params'], group['trace'])
      # The decay is a number in float32.
      decay = np.float32(1 + self.steps) / np.float32(10 + self.steps)
      rate = float(1 - min(np.float32(self.config.ema), decay))
      group['average'] = jax.tree.map(
        lambda a, x, rate=rate: a + rate * (x - a),
        group['average'],
        {'params': group['params'], 'stats': group['stats']},
      )
    self.steps += 1
    if self.steps % int(self.strategy.period) == 0:
      self._exchange()
    return np.mean(losses)

  def mean(self, name):
    return jax.tree.map(lambda *x: sum(x) / len(x), *(g[name] for g in self.groups))

  def _exchange(self):
    names = ['params', 'stats', 'average']
    names += ['trace'] * (self.strategy.moments == 'average')
    new = {name: self.mean(name) for name in names}
    for group in self.groups:
      group.update(new)


_CASES = {
  'average': {'strategy.moments': 'average'},
  'keep': {'strategy.groups': 4},
  'divided': {'sharding': (('.*', 'fsdp'),)},
}
# The others are for `make soak`.
_MARKS = {('average', 4): (), ('keep', 1): pytest.mark.slow}
_MARKS |= dict.fromkeys([('average', 8), ('divided', 4)], pytest.mark.slow)


@pytest.mark.parametrize(
  'case, devices',
  [
    pytest.param(case, devices, marks=_MARKS.get((case, devices), pytest.mark.soak))
    for case in _CASES
    for devices in (1, 2, 4, 8)  # groups of one device, of several, and several on one
  ],
)
def test_groups_train_alone_and_meet(x64, case, devices):
  config = _config(ema=0.9, **_CASES[case], **{'strategy.period': 3})
  parts, state, metrics = _train(config, devices, 8)
  start = parts.eval_state_fn(parts.new_state())
  hand = ByHand(config, start)
  losses = [hand.train(programs.batch(i)) for i in range(8)]
  np.testing.assert_allclose([m['loss'] for m in metrics], losses, 1e-6)
  params, stats = parts.eval_state_fn(state).evaluated()
  _assert_close(params, hand.mean('average')['params'])
  _assert_close(stats, hand.mean('average')['stats'], 1e-6)
  state = jax.device_get(state)
  for i, group in enumerate(hand.groups):
    group_state = jax.tree.map(lambda x, i=i: x[i], state.replace(step=(), opt_state=()))
    _assert_close(group_state.params, group['params'])
    _assert_close(group_state.average['params'], group['average']['params'])
    # Flax's batch norm keeps them in float32, which rounds at 6e-8.
    _assert_close(group_state.stats, group['stats'], 1e-6)
    _assert_close(group_state.average['stats'], group['average']['stats'], 1e-6)
    traces = [x[i] for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
    _assert_close(traces, jax.tree.leaves(group['trace']))
  # Two steps after an exchange groups have parted: the test can fail.
  first, second = (g['params']['head']['kernel'] for g in hand.groups[:2])
  assert np.abs(first - second).max() > 1e-3


def _states(keys, steps):
  """The kernels of both groups, and whether an exchange is due, by step."""
  config = _config(**splitting.FLOAT32, **_LINEAR, **keys)
  parts = programs.build(config, 2)
  state = parts.new_state()
  is_due = functools.partial(exchanges.is_due, exchanges.in_steps(config, BATCH, 640))
  kernels = []
  for i in range(steps):
    state, _ = parts.train_step(state, programs.put(programs.batch(i), parts.spec.mesh))
    kernels.append(np.asarray(state.params['head']['kernel']))
  return kernels, [is_due(i + 1) for i in range(steps)]


@pytest.mark.slow
def test_groups_agree_after_an_exchange_and_nowhere_else():
  kernels, due = _states({'strategy.period': '1,3@4 steps,2@144 examples'}, 12)
  assert 0 < sum(due) < 12
  for (first, second), is_due in zip(kernels, due):
    assert (first == second).all() == is_due


@pytest.mark.slow
def test_a_synchronous_start_has_the_bits_of_period_one():
  post, _ = _states({'strategy.period': '1,3@4 steps'}, 6)
  plain, _ = _states({'strategy.period': '1'}, 6)
  assert [(a == b).all() for a, b in zip(post, plain)] == 4 * [1] + 2 * [0]


@pytest.mark.slow
def test_the_numbers_of_a_step_are_those_of_all_groups(x64):
  def change(batch):
    batch['weight'][[0, 1, 2, 9]] = 0  # three of the first group, one other
    batch['vote'][12] = 2
    return batch

  keys = {**_LINEAR, 'batch_size': BATCH}
  _, _, (want,) = _train(_config(**keys, **{'strategy.name': 'sync'}), 1, 1, change)
  for devices in (1, 4):
    _, _, (got,) = _train(_config(**keys), devices, 1, change)
    assert (got['damaged'], got['vote'], got['finite']) == (4, 2, 1)
    for name in ('loss', 'anp_top1'):
      np.testing.assert_allclose(got[name], want[name], 1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize('groups, devices', [(2, 2), (2, 4)])
def test_traffic_between_groups_falls_by_the_period(groups, devices):
  """Bytes of the compiled programs."""
  keys = {
    'model.name': 'lenet',
    'data.image_size': 16,
    'data.resize': 16,
    'strategy.groups': groups,
  }
  sent = {}
  for name in ('sync', 'local_sgd'):
    config = _config(**splitting.FLOAT32, **keys, **{'strategy.name': name})
    parts = programs.build(config, devices)
    batch = build.abstract_batch(config, parts.spec.mesh, BATCH)
    text = parts.train_step.lower(parts.abstract_state, batch).compile().as_text()
    for conditional in (False, True):
      sent[name, conditional] = sum(
        c.size for c in compiled_collectives.compiled(text) if c.conditional == conditional
      )
  parameters = sum(s.size for s in jax.tree.leaves(parts.abstract_replica.params))
  assert sent['sync', False] >= 4 * parameters and not sent['sync', True]
  # Weights alone, as this network has no statistics.
  assert sent['local_sgd', True] == 4 * parameters
  # Ten numbers of each group.
  inside = sent['sync', False] if devices > groups else 0
  assert sent['local_sgd', False] == inside + 4 * 10 * groups
  average = sent['local_sgd', False] - inside + sent['local_sgd', True] / 8
  assert average <= sent['sync', False] / 8 + 4 * 10 * groups


@pytest.mark.slow
@pytest.mark.usefixtures('on_one_device')
def test_a_run_goes_on_within_a_period_bit_for_bit(tmp_path, config):
  keys = {
    'model.name': 'tests.user_network:PlainNet',
    'model.norm_group': 2,
    'log.tensorboard': False,
    **launching.CONSTANT,
    'ema': 0.9,
    'strategy.name': 'local_sgd',
    'strategy.groups': 4,
    'strategy.period': 4,
  }
  for name, stops in (('whole', (5,)), ('parts', (3, 5))):
    for stop in stops:
      keys['duration'] = f'{stop} steps'
      config = config_lib.replaced(config, keys)
      scores = train.run(config, str(tmp_path / name))
  assert train.run(config, str(tmp_path / name), 'evaluate') == scores
  want, result = (launching.weights(tmp_path / n) for n in ('whole', 'parts'))
  assert want['5/params/head/kernel'].shape[0] == 4
  serving.same_bits(result, want)


@pytest.mark.multiprocess
def test_processes_train_like_one(tmp_path):
  """Also one that goes on over fewer devices than groups."""
  keys = {
    **launching.FLOAT64,
    **launching.CONSTANT,
    'strategy.name': 'local_sgd',
    'strategy.period': '3',
  }
  for name, topologies in (('one', [[1]]), ('mixed', [[1, 1], [1]])):
    for i, devices in enumerate(topologies):
      steps = 7 * (i + 1) if i < len(topologies) - 1 else 12
      arguments = launching.arguments(tmp_path / name, duration=f'{steps} steps', **keys)
      launching.run(
        tmp_path / f'{name}{i}', len(devices), arguments, devices, environment=launching.X64
      )
  key = '12/params/head/kernel'
  assert launching.weights(tmp_path / 'one')[key].shape[0] == 2
  splitting.assert_same_weights(tmp_path / 'mixed', tmp_path / 'one', key)


@pytest.mark.parametrize(
  'key, value, message',
  [
    ('groups', 0, 'groups=0: expected a number above 0'),
    ('groups', 6, 'batch_size=16 does not divide by config.strategy.groups=6 x'),
    ('period', 0, "period='0': expected a whole number above 0, such as '8'"),
    ('period', '1,8', "period='1,8': expected a whole number above 0"),
    ('moments', 'averaged', "expected one of keep, average; did you mean 'av"),
  ],
)
def test_bad_values_are_refused(key, value, message):
  builders.assert_refused(message, lambda: programs.build(_config(**{f'strategy.{key}': value}), 2))


@pytest.mark.parametrize(
  'keys, devices, turns',
  [
    ({}, 4, 1),
    ({'strategy.groups': 4}, 2, 1),
    ({'strategy.groups': 4, 'accumulate': 2}, 2, 2),
    ({'strategy.name': 'sync', 'accumulate': 2}, 4, 2),
    # As many threads as this process's pool has.
    ({'strategy.name': 'invariant', 'strategy.threads': max(8, cores.count())}, 4, 2),
  ],
)
def test_turns_of_the_loop_over_a_devices_batch(keys, devices, turns):
  config = _config(**keys)
  mesh = mesh_lib.create(config, jax.devices()[:devices])
  division.check(config, BATCH, mesh)
  cut = strategy_lib.find(config).batch_division(config, devices)
  assert cut.parts // max(cut.at_once, devices) == turns
