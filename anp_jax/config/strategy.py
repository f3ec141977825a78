"""Strategies: how training is spread over devices, and where to find them.

A strategy is one object: its keys and checks, its part of a step, and what it
starts. Importing this module imports nothing heavy; methods import JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any

import ml_collections

from anp_jax.config import errors, trust

if TYPE_CHECKING:
  import jax

  from anp_jax.config import keys

# Name in config.strategy.name to where the class is.
BUILT_IN = {
  'sync': 'anp_jax.parallel.sync.sync_strategy:Sync',
  'invariant': 'anp_jax.parallel.invariant.invariant_strategy:Invariant',
  'local_sgd': 'anp_jax.parallel.local_sgd.local_sgd_strategy:LocalSgd',
  'parameter_server': 'anp_jax.runtimes.parameter_server.parameter_server_strategy:ParameterServer',
  'channel_split': 'anp_jax.runtimes.channel_split_strategy:ChannelSplit',
  'model_ring': 'anp_jax.runtimes.model_ring.model_ring_strategy:ModelRing',
}
_KEY = 'strategy.name'
# Modes that make steps of a run, and keep no state.
TRIALS = 'benchmark', 'range_test'


@dataclasses.dataclass(frozen=True)
class BatchDivision:
  """How the global batch is cut into parts that are computed by themselves.

  Attributes:
    parts: number of equal micro-batches of the global batch.
    at_once: number of micro-batches computed at the same time.
    description: keys and counts that give `parts`, for an error line.
  """

  parts: int
  at_once: int
  description: str


@dataclasses.dataclass(frozen=True)
class Invocation:
  """A command as a strategy's `run` executes it.

  Attributes:
    config: resolved config.
    workdir: run folder.
    processes: `cluster.Processes` of the run.
    mode: 'train', 'evaluate' or one of TRIALS.
    checkpoint: checkpoint for mode 'evaluate': 'newest', 'best' or a step.
    output: output folder for mode 'evaluate'; '': one in the workdir.
    sentiment: path of a lexicon for mode 'evaluate', VSO or MVSO; '': none.
    emotions: path of a table of MVSO for mode 'evaluate'; '': none.
    devices: devices of the mesh; None: all devices of all processes.
    pool: `runtimes.offload.pool.DevicePool` of devices outside the mesh that
      compute for it; None: no such devices.
  """

  config: Any
  workdir: str
  processes: Any
  mode: str = 'train'
  checkpoint: str = 'newest'
  output: str = ''
  sentiment: str = ''
  emotions: str = ''
  devices: list | None = None
  pool: Any = None

  @property
  def offload_devices(self) -> tuple:
    """The devices of the pool."""
    return self.pool.devices if self.pool else ()


class Strategy:
  """A way to spread training over devices.

  The defaults are those of synchronous training; `parallel.sync.sync_strategy.Sync`
  is what a strategy whose devices work in step inherits from.

  Attributes:
    name: value of config.strategy.name by which `by_name` made it; else ''.
    state: kind of the saved state; strategies of one kind resume each other's
      checkpoints.
    sums_statistics: whether a network may take statistics of the batch over the
      mesh's data axis.
    has_group_weights: whether leaves of the saved state have a leading axis of
      groups.
    steps_together: whether all devices compute each step together.
    keeps_models_apart: whether a run has several models, each with its checkpoints
      and scores.
    planned_mesh: overrides of config.mesh with which the strategy uses all devices
      of a cluster.
    is_elastic: whether a run goes on in place without a process that is lost.
    serves_gradients: whether cores of the hosts receive and apply gradients
      while devices compute.
  """

  name: str = ''
  state: str = 'single'
  sums_statistics: bool = True
  has_group_weights: bool = False
  steps_together: bool = True
  keeps_models_apart: bool = False
  planned_mesh: dict[str, str] = {'mesh.data': '-1', 'mesh.model': '1'}
  is_elastic: bool = False
  serves_gradients: bool = False

  # Its keys and their checks.

  def default_config(self) -> dict[str, keys.Key]:
    """Returns the keys that the strategy adds, by the last part of config.strategy.KEY."""
    return {}

  def check(self, config: dict[str, Any]) -> None:
    """Refuses a config that the strategy cannot run.

    Args:
      config: values by dotted key, each valid by itself.

    Raises:
      ConfigError: naming the key, its value and what was expected.
    """

  def alternatives(self, config: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the overrides of each model; keys that apply to one model are kept.

    Args:
      config: values by dotted key, not checked yet.

    Returns:
      Texts by dotted key, for each model.
    """
    return []

  def describe_scores(self, config: ml_collections.ConfigDict) -> str:
    """Returns the end of a sentence that says what is scored beyond one network."""
    return ''

  # Which processes and devices it takes.

  def joins_jax(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns whether one JAX program spans the processes."""
    return True

  def mixes_platforms(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns whether processes may compute on different platforms."""
    return False

  def run_ends_if_lost(self, config: ml_collections.ConfigDict, mode: str, index: int) -> bool:
    """Returns whether the run ends if process `index` is lost."""
    return True

  def needs_platform(self, config: ml_collections.ConfigDict, mode: str, index: int) -> bool:
    """Returns whether process `index` needs the accelerator of the others."""
    return True

  def xla_settings(self, config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the arguments of `xla_flags.enable` for a run."""
    return {}

  def groups(self, config: ml_collections.ConfigDict, devices: int) -> int:
    """Returns the number of device groups that each have their own weights.

    Raises:
      ConfigError: if the devices do not divide into the config's groups.
    """
    return 1

  # How it divides a batch.

  def check_mesh(self, config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuses devices on which the strategy cannot keep its promises.

    Raises:
      ConfigError: naming the key and what would fit.
    """

  def check_evaluation(self, config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Refuses devices that would give other scores; see `check_mesh`."""

  def batch_division(self, config: ml_collections.ConfigDict, devices: int) -> BatchDivision:
    """Returns how a step's batch is divided.

    Args:
      config: resolved config.
      devices: devices that divide the batch.
    """
    parts = devices * config.accumulate
    return BatchDivision(
      parts, devices, f'{devices} devices x config.accumulate={config.accumulate}'
    )

  def row_counts(
    self, config: ml_collections.ConfigDict, batch_size: int, devices: int
  ) -> tuple[int, ...]:
    """Returns each device's rows of a step's batch of that size; (): equal parts."""
    return ()

  def eval_parts(self, config: ml_collections.ConfigDict, devices: int) -> int:
    """Returns the number whose multiple an evaluation's batch size is."""
    return devices

  # What planners and studies ask.

  def update_shards(self, config: ml_collections.ConfigDict, workers: int) -> int:
    """Returns the number of workers whose gradients one update combines."""
    return workers

  def planned_parts(self, config: ml_collections.ConfigDict, cluster: Any) -> tuple[int, int]:
    """Returns how a batch divides on a planned cluster.

    Args:
      config: resolved config.
      cluster: `costs.collectives.Cluster`.

    Returns:
      Number of parts of the batch, and of micro-batches in each.

    Raises:
      ConfigError: where the strategy cannot use so many devices.
    """
    raise errors.ConfigError(f'config.{_KEY}={self.name!r}: nothing predicts its steps')

  def predicted_step(self, setting: Any, images: int) -> Any:
    """Returns the predicted seconds of a step on a planned cluster.

    Args:
      setting: `costs.steps.Setting`.
      images: images per device and step; for `parameter_server`, per worker.

    Returns:
      `costs.steps.Step`.

    Raises:
      ConfigError: if nothing predicts the steps of this strategy.
    """
    raise errors.ConfigError(f'config.{_KEY}={self.name!r}: nothing predicts its steps')

  def passes(self, config: ml_collections.ConfigDict, devices: int) -> int:
    """Returns the passes per device and step, all of whose gradients are held."""
    return 1

  def state_bytes(
    self, config: ml_collections.ConfigDict, workload: Any, devices: int, divided: int
  ) -> float:
    """Returns the bytes of a device's state: weights, statistics, optimizer, averages.

    Args:
      config: resolved config.
      workload: `costs.work.Workload`.
      devices: devices that divide the batch.
      divided: devices that divide the parameters.
    """
    return workload.state_bytes / divided

  # What it does inside a step, and around the loop.

  def in_steps(self, spec: Any) -> ml_collections.ConfigDict:
    """Returns the config of a run, with the durations of the strategy's keys in steps.

    Args:
      spec: `training.run_spec.RunSpec`.
    """
    return spec.config

  def build(
    self,
    config: ml_collections.ConfigDict,
    specs: Any,
    forward_order: Sequence[str] = (),
    offload_devices: Sequence[Any] = (),
  ) -> Any:
    """Returns the strategy's part of a step.

    Args:
      config: config from `in_steps`.
      specs: pytree of each parameter's PartitionSpec.
      forward_order: paths of the parameters in the order in which the network uses
        them.
      offload_devices: devices outside the mesh.

    Returns:
      Object with the methods of `parallel.sync.sync_step.SyncStep`, which are
      called inside a shard_map over the mesh.
    """
    raise NotImplementedError

  def calibrate(
    self, spec: Any, invocation: Invocation, training: bool
  ) -> tuple[ml_collections.ConfigDict, list[str]]:
    """Measures what the strategy's choices depend on; all processes call it.

    Args:
      spec: `training.run_spec.RunSpec`.
      invocation: command that runs.
      training: whether steps remain; else checkpoints are scored.

    Returns:
      Config to build the steps from, and log lines.
    """
    return spec.config, []

  def replanner(self, spec: Any, invocation: Invocation) -> Any:
    """Returns the object that changes the plan where devices are lost.

    Args:
      spec: `training.run_spec.RunSpec`, from `calibrate`.
      invocation: command that runs.

    Returns:
      `runtimes.calibration.replanner.Replanner`, or None for a fixed plan.
    """
    return None

  def simulation(self, spec: Any, workdir: str, step: int) -> Any:
    """Returns a `simulated_clock.SimulatedClock` from a step on, a `Simulation`, or None."""
    return None

  def order_size(self, config: ml_collections.ConfigDict) -> int:
    """Returns how many numbers of a simulation that orders batches each carries."""
    return 0

  def run(self, invocation: Invocation, loop: Callable[[Invocation], dict]) -> dict:
    """Executes a command in this process.

    Args:
      invocation: command.
      loop: function that trains one model over the mesh of all processes, or
        scores its checkpoint.

    Returns:
      Metrics of the last evaluation; {} without one.
    """
    return loop(invocation)


def find(config: ml_collections.ConfigDict) -> Strategy:
  """Returns the strategy that config.strategy.name names; for errors see `by_name`."""
  return by_name(config.strategy.name)


def by_name(name: str) -> Strategy:
  """Returns the strategy of a name, or of 'package.module:Class'.

  Raises:
    ConfigError: for an unknown name, with the nearest, or if a user's class may
      not be imported; see `trust`.
  """
  _check_form(name)
  return _imported(name)


def declared(name: str) -> Strategy:
  """Returns the strategy of a name; one that may not be imported has the defaults.

  Raises:
    ConfigError: for an unknown name, with the nearest.
  """
  _check_form(name)
  return Strategy() if trust.is_refused(name) else _imported(name)


def _check_form(name):
  """Refuses what is neither a name nor package.module:Class."""
  if not trust.is_class_name(name):
    errors.check_choice(f'config.{_KEY}={name!r}', name, BUILT_IN, 'package.module:Class')


@functools.cache
def _imported(name):
  if name in BUILT_IN:
    module, _, attribute = BUILT_IN[name].partition(':')
    strategy = getattr(importlib.import_module(module), attribute)()
  else:
    strategy = trust.made(_KEY, name, Strategy, {})
  strategy.name = name
  return strategy
