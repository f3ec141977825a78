"""A run's model, state and steps, from its config, on any mesh.

Training, benchmarks and compiling ahead of time all build their steps here, so
that a benchmark measures the program that trains.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import types
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import config as config_lib, models
from anp_jax.config import errors, strategy as strategy_lib, trust
from anp_jax.models.layers import example_randomness
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.system import flops as flops_lib
from anp_jax.training import (
  eval_step as eval_step_lib,
  multipliers,
  optimizer as optimizer_lib,
  run_spec,
  step_context,
  train_step as step_lib,
)


@dataclasses.dataclass(frozen=True)
class ModelAndSteps:
  """A run's model and steps; nothing is compiled and no array made yet.

  Attributes:
    spec: run that it was built for.
    model: network.
    init: initial state of one network.
    init_fn: (weights) -> new TrainState, see `state.Init`.
    abstract_state: TrainState of jax.ShapeDtypeStruct, with shardings.
    abstract_replica: abstract state of one network; the run's state may have one
      for each group of devices.
    eval_state_fn: the run's TrainState -> the single network's that is evaluated.
    checkpoint_layout: layout of the state in checkpoints.
    training: training step.
    evaluation: steps without a gradient.
  """

  spec: run_spec.RunSpec
  model: nn.Module
  init: state_lib.Init
  init_fn: Callable
  abstract_state: state_lib.TrainState
  abstract_replica: state_lib.TrainState
  eval_state_fn: Callable
  checkpoint_layout: state_lib.CheckpointLayout
  training: step_lib.TrainStep
  evaluation: eval_step_lib.EvalStep

  @functools.cached_property
  def train_step(self) -> Callable:
    """The jitted training step; see `train_step.TrainStep.jitted`."""
    return self.training.jitted()

  @functools.cached_property
  def eval_step(self) -> Callable:
    """The jitted step of evaluation; see `eval_step.EvalStep.sums`."""
    return self.evaluation.sums()

  def new_state(
    self, loaded: Mapping[str, jax.Array] = types.MappingProxyType({})
  ) -> state_lib.TrainState:
    """Returns the initial state of the run.

    Args:
      loaded: arrays in place of random ones, see `state.Init.weights`.
    """
    weights = self.init.weights(self.abstract_replica, loaded)
    return state_lib.create(self.init_fn, self.abstract_state, weights)

  def flops(self, state: state_lib.TrainState, batch: dict) -> float:
    """Counts the operations of a step on all devices, from its trace.

    Args:
      state: state of the run, or its shapes.
      batch: batch of a step, or its shapes.
    """
    branches = self.training.strategy_step.join_branches
    count = flops_lib.count_call(self.train_step, state, batch, branches=branches)
    # The trace has the shapes of one device, with the most rows that one has.
    return count * mesh_lib.batch_devices(self.spec.mesh) * self.spec.batch_size / len(batch['row'])


def create(spec: run_spec.RunSpec) -> ModelAndSteps:
  """Builds the model, the optimizer and the steps of a run.

  Raises:
    ConfigError: for errors that only the network or the run's length show, such
      as a warm-up that outlasts the run.
  """
  config, mesh, objective = spec.config, spec.mesh, spec.objective
  strategy = strategy_lib.find(config)
  target = models.target(config, mesh_lib.platform(mesh), jax.local_device_count())
  sums_over = mesh_lib.DATA if strategy.sums_statistics else None
  model = models.create(config, objective.head.outputs, target, sums_over)
  optimizer = optimizer_lib.create(config, spec.batch_size, spec.examples, spec.total_steps)
  _check_own(config, model, optimizer, objective.head.outputs)
  init = state_lib.Init(model, optimizer, config)
  single = state_lib.abstract(init, config, mesh)
  for key in ('multipliers', 'decay_multipliers'):
    rules = config.optimizer.get(key, ())
    multipliers.check(f'optimizer.{key}', rules, single.params)
  multipliers.check_layers(config, single.params)
  multipliers.check_that_some_train(config.optimizer.multipliers, single.params)
  specs = jax.tree.map(lambda s: s.sharding.spec, single.params)
  strategy_step = strategy.build(
    strategy.in_steps(spec), specs, init.forward_order, spec.offload_devices
  )
  context = step_context.StepContext(config, mesh, model, objective, strategy_step, single)
  return ModelAndSteps(
    spec=spec,
    model=model,
    init=init,
    init_fn=strategy_step.init_fn(init),
    abstract_state=strategy_step.abstract_state(single),
    abstract_replica=single,
    eval_state_fn=strategy_step.eval_state_fn(single),
    checkpoint_layout=strategy_step.checkpoint_layout(single),
    training=step_lib.TrainStep(**vars(context), **updates(spec, config, strategy_step)),
    evaluation=eval_step_lib.EvalStep(
      **vars(context) | {'strategy_step': strategy_step.for_evaluation()}
    ),
  )


def _check_own(config, model, optimizer, outputs):
  """Refuses a user's network or optimizer that does not fit the step, by a trace of each."""
  if ':' in config.model.name and isinstance(model, nn.Module):
    # Three groups: a network that fits one size alone is told by no other.
    count = 3 * (config.model.norm_group or 1)
    images = jax.ShapeDtypeStruct((count, *config_lib.example(config)[0]), config.model.dtype)

    def traced(images):
      key = jax.random.key(0)
      result, variables = model.init_with_output(key, images, False)
      mutable = [name for name in variables if name != 'params']
      examples = {example_randomness.EXAMPLE: {'row': jnp.arange(count)}}
      keys = dict.fromkeys(('dropout', example_randomness.EXAMPLE), key)
      trained, _ = model.apply(variables | examples, images, True, mutable=mutable, rngs=keys)
      return (result, trained), variables

    arguments = 'model.name', config.model.name
    # A network may take means over the devices.
    on_mesh = jax.vmap(traced, None, None, axis_name=mesh_lib.DATA, axis_size=1)
    results, variables = trust.called(*arguments, jax.eval_shape, on_mesh, images)
    words = f'a network that returns (batch, {outputs}) numbers'
    for result in results:
      errors.check(getattr(result, 'shape', None) == (count, outputs), *arguments, words)
    errors.check('params' in variables, *arguments, 'a network with parameters')
  if ':' in config.optimizer.name:
    params = jax.eval_shape(lambda: state_lib.variables(model, config)['params'])

    def update(params):
      state = optimizer.init(params)
      return (params, state), optimizer.update(params, state, params)

    arguments = 'optimizer.name', config.optimizer.name
    before, after = trust.called(*arguments, jax.eval_shape, update, params)
    words = 'one whose updates have the shapes of the parameters, and whose state keeps its own'
    errors.check(_forms(*before) == _forms(*after), *arguments, words)


def _forms(updates, state):
  return jax.tree.map(lambda x: x.shape, updates), jax.tree.map(lambda x: (x.shape, x.dtype), state)


def updates(spec: run_spec.RunSpec, config: ConfigDict, strategy_step: Any) -> dict[str, Any]:
  """The optimizer and the schedule of a training step, by the names of its fields.

  Args:
    spec: run, which has the sizes.
    config: config of the run, in which numbers may be traced.
    strategy_step: strategy's part of the step.
  """
  sizes = spec.batch_size, spec.examples, spec.total_steps
  schedule = optimizer_lib.schedule(config, *sizes)

  def create(config):
    return optimizer_lib.create(config, *sizes)

  return {'optimizer': strategy_step.optimizer(create, config, schedule), 'schedule': schedule}


def abstract_batch(config: ConfigDict, mesh: jax.sharding.Mesh, size: int) -> dict:
  """Shapes, dtypes and shardings of the batches of `data.input.stream`, by name.

  Args:
    config: config of the run.
    mesh: mesh of the run.
    size: images over all devices.
  """
  sharding, order = mesh_lib.batch_sharding(mesh), strategy_lib.find(config).order_size(config)
  replicated = mesh_lib.replicated(mesh)
  extra = {'order': jax.ShapeDtypeStruct((order,), np.int32, sharding=replicated)} if order else {}
  return extra | {
    name: jax.ShapeDtypeStruct((size, *shape), dtype, sharding=sharding)
    for name, shape, dtype in (
      ('image', *config_lib.example(config)),
      ('label', (), np.int32),
      ('row', (), np.int32),
      ('weight', (), np.float32),
      ('vote', (), np.int32),
    )
  }
