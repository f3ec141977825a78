"""The state of a run: one pytree, made with its sharding."""

from collections.abc import Callable, Mapping
from concurrent import futures
import dataclasses
import types
from typing import Any

from flax import linen as nn, struct, traverse_util
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import optax

from anp_jax import config as config_lib
from anp_jax.models.layers import initializers
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import compile_cache


class TrainState(struct.PyTreeNode):
  """The arrays that a run carries from step to step.

  Attributes:
    step: () int32, updates applied.
    params: pytree in config.model.param_dtype.
    stats: the model's other collections, {'batch_stats': ...} or {}.
    opt_state: state of the optax chain.
    average: {'params', 'stats'} averaged over steps, or {} without config.ema.
  """

  step: Any
  params: Any
  stats: Any
  opt_state: Any
  average: Any

  def evaluated(self) -> tuple[Any, Any]:
    """The params and stats to evaluate: the averages if there are any."""
    if self.average:
      return self.average['params'], self.average['stats']
    return self.params, self.stats


@dataclasses.dataclass(frozen=True)
class CheckpointLayout:
  """The layout of a run's state in checkpoints.

  Attributes:
    abstract: TrainState of jax.ShapeDtypeStruct, with shardings.
    pack: a run's TrainState -> the saved one.
    unpack: the inverse.
  """

  abstract: TrainState
  pack: Callable
  unpack: Callable


class Init:
  """(weights) -> new TrainState, a pure function of the config.

  Attributes:
    forward_order: paths of the parameters (`mesh.path_name`) in the order in which
      the model makes and uses them; () before the first call or trace, such as
      that of `abstract`.
    initializers: those of the variables, by path; {} also if not all are of
      `models.layers.initializers`: JAX then draws them all.
  """

  def __init__(self, model: nn.Module, optimizer: optax.GradientTransformation, config: ConfigDict):
    self._model, self._optimizer, self._config = model, optimizer, config
    self.forward_order: tuple[str, ...] = ()
    self.initializers: dict[str, initializers.Initializer] = {}
    self._names: Any = None  # tree of the variables' paths

  def __call__(self, weights: Any = ()) -> TrainState:
    """A new state, each leaf whole.

    Args:
      weights: arrays in place of random ones, by path in the network's variables,
        such as 'params/head/kernel'.
    """
    weights = dict(weights)
    if self._names is None or not weights.keys() >= set(jax.tree.leaves(self._names)):
      trees = self._traced()
      trees = mesh_lib.map_by_name(lambda name, leaf: weights.get(name, leaf), trees)
    else:  # without a trace of the network
      trees = jax.tree.map(weights.__getitem__, self._names)
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

  def weights(
    self, single: TrainState, loaded: Mapping[str, jax.Array] = types.MappingProxyType({})
  ) -> dict[str, jax.Array]:
    """Returns the weights to begin with, each shard on the devices that hold it.

    Args:
      single: abstract state of one network.
      loaded: arrays in place of random ones, by path.

    Returns:
      Those and the random ones; without the latter where JAX draws them.
    """
    names = [name for name in self.initializers if name not in loaded]
    trees = {'params': single.params, **single.stats}
    shapes = traverse_util.flatten_dict(trees, sep='/')

    def draw(name):
      seed = self._config.seed, *name.encode()
      return self.initializers[name].draw(seed, shapes[name].shape).astype(shapes[name].dtype)

    def placed(name, values):  # in this thread, whose x64 may be of its own
      return jax.make_array_from_callback(values.shape, shapes[name].sharding, values.__getitem__)

    with futures.ThreadPoolExecutor() as pool:  # NumPy draws without the interpreter's lock
      values = zip(names, pool.map(draw, names), strict=True)
      return {**loaded, **{name: placed(name, array) for name, array in values}}

  def _traced(self):
    """The variables as the model makes them; remembers their names and initializers."""
    with initializers.recording() as record:
      trees = variables(self._model, self._config)
    self._names = mesh_lib.map_by_name(lambda name, _: name, trees)
    # A pytree sorts its keys.
    self.forward_order = tuple(traverse_util.flatten_dict(trees['params'], sep='/'))
    made_by = {id(value): initializer for value, initializer in record}
    leaves = traverse_util.flatten_dict(trees, sep='/')
    if all(id(leaf) in made_by for leaf in leaves.values()):
      self.initializers = {name: made_by[id(leaf)] for name, leaf in leaves.items()}
    return trees


def variables(model: nn.Module, config: ConfigDict) -> dict[str, Any]:
  """A network's random variables by collection, 'params' among them."""
  key = jax.random.key(config.seed)
  images = jnp.zeros((1, *config_lib.example(config)[0]), config.model.dtype)
  return dict(model.init({'params': key}, images, False))


def abstract(init: Init, config: ConfigDict, mesh: jax.sharding.Mesh) -> TrainState:
  """Shapes, dtypes and shardings of a new state, without making it."""
  shapes = jax.eval_shape(init, {})  # the call of `create`, which need not trace again
  params = mesh_lib.param_specs(config.sharding, shapes.params, mesh)
  shardings = mesh_lib.shardings(mesh_lib.state_specs(shapes, params), mesh)
  return jax.tree.map(
    lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), shapes, shardings
  )


def create(
  init_fn: Callable, abstract_state: TrainState, weights: Mapping[str, jax.Array]
) -> TrainState:
  """A new state, each shard on its device.

  Args:
    init_fn: (weights) -> new TrainState.
    abstract_state: shapes and shardings of the state.
    weights: arrays for `Init`; arguments of the program, not constants in it.
  """
  shardings = jax.tree.map(lambda s: s.sharding, abstract_state)
  options = compile_cache.quick_compile_options()
  return jax.jit(init_fn, out_shardings=shardings, compiler_options=options)(dict(weights))


def ema_decay(decay: float, step: jax.Array | int) -> jax.Array:
  """The averages' decay at a step: short at first, then `decay`.

  min(decay, (1 + step) / (10 + step)), as in tf.train.ExponentialMovingAverage,
  so that the random start is soon forgotten.
  """
  step = jnp.asarray(step, jnp.float32)
  return jnp.minimum(decay, (1 + step) / (10 + step))


def averaged(decay: float, state: TrainState, params: Any, stats: Any) -> dict[str, Any]:
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
