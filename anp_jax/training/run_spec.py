"""What one network's programs follow from."""

import dataclasses
import functools
from typing import Any

import jax

from anp_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class RunSpec:
  """A run, as far as its programs follow from it; nothing in it changes.

  Attributes:
    config: resolved and valid; never written to.
    mesh: of the run; its devices need not be of this machine.
    objective: `objective.Objective`.
    batch_size: images a step over all devices; config.batch_size may be 0.
    examples: images an epoch.
    offload_devices: devices outside the mesh that compute for it.
  """

  config: Any
  mesh: jax.sharding.Mesh
  objective: Any
  batch_size: int
  examples: int
  offload_devices: tuple = ()

  @functools.cached_property
  def total_steps(self) -> int:
    """The steps of the whole run."""
    return self.steps(self.config.duration)

  def steps(self, duration: str) -> int:
    """A duration such as '2 epochs' in steps of this run."""
    return config_lib.steps(duration, self.batch_size, self.examples)
