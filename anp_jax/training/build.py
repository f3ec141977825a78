"""A run's model, state and steps, from its config, on any mesh.

Training, benchmarks and compiling ahead of time all get theirs here, so that
what is measured or compiled is what trains.
"""

from collections.abc import Callable
import dataclasses
import functools

from flax import linen as nn
import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax import models
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.parallel import strategies
from anp_jax.training import multipliers
from anp_jax.training import optimizer as optimizer_lib
from anp_jax.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class Assembly:
  """What steps are made of; nothing is compiled and no array made yet.

  Attributes:
    total: steps of the whole run.
    model: the network.
    init: (given) -> new TrainState, see `state.Init`.
    like: TrainState of jax.ShapeDtypeStruct, with shardings.
    one: the same of one network; `like` may be of a group's each.
    scored: TrainState -> that of the one network that evaluation sees.
    train_step: see `step.make_train_step`.
    eval_step: see `step.make_eval_step`.
    examples_step: classes held out -> see `step.make_examples_step`.
    predict_step: see `step.make_predict_step`.
    gradient: see `step.make_gradient`.
  """

  total: int
  model: nn.Module
  init: Callable
  like: state_lib.TrainState
  one: state_lib.TrainState
  scored: Callable
  train_step: Callable
  eval_step: Callable
  examples_step: Callable
  predict_step: Callable
  gradient: Callable


def create(
  config, mesh, objective, batch_size: int, examples: int, helpers=()
) -> Assembly:
  """Puts together what config.model, optimizer and strategy name.

  Args:
    config: the resolved config.
    mesh: of the run; its devices need not be of this machine.
    objective: `objective.Objective`.
    batch_size: images a step over all devices.
    examples: images an epoch.
    helpers: offload devices, see `runtimes.offload.pool`.

  Raises:
    ConfigError: for what a config alone does not show, such as a warm-up that
      outlasts the run.
  """
  total = config_lib.steps(config.duration, batch_size, examples)
  schedule_of = (config, batch_size, examples, total)
  optimizer = optimizer_lib.create(*schedule_of)
  model = models.create(
    config, objective.outputs, mesh_lib.platform(mesh),
    strategies.statistics_axis(config),
  )  # fmt: skip
  init = state_lib.Init(model, optimizer, config)
  one = state_lib.abstract(init, config, mesh)
  multipliers.check(config.optimizer.multipliers, one.params)
  specs = jax.tree.map(lambda s: s.sharding.spec, one.params)
  strategy = strategies.create(config, specs, init.order, helpers)
  parts = (strategy, config, mesh, one)
  return Assembly(
    total=total,
    model=model,
    init=strategy.start(init),
    like=strategy.whole(one),
    one=one,
    scored=strategy.scored(one),
    train_step=step_lib.make_train_step(
      model, objective, optimizer, optimizer_lib.schedule(*schedule_of), *parts
    ),
    eval_step=step_lib.make_eval_step(model, objective, *parts),
    examples_step=functools.partial(
      step_lib.make_examples_step, model, objective, *parts
    ),
    predict_step=step_lib.make_predict_step(model, objective, *parts),
    gradient=step_lib.make_gradient(model, objective, *parts),
  )


def abstract_batch(config, mesh, size: int) -> dict:
  """Shapes, dtypes and shardings of the batches of `data.stream`.

  Args:
    config: the run's config.
    mesh: of the run.
    size: images over all devices.

  Returns:
    name to jax.ShapeDtypeStruct.
  """
  side = config.data.image_size
  sharding = mesh_lib.batch_sharding(mesh)
  return {
    name: jax.ShapeDtypeStruct((size, *shape), dtype, sharding=sharding)
    for name, shape, dtype in (
      ('image', (side, side, 3), np.uint8),
      ('label', (), np.int32),
      ('row', (), np.int32),
      ('weight', (), np.float32),
      ('vote', (), np.int32),
    )
  }
