"""Optimizers against NumPy recurrences, schedules against closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.config import key_table, optimizers
from anp_jax.training import optimizer
from tests import builders, splitting

BATCH = 8
EXAMPLES = 80  # 10 steps an epoch
STEPS = 10
# Both sides compute ten steps of a few dozen operations in float64, each good
# to 2.2e-16 relative: 1e-12 leaves room for a thousand roundings, while a
# factor in the wrong place or one computed in float32 shows at 1e-8 or more.
TIGHT = 1e-12


@pytest.fixture
def config():
  c = builders.config()
  c.optimizer.learning_rate = 0.1
  c.optimizer.momentum = 0.8
  c.optimizer.decay = 0.85
  c.optimizer.b1 = 0.7
  c.optimizer.b2 = 0.95
  c.optimizer.eps = 0.01  # large: a wrong place of it must show
  c.optimizer.weight_decay = 0.03
  # The rate changes within the ten steps, so that its place shows too.
  c.schedule.name = 'step'
  c.schedule.every = '3 steps'
  c.schedule.factor = 0.5
  c.schedule.warmup = '2 steps'
  return c


def _rate(step):
  """The learning rate of the fixture above, worked out by hand."""
  return 0.1 * [0, 0.5, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125][step]


def _params(dtype=np.float64):
  random = np.random.default_rng(0)
  return {
    'conv': {'kernel': random.normal(size=(2, 2, 3, 4)).astype(dtype)},
    'dense': {
      'bias': random.normal(size=4).astype(dtype),
      'kernel': np.zeros((3, 4), dtype),  # no trust ratio at first: norm 0
    },
    'norm': {
      'scale': np.zeros(4, dtype),  # as zero_init makes it
      'bias': random.normal(size=4).astype(dtype),
    },
    'relative': {'table': random.normal(size=(3, 3)).astype(dtype)},
  }


def _gradients(params, step, dtype=np.float64):
  random = np.random.default_rng(100 + step)
  return jax.tree.map(lambda p: (3 * random.normal(size=p.shape)).astype(dtype), params)


def _run(config, steps=STEPS, dtype=np.float64):
  """Parameters after `steps` updates by the code under test."""
  transform = optimizer.create(config, BATCH, EXAMPLES, 100)
  params = jax.tree.map(jnp.asarray, _params(dtype))
  state = transform.init(params)

  @jax.jit
  def update(params, state, gradients):
    updates, state = transform.update(gradients, state, params)
    return jax.tree.map(lambda p, u: p + u, params, updates), state

  for step in range(steps):
    params, state = update(params, state, _gradients(params, step, dtype))
  return params


def _norm(x):
  return math.sqrt(float(np.sum(np.square(x))))


def _reference(config, change=None):
  """The same, leaf by leaf, as the papers write the recurrences.

  Args:
    config: whose `optimizer` is followed.
    change: what happens to the whole gradient first (clipping).
  """
  o = config.optimizer
  params = _params()
  memory = jax.tree.map(
    lambda p: {
      'v': np.zeros_like(p),
      'm': np.zeros_like(p),
      's': np.ones_like(p) if o.name == 'rmsprop' else np.zeros_like(p),
    },
    params,
  )
  for step in range(STEPS):
    gradients = _gradients(params, step)
    if change:
      gradients = change(gradients)
    for group, leaves in params.items():
      for name, w in leaves.items():
        leaves[name] = w + _delta(o, w, gradients[group][name], memory[group][name], step)
  return params


def _delta(o, w, g, memory, step):
  """What one step adds to one leaf; updates its memory in place."""
  rate = _rate(step)
  matrix = w.ndim >= 2
  wd = o.weight_decay if matrix else 0.0
  if o.name in ('sgd', 'momentum', 'nesterov', 'rmsprop', 'adam'):
    g = g + wd * w
  if o.name == 'sgd':
    return -rate * g
  if o.name in ('momentum', 'nesterov'):
    memory['v'] = o.momentum * memory['v'] + g
    if o.name == 'momentum':
      return -rate * memory['v']
    return -rate * (g + o.momentum * memory['v'])
  if o.name == 'rmsprop':  # as TensorFlow 1: epsilon in the root, and a memory of ones
    memory['s'] = o.decay * memory['s'] + (1 - o.decay) * g * g
    memory['v'] = o.momentum * memory['v'] + rate * g / np.sqrt(memory['s'] + o.eps)
    return -memory['v']
  if o.name == 'lars':
    g = g + wd * w
    trust = 1.0
    if matrix and _norm(w) > 0:
      trust = 0.001 * _norm(w) / _norm(g)
    memory['v'] = o.momentum * memory['v'] + rate * trust * g
    return -memory['v']
  if o.name == 'lion':
    mean = o.b1 * memory['m'] + (1 - o.b1) * g
    memory['m'] = o.b2 * memory['m'] + (1 - o.b2) * g
    return -rate * (np.sign(mean) + wd * w)
  memory['m'] = o.b1 * memory['m'] + (1 - o.b1) * g
  memory['s'] = o.b2 * memory['s'] + (1 - o.b2) * g * g
  mean = memory['m'] / (1 - o.b1 ** (step + 1))
  square = memory['s'] / (1 - o.b2 ** (step + 1))
  direction = mean / (np.sqrt(square) + o.eps)
  if o.name == 'adam':
    return -rate * direction
  direction = direction + wd * w
  if o.name == 'lamb' and matrix and _norm(w) > 0:
    direction = direction * _norm(w) / _norm(direction)
  return -rate * direction


@pytest.mark.parametrize(
  'name, decay, keys',
  [
    *((name, 0.03, {}) for name in optimizers.OPTIMIZERS),
    # Without decay: of the gradient, of the weights, and in the trust ratio.
    *((name, 0.0, {}) for name in ('adam', 'adamw', 'lamb')),
    ('rmsprop', 0.03, {'momentum': 0.0}),
  ],
)
def test_optimizer_is_its_recurrence(x64, config, name, decay, keys):
  config.optimizer.update({'name': name, 'weight_decay': decay, **keys})
  actual = _run(config)
  assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype('float64')}
  expected = _reference(config)
  splitting.assert_same(actual, expected, TIGHT)
  if not decay:
    return
  with jax.enable_x64(False):
    actual = _run(config, dtype=np.float32)
  assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype('float32')}
  # 6e-8 a rounding, and 1 - beta2^s loses up to 20 times that.
  splitting.assert_same(actual, expected, 1e-5)


def _clip_elements(gradients, limit):
  return jax.tree.map(
    lambda g: np.where(g > limit, limit, np.where(g < -limit, -limit, g)), gradients
  )


def _clip_norm(gradients, limit):
  norm = math.sqrt(sum(_norm(g) ** 2 for g in jax.tree.leaves(gradients)))
  return jax.tree.map(lambda g: g * min(1.0, limit / norm), gradients)


@pytest.mark.parametrize('value, norm', [(2.0, 0), (0, 1.5), (0, 1e6), (2.0, 1.5)])
def test_elements_are_clipped_then_the_norm(x64, config, value, norm):
  """Weight decay, in the reference, is not clipped."""
  config.optimizer.clip_value, config.optimizer.clip_norm = value, norm
  expected = _reference(
    config, lambda g: _clip_norm(_clip_elements(g, value or math.inf), norm or math.inf)
  )
  splitting.assert_same(_run(config), expected, TIGHT)


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_state_is_arrays_shaped_like_parameters(config, name):
  config.optimizer.name = name
  config.optimizer.clip_norm = config.optimizer.clip_value = 1.0
  transform = optimizer.create(config, BATCH, EXAMPLES, 100)
  params = jax.tree.map(jnp.asarray, _params(np.float32))
  state = transform.init(params)
  shapes = [p.shape for p in jax.tree.leaves(params)]
  moments = [x for x in jax.tree.leaves(state) if x.ndim]
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
  copies = {'sgd': 0, 'momentum': 1, 'nesterov': 1, 'lars': 1, 'lion': 1}.get(name, 2)
  assert [x.shape for x in moments] == shapes * copies
  # Types stay as they were born: a change would compile the step twice.
  _, after = jax.eval_shape(transform.update, params, state, params)
  assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


@pytest.mark.parametrize('name', ('lars', 'lamb'))
def test_norms_are_of_whole_leaves_when_sharded(x64, config, name):
  """Divided over the devices there are, the update is that of one device."""
  config.optimizer.name = name
  config.optimizer.clip_norm = 1.5
  count = max(n for n in (1, 2, 4) if n <= jax.device_count())
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ('data',))

  def place(leaf):
    last = 'data' if leaf.shape[-1] % count == 0 else None
    spec = jax.sharding.PartitionSpec(*[None] * (leaf.ndim - 1), last)
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

  transform = optimizer.create(config, BATCH, EXAMPLES, 100)
  params = jax.tree.map(place, _params())
  state = transform.init(params)
  update = jax.jit(transform.update)
  for step in range(STEPS):
    gradients = jax.tree.map(place, _gradients(params, step))
    updates, state = update(gradients, state, params)
    params = jax.tree.map(lambda p, u: p + u, params, updates)
  assert params['conv']['kernel'].sharding.num_devices == count
  splitting.assert_same(params, _reference(config, lambda g: _clip_norm(g, 1.5)), TIGHT)


def _closed_form(name, step, warmup, total):
  """The learning rate in plain Python, peak 0.1, the numbers of the test."""
  rise = 1.0
  if step < warmup:
    rise = step / warmup
  done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
  share = {
    'constant': 1.0,
    'cosine': 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * done)),
    'polynomial': 0.2 + 0.8 * (1 - done) ** 1.5,
    'range': 0.001 ** (1 - done),
    'step': 0.3 ** math.floor(step / 15),
    'exponential': 0.3 ** math.floor(step / 15),
  }[name]
  return 0.1 * rise * share


def _assert_rates(rate, expected):
  """On the host, one at a time and all at once; on the device, in float32."""
  steps = np.arange(len(expected))
  for rates in ([rate(int(t)) for t in steps], rate(steps)):
    np.testing.assert_allclose(rates, expected, rtol=1e-13, atol=1e-16)
  device = jax.jit(jax.vmap(rate))(jnp.arange(len(expected)))
  assert device.dtype == jnp.float32
  np.testing.assert_allclose(device, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
  'name, text, warmup',
  [
    *((name, '7 steps', 7) for name in key_table.SCHEDULES),
    # The warm-up of all is one.
    ('cosine', '0 steps', 0),
    ('cosine', '1 steps', 1),
    ('cosine', '1.5 epochs', 15),
    ('cosine', '100 examples', 13),  # 12.5 steps, rounded up
    *((name, '60 steps', 60) for name in ('cosine', 'step')),  # the whole run
  ],
)
def test_schedule_is_its_closed_form(config, name, text, warmup):
  total = 60
  s = config.schedule
  s.name, s.warmup, s.every = name, text, '1.5 epochs'
  s.factor, s.power, s.end, s.start = 0.3, 1.5, 0.2, 0.001
  rate = optimizer.schedule(config, BATCH, EXAMPLES, total)
  steps = range(total + 10)  # and past the end, where a resume may go
  expected = [_closed_form(name, t, warmup, total) for t in steps]
  _assert_rates(rate, expected)


def test_step_decays_at_the_milestones_that_are_listed(config):
  """The rate is divided by ten twice, as He et al. 2015 do."""
  s = config.schedule
  s.factor, s.every, s.warmup = 0.1, '32 steps, 4.8 epochs', '0 steps'
  rate = optimizer.schedule(config, BATCH, EXAMPLES, 64)
  _assert_rates(rate, [0.1] * 32 + [0.01] * (48 - 32) + [0.001] * 30)


def test_schedule_is_float64_where_enabled(x64, config):
  rate = optimizer.schedule(config, BATCH, EXAMPLES, 60)
  device = jax.jit(jax.vmap(rate))(jnp.arange(STEPS, dtype=jnp.int32))
  assert device.dtype == jnp.float64
  expected = [_rate(t) for t in range(STEPS)]
  np.testing.assert_allclose(device, expected, rtol=TIGHT)


def test_schedule_on_the_host_touches_no_device(config):
  rate = optimizer.schedule(config, BATCH, EXAMPLES, 60)
  with jax.transfer_guard('disallow'):
    value = rate(3)
  assert isinstance(value, float)
  assert value == pytest.approx(0.05)


def test_staircase_keeps_its_boundaries_far_out(config):
  """float32 has no 16777217; the quotient must be taken of integers."""
  config.schedule.every = '16777217 steps'
  rate = jax.jit(optimizer.schedule(config, BATCH, EXAMPLES, 10**8))
  assert float(rate(jnp.int32(16777216))) == pytest.approx(0.1)
  assert float(rate(jnp.int32(16777217))) == pytest.approx(0.05)


def test_warmup_longer_than_the_run(config):
  config.schedule.warmup = '2 epochs'
  optimizer.schedule(config, BATCH, EXAMPLES, 20)
  for make in (optimizer.schedule, optimizer.create):
    builders.assert_refused(r"'2 epochs' is 20 steps, .* is 19", make, config, BATCH, EXAMPLES, 19)


def test_unknown_names(config):
  config.optimizer.name = 'rmsprob'
  builders.assert_refused("mean 'rmsprop'", optimizer.create, config, BATCH, EXAMPLES, 60)
  config.schedule.name = 'cosin'
  builders.assert_refused("mean 'cosine'", optimizer.schedule, config, BATCH, EXAMPLES, 60)


@pytest.mark.parametrize('name', optimizers.OPTIMIZERS)
def test_only_an_elementwise_optimizer_updates_a_matrix_that_is_cut_alike(x64, config, name):
  """The registry says which: servers cut the weights (strategy parameter_server)."""
  config.optimizer.name = name
  random = np.random.default_rng(0)
  weights, gradients = random.normal(size=(6, 1)), random.normal(size=(STEPS, 6, 1))

  transform = optimizer.create(config, BATCH, EXAMPLES, 100)
  update = jax.jit(transform.update)

  def updated(rows):
    params = jnp.asarray(weights[rows])
    state = transform.init(params)
    for gradient in gradients[:, rows]:
      updates, state = update(gradient, state, params)
      params = params + updates
    return np.asarray(params)

  expected = updated(slice(6))
  cut = np.concatenate([updated(slice(3)), updated(slice(3, 6))])
  difference = np.abs(expected - cut).max()
  assert difference < TIGHT if optimizers.OPTIMIZERS[name].is_elementwise else difference > 1e-4
