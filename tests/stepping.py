"""Steps of tiny networks, with a serial reference to compare with."""

import functools

import jax
import numpy as np

from anp_jax.config import strategy as strategy_lib
from anp_jax.models import resnet
from anp_jax.parallel import division, mesh as mesh_lib, state as state_lib
from anp_jax.training import optimizer as optimizer_lib, train_step as step_lib
from tests import builders, programs, user_network

BATCH = 16
SIDE = 16
CLASSES = 12
EXAMPLES = 64
FSDP = (('.*', 'fsdp'),)
RATE, MOMENTUM, DECAY, SMOOTHING, CLIP = 0.1, 0.9, 1e-3, 0.1, 0.7
# float64 rounds at 1e-16; sums over devices in another order differ by about
# 1e-15, and were seen to grow to 1e-14 over 50 steps.
TIGHT = 1e-10


def config_of(dtype='float64', **overrides):
  return builders.config(
    {
      'batch_size': BATCH,
      'label_smoothing': SMOOTHING,
      'data.image_size': SIDE,
      'model.dtype': dtype,
      'model.param_dtype': 'float32' if dtype == 'bfloat16' else dtype,
      'model.norm_group': 2,
      'optimizer.name': 'momentum',
      'optimizer.learning_rate': RATE,
      'optimizer.momentum': MOMENTUM,
      'optimizer.weight_decay': DECAY,
      'optimizer.clip_norm': CLIP,
      'schedule.name': 'exponential',
      'schedule.every': '2 steps',
      'schedule.factor': 0.98,
      **overrides,
    }
  )


def resnet_of(config):
  return resnet.ResNet(
    CLASSES,
    stages=(1,),
    bottleneck=False,
    width=8,
    group=config.model.norm_group,
    axis_name=mesh_lib.DATA,
    dtype=config.model.dtype,
    param_dtype=config.model.param_dtype,
  )


def small_of(config, **fields):
  """Compiles in a fifth of the time; its batch norm is global."""
  return user_network.SmallNet(
    CLASSES,
    dtype=config.model.dtype,
    param_dtype=config.model.param_dtype,
    axis_name=mesh_lib.DATA,
    **{'drop': 0.0, **fields},
  )


class Run:
  """All that a step is made of, on the first `devices` devices."""

  def __init__(self, config, devices, model):
    self.config = config
    self.model = model
    self.mesh = mesh_lib.create(config, jax.devices()[:devices])
    division.check(config, BATCH, self.mesh)
    schedule_of = (config, BATCH, EXAMPLES, 1000)
    optimizer = optimizer_lib.create(*schedule_of)
    self.init = state_lib.Init(model, optimizer, config)
    self.like = state_lib.abstract(self.init, config, self.mesh)
    self.objective = programs.objective(config)
    specs = jax.tree.map(lambda s: s.sharding.spec, self.like.params)
    self.train_step = step_lib.TrainStep(
      config=config,
      mesh=self.mesh,
      model=model,
      objective=self.objective,
      optimizer=optimizer,
      schedule=optimizer_lib.schedule(*schedule_of),
      strategy_step=strategy_lib.find(config).build(config, specs),
      abstract_replica=self.like,
    ).jitted()

  def state(self, change=None):
    """The same weights for every Run, and no program to compile for them."""
    values = weights_of(self.like)
    if change:
      values = change(values)
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), values, self.like)

  def put(self, batch):
    return programs.put(batch, self.mesh)

  def steps(self, state, batches):
    """The state after the batches, and each step's metrics."""
    return steps(self.train_step, state, batches, self.mesh, self.objective)


def steps(train_step, state, batches, mesh, objective):
  """The state after the batches, and each step's metrics."""
  names, metrics = step_lib.metric_names(objective), []
  types = jax.tree.map(jax.typeof, state)
  for batch in batches:
    batch = programs.put(batch, mesh)
    with jax.transfer_guard('disallow'):
      state, values = train_step(state, batch)
    metrics.append(dict(zip(names, jax.device_get(values), strict=True)))
    # Another dtype, place, or a weak one, would compile the next step again.
    assert jax.tree.map(jax.typeof, state) == types
  return state, metrics


def weights_of(template):
  random = np.random.default_rng(0)

  def one(path, leaf):
    name = mesh_lib.path_name(path)
    if name.endswith('kernel'):
      fan_in = np.prod(leaf.shape[:-1])
      value = random.normal(size=leaf.shape) * np.sqrt(2 / fan_in)
    elif name.endswith(('scale', 'var')):
      value = np.ones(leaf.shape)
    else:
      value = np.zeros(leaf.shape)
    return value.astype(leaf.dtype)

  params, stats = jax.tree_util.tree_map_with_path(one, (template.params, template.stats))
  average = {'params': params, 'stats': stats} if template.average else {}
  return state_lib.TrainState(
    step=np.zeros((), np.int32),
    params=params,
    stats=stats,
    opt_state=jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), template.opt_state),
    average=average,
  )


def batch_of(seed=0):
  return programs.batch(seed, BATCH, SIDE)


@functools.cache
def divided_run(devices, dtype='float64', fsdp=False, accumulate=1):
  """A Run of the small ResNet; its program is compiled once a session."""
  sharding = FSDP if fsdp else (('.*', 'replicate'),)
  config = config_of(dtype, accumulate=accumulate, sharding=sharding)
  return Run(config, devices, resnet_of(config))


@functools.cache
def trained(steps, *args, **kwargs):
  """Host state and metrics after steps over two batches in turn."""
  run = divided_run(*args, **kwargs)
  batches = [batch_of(i % 2) for i in range(steps)]
  state, metrics = run.steps(run.state(), batches)
  return jax.device_get(state), metrics


def column(metrics, name='loss'):
  return np.array([m[name] for m in metrics])


def assert_close(got, want, tolerance):
  """Every leaf, relative to the largest number in it."""
  want_leaves = jax.tree_util.tree_leaves_with_path(want)
  got_leaves = jax.tree.leaves(got)
  assert len(got_leaves) == len(want_leaves)
  for a, (path, b) in zip(got_leaves, want_leaves):
    a, b = np.float64(a), np.float64(b)
    scale = max(np.abs(b).max(initial=0), 1e-3)
    np.testing.assert_allclose(
      a, b, rtol=0, atol=tolerance * scale, err_msg=mesh_lib.path_name(path)
    )


def same_curve(got, want, tolerance):
  for name in want[1][0]:
    np.testing.assert_allclose(column(got[1], name), column(want[1], name), tolerance, err_msg=name)
