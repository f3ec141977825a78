"""The parts of a run that determine its programs."""

import dataclasses
import functools

import jax
from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.training import objective as objective_lib


@dataclasses.dataclass(frozen=True)
class RunSpec:
  """The parts of a run that determine its programs; they never change.

  Attributes:
    config: resolved and valid config.
    mesh: mesh of the run; its devices may be of another machine.
    objective: losses and metrics.
    batch_size: images per step over all devices; config.batch_size may be 0.
    examples: images per epoch.
    offload_devices: devices outside the mesh that compute for it.
  """

  config: ConfigDict
  mesh: jax.sharding.Mesh
  objective: objective_lib.Objective
  batch_size: int
  examples: int
  offload_devices: tuple = ()

  @functools.cached_property
  def total_steps(self) -> int:
    """The steps of the whole run."""
    return self.steps(self.config.duration)

  @property
  def array_rows(self) -> int:
    """The rows of a step's arrays: above `batch_size` where devices have unequal parts."""
    devices = mesh_lib.batch_devices(self.mesh)
    counts = strategy_lib.find(self.config).row_counts(self.config, self.batch_size, devices)
    return devices * max(counts) if counts else self.batch_size

  def steps(self, duration: str) -> int:
    """A duration such as '2 epochs' in steps of this run."""
    return config_lib.steps(duration, self.batch_size, self.examples)
