"""The state of a run: one pytree, born sharded."""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct, traverse_util
import jax
import jax.numpy as jnp
import optax

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import compile_cache


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


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
  """How checkpoints hold a run's state.

  Attributes:
    abstract: TrainState of jax.ShapeDtypeStruct, with shardings.
    pack: a run's TrainState -> what is saved of it.
    unpack: the inverse.
  """

  abstract: TrainState
  pack: Callable
  unpack: Callable


class Init:
  """(weights) -> new TrainState, a pure function of the config.

  Attributes:
    order: paths of the parameters, as `mesh.path_name` gives them, in the order
      in which the model makes them, which is that in which it uses them; there
      once this was called or traced, as `abstract` does.
  """

  def __init__(self, model, optimizer: optax.GradientTransformation, config):
    self._model, self._optimizer, self._config = model, optimizer, config
    self.order = ()

  def __call__(self, weights=()) -> TrainState:
    """A new state, each leaf whole.

    Args:
      weights: path in the network's variables, as 'params/head/kernel', to the
        array that stands there instead of the random one.
    """
    trees = variables(self._model, self._config)
    # A pytree's own order is the alphabet's.
    self.order = tuple(traverse_util.flatten_dict(trees['params'], sep='/'))
    weights = dict(weights)
    trees = jax.tree_util.tree_map_with_path(
      lambda path, leaf: weights.get(mesh_lib.path_name(path), leaf), trees
    )
    params = trees.pop('params')
    average = {}
    if self._config.ema:
      # A copy: one buffer must not be donated twice.
      average = jax.tree.map(jnp.array, {'params': params, 'stats': trees})
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      stats=trees,
      opt_state=self._optimizer.init(params),
      average=average,
    )


def variables(model, config) -> dict:
  """A network's random variables by collection, 'params' among them."""
  side, dtype = config.data.image_size, config.model.dtype
  key = jax.random.key(config.seed)
  images = jnp.zeros((1, side, side, 3), dtype)
  return dict(model.init({'params': key}, images, False))


def abstract(init, config, mesh) -> TrainState:
  """Shapes, dtypes and shardings of a new state, without making it."""
  shapes = jax.eval_shape(init)
  params = mesh_lib.param_specs(config.sharding, shapes.params, mesh)
  shardings = mesh_lib.shardings(mesh_lib.state_specs(shapes, params), mesh)
  return jax.tree.map(
    lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings
  )


def create(init_fn, abstract_state: TrainState, weights=()) -> TrainState:
  """A new state, each shard made where it lies.

  Args:
    init_fn: (weights) -> new TrainState.
    abstract_state: the same of shapes, with shardings.
    weights: see `Init`; an argument of the program, not a constant in it.
  """
  shardings = jax.tree.map(lambda s: s.sharding, abstract_state)
  options = compile_cache.run_once_options()
  return jax.jit(init_fn, out_shardings=shardings, compiler_options=options)(weights)


def ema_decay(decay: float, step):
  """The averages' decay at a step: short at first, then `decay`.

  min(decay, (1 + step) / (10 + step)), as tf.train.ExponentialMovingAverage
  does, so that the random start is soon forgotten.
  """
  step = jnp.asarray(step, jnp.float32)
  return jnp.minimum(decay, (1 + step) / (10 + step))


def averaged(decay: float, state: TrainState, params, stats) -> dict:
  """The averages after a step; statistics are averaged like parameters."""
  if not decay:
    return {}
  decay = ema_decay(decay, state.step)

  def average(old, new):
    if not jnp.issubdtype(new.dtype, jnp.inexact):
      return new
    rate = (1 - decay).astype(new.dtype)
    return old + rate * (new - old)

  return jax.tree.map(average, state.average, {'params': params, 'stats': stats})
