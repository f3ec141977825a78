"""The state of a run: one pytree, born sharded."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from anp_jax import mesh as mesh_lib


@struct.dataclass
class TrainState:
  """All that a run carries from step to step.

  Attributes:
    step: () int32, updates applied.
    params: pytree in config.model.param_dtype.
    stats: the model's other collections, {'batch_stats': ...} or {}.
    opt_state: of the optax chain.
    average: {'params', 'stats'} averaged over steps, or {} without config.ema.
  """

  step: Any
  params: Any
  stats: Any
  opt_state: Any
  average: Any

  def evaluated(self):
    """The params and stats that evaluation sees: averaged, where they are."""
    if self.average:
      return self.average['params'], self.average['stats']
    return self.params, self.stats


def init_fn(model, optimizer: optax.GradientTransformation, config):
  """Makes a function () -> new TrainState, a pure function of the config."""
  side = config.data.image_size

  def init():
    key = jax.random.key(config.seed)
    images = jnp.zeros((1, side, side, 3), config.model.dtype)
    variables = dict(model.init({'params': key}, images, False))
    params = variables.pop('params')
    average = {}
    if config.ema:
      # A copy: one buffer must not be donated twice.
      average = jax.tree.map(jnp.array, {'params': params, 'stats': variables})
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      stats=variables,
      opt_state=optimizer.init(params),
      average=average,
    )

  return init


def abstract(init, config, mesh) -> TrainState:
  """Shapes, dtypes and shardings of a new state, without making it."""
  shapes = jax.eval_shape(init)
  params = mesh_lib.param_specs(config.sharding, shapes.params, mesh)
  shardings = mesh_lib.shardings(mesh_lib.state_specs(shapes, params), mesh)
  return jax.tree.map(
    lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h),
    shapes,
    shardings,
  )


def create(init, like: TrainState) -> TrainState:
  """A new state, each shard made where it lies."""
  shardings = jax.tree.map(lambda s: s.sharding, like)
  return jax.jit(init, out_shardings=shardings)()


def ema_decay(decay: float, step):
  """The averages' decay at a step: short at first, then `decay`.

  min(decay, (1 + step) / (10 + step)), as tf.train.ExponentialMovingAverage
  does, so that the random start is soon forgotten.
  """
  step = jnp.asarray(step, jnp.float32)
  return jnp.minimum(decay, (1 + step) / (10 + step))
