"""Strategies: how training is spread over devices, and where to find them.

A strategy is one object: what a config says of it, what it refuses, what it
does inside a step, and what it starts. Nothing heavy is imported to look at
one; what needs JAX is imported by the methods that need it.
"""

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any, Protocol

from anp_jax.config import errors, trust

if TYPE_CHECKING:
  from collections.abc import Callable

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
    parts: micro-batches of the global batch, all of one size.
    at_once: micro-batches that are computed at the same time.
    description: the keys and counts that give `parts`, for an error line.
  """

  parts: int
  at_once: int
  description: str


@dataclasses.dataclass(frozen=True)
class Job:
  """What a command asks of a strategy's `run`.

  Attributes:
    config: resolved and valid.
    workdir: folder of the run.
    processes: `cluster.Processes` of the run.
    mode: 'train', 'evaluate' or one of TRIALS.
    checkpoint: that mode 'evaluate' scores: 'newest', 'best' or a step.
    output: folder for what mode 'evaluate' writes; '': one in the workdir.
    devices: of the mesh; None: all devices of all processes.
    pool: `runtimes.offload.pool.DevicePool`, of devices outside the mesh that
      compute for it; None: there are none.
  """

  config: Any
  workdir: str
  processes: Any
  mode: str = 'train'
  checkpoint: str = 'newest'
  output: str = ''
  devices: list | None = None
  pool: Any = None

  @property
  def offload_devices(self) -> tuple:
    """The devices of the pool."""
    return self.pool.devices() if self.pool else ()


class Strategy(Protocol):
  """A way to spread training over devices.

  The defaults are those of synchronous training; `parallel.sync.sync_strategy.Sync`
  is what a strategy whose devices work in step inherits from.

  Attributes:
    name: in config.strategy.name.
    state: kind of the saved state; strategies of one kind go on with each
      other's checkpoints.
    sums_statistics: whether a network may take statistics of the batch over the
      mesh's data axis.
    has_group_weights: whether leaves of the saved state have a leading axis of
      groups.
    steps_together: whether all devices make each step of the run together.
    keeps_models_apart: whether a run has several models with checkpoints and
      scores of their own.
    planned_mesh: keys of config.mesh, and their texts, with which it uses all
      devices of a cluster.
    serves_gradients: whether cores of the hosts receive and apply gradients
      while devices compute.
  """

  name: str
  state: str = 'single'
  sums_statistics: bool = True
  has_group_weights: bool = False
  steps_together: bool = True
  keeps_models_apart: bool = False
  planned_mesh: 'dict[str, str]' = {'mesh.data': '-1', 'mesh.model': '1'}
  serves_gradients: bool = False

  # What a config says.

  def default_config(self) -> dict[str, 'keys.Key']:
    """The keys that it adds, config.strategy.KEY, by the last part KEY.

    `anp_jax.config.keys` makes them; a config has them only if this strategy is
    chosen.
    """
    return {}

  def check(self, config: dict[str, Any]) -> None:
    """Refuses a config that the strategy cannot run.

    Args:
      config: by dotted key, each good by itself.

    Raises:
      ConfigError: naming the key, its value and what was expected.
    """

  def alternatives(self, config: dict[str, Any]) -> list[dict[str, str]]:
    """What differs in the models of a run; keys that apply to one are kept.

    Args:
      config: by dotted key; no value is checked yet.

    Returns:
      For each model, texts by dotted key.
    """
    return []

  def describe_scores(self, config) -> str:
    """What is scored beyond one network's weights, to end a sentence."""
    return ''

  # Which processes and devices it takes.

  def spans_processes(self, config, mode: str) -> bool:
    """Whether all processes meet, and end together, when the run starts."""
    return True

  def joins_jax(self, config, mode: str) -> bool:
    """Whether one JAX program spans the processes."""
    return True

  def mixes_platforms(self, config, mode: str) -> bool:
    """Whether processes may compute on unlike platforms."""
    return False

  def is_essential(self, config, mode: str, index: int) -> bool:
    """Whether the run ends if process `index` is lost."""
    return True

  def needs_platform(self, config, index: int) -> bool:
    """Whether process `index` needs the accelerator that others have."""
    return True

  def xla_settings(self, config) -> dict[str, Any]:
    """Arguments of `xla_flags.enable` for a run."""
    return {}

  def groups(self, config, devices: int) -> int:
    """How many groups of the devices have weights of their own.

    Raises:
      ConfigError: if the devices do not divide into the config's groups.
    """
    return 1

  # How it divides a batch.

  def check_mesh(self, config, mesh) -> None:
    """Refuses devices on which the strategy cannot keep its promises.

    Raises:
      ConfigError: naming the key and what would fit.
    """

  def check_evaluation(self, config, mesh) -> None:
    """Refuses devices that would give other scores; see `check_mesh`."""

  def batch_division(self, config, devices: int) -> BatchDivision:
    """How a step's batch is cut.

    Args:
      config: of the run.
      devices: that divide the batch.
    """
    parts = devices * config.accumulate
    return BatchDivision(
      parts, devices, f'{devices} devices x config.accumulate={config.accumulate}'
    )

  def eval_parts(self, config, devices: int) -> int:
    """The number of parts that an evaluation's batch is a multiple of."""
    return devices

  # What planners and studies ask.

  def update_shards(self, config, workers: int) -> int:
    """The parts of a batch that are in one update, each of one worker."""
    return workers

  def exchange_share(self, config, batch_size: int, examples: int) -> float:
    """The share of the steps after which groups exchange weights."""
    return 0.0

  def planned_parts(self, config, cluster) -> tuple[int, int]:
    """How a batch divides on a cluster that is not here.

    Args:
      config: resolved.
      cluster: `costs.collectives.Cluster`.

    Returns:
      The parts of the batch, and the micro-batches of each.

    Raises:
      ConfigError: where the strategy cannot have so many devices.
    """
    raise errors.ConfigError(f'config.{_KEY}={self.name!r}: nothing predicts its steps')

  def predicted_step(self, setting, images: int):
    """The seconds of a step on a cluster that is not here.

    Args:
      setting: `costs.steps.Setting`.
      images: images that a device computes in a step; for `parameter_server`,
        those of a worker's devices together.

    Returns:
      `costs.steps.Step`.

    Raises:
      ConfigError: if nothing predicts the steps of this strategy.
    """
    raise errors.ConfigError(f'config.{_KEY}={self.name!r}: nothing predicts its steps')

  def passes(self, config, devices: int) -> int:
    """The passes that a device makes in a step, whose gradients are all held."""
    return 1

  def state_bytes(self, config, workload, devices: int, divided: int) -> float:
    """The bytes of a device's state: weights, statistics, optimizer, averages.

    Args:
      config: resolved.
      workload: `costs.work.Workload`.
      devices: devices of the batch.
      divided: devices over which parameters are divided.
    """
    return workload.state_bytes / divided

  # What it does inside a step, and around the loop.

  def in_steps(self, spec):
    """The config of a run, with durations of its own keys in steps.

    Args:
      spec: `training.run_spec.RunSpec`.
    """
    return spec.config

  def build(self, config, specs, forward_order=(), offload_devices=()):
    """What the strategy does inside a step.

    Args:
      config: of the run, from `in_steps`.
      specs: PartitionSpec of each parameter.
      forward_order: paths of the parameters in the order in which the network uses
        them.
      offload_devices: devices outside the mesh.

    Returns:
      An object with the methods of `parallel.sync.sync_step.SyncStep`, which are
      called inside a shard_map over the mesh.
    """
    raise NotImplementedError

  def calibrate(self, spec, job: Job, training: bool):
    """Decides what has to be measured first; all processes call it.

    Args:
      spec: `training.run_spec.RunSpec`.
      job: of the run.
      training: whether steps are left to make; else checkpoints are scored.

    Returns:
      The config to build the steps from, and lines for people.
    """
    return spec.config, []

  def replanner(self, spec, job: Job):
    """What changes the plan of a run that is under way.

    Args:
      spec: `training.run_spec.RunSpec`, from `calibrate`.
      job: of the run.

    Returns:
      `runtimes.calibration.replanner.Replanner`, or None where nothing does.
    """
    return None

  def simulated_clock(self, spec):
    """What tells the time of a cluster that is simulated.

    Args:
      spec: `training.run_spec.RunSpec`.

    Returns:
      `parallel.simulated_clock.SimulatedClock`, or None where none is
      simulated.
    """
    return None

  def run(self, job: Job, loop: 'Callable[[Job], dict]') -> dict:
    """Does what a command asks, in this process.

    Args:
      job: the command.
      loop: trains one model in step over the mesh of all processes, or scores
        its checkpoint.

    Returns:
      The metrics of the last evaluation, {} if there was none.
    """
    return loop(job)


def find(config) -> Strategy:
  """The strategy that config.strategy.name names.

  Raises:
    ConfigError: if there is none of that name, with the nearest.
  """
  return by_name(config.strategy.name)


def by_name(name: str) -> Strategy:
  """The strategy of a name, or of 'package.module:Class'.

  Raises:
    ConfigError: if there is none, with the nearest name, or if a class of the
      user's may not be imported; see `trust`.
  """
  _check_form(name)
  return _imported(name)


def declared(name: str) -> Strategy:
  """The strategy of a name; of one that may not be imported, the defaults.

  It is for those who only look at the config of a run, whose class is not
  called.

  Raises:
    ConfigError: as `by_name`, but for what may not be imported.
  """
  _check_form(name)
  return _NotImported() if trust.is_refused(name) else _imported(name)


class _NotImported(Strategy):
  """A strategy of a user's whose class was not imported."""

  name = ''


def _check_form(name):
  """Refuses what is neither a name nor package.module:Class."""
  if name not in BUILT_IN and not trust.is_class_name(name):
    raise errors.ConfigError(
      f'config.{_KEY}={name!r}: expected one of {", ".join(BUILT_IN)} '
      f'or package.module:Class{errors.nearest(name, BUILT_IN)}'
    )


@functools.cache
def _imported(name):
  if name in BUILT_IN:
    module, _, attribute = BUILT_IN[name].partition(':')
    return getattr(importlib.import_module(module), attribute)()
  return trust.made(_KEY, name, Strategy, {})
