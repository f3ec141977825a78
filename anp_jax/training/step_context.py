"""The objects that training and evaluation steps are built from."""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
from ml_collections import ConfigDict

from anp_jax.parallel import state as state_lib
from anp_jax.training import objective as objective_lib


@dataclasses.dataclass(frozen=True)
class StepContext:
  """The objects that training and evaluation steps share.

  Attributes:
    config: config of the run.
    mesh: mesh of the run.
    model: Flax module called (images, train).
    objective: losses and metrics.
    strategy_step: `parallel.sync.sync_step.SyncStep` or another object with its
      methods, which sends gradients and sums.
    abstract_replica: TrainState of one network, of jax.ShapeDtypeStruct with
      shardings.
  """

  config: ConfigDict
  mesh: jax.sharding.Mesh
  model: nn.Module
  objective: objective_lib.Objective
  strategy_step: Any
  abstract_replica: state_lib.TrainState
