"""The strategy `parameter_server`: which processes do what; see `run`."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import TYPE_CHECKING, Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import keys, optimizers, rules, simulation_keys, strategy as strategy_lib
from anp_jax.parallel.sync import sync_strategy as sync
from anp_jax.runtimes import transport_keys
from anp_jax.system import cores

if TYPE_CHECKING:
  from anp_jax.costs import collectives, steps, work
  from anp_jax.parallel.sync import sync_step
  from anp_jax.training import run_spec

# On one core a worker's pass holds the only thread of XLA's CPU devices: an
# update, and a batch that is made ahead, would wait for its end. (On two cores
# two more made LeNet's passes 5 % slower.)
_SPARE_THREADS = 2
_SIMULATION = {
  **simulation_keys.KEYS,
  'simulate.pull_seconds': simulation_keys.seconds('seconds in which a worker reads the weights'),
  'simulate.push_seconds': simulation_keys.seconds(
    'seconds in which a gradient reaches the servers'
  ),
}


class ParameterServer(sync.Sync):
  """Asynchronous training with parameter servers."""

  is_elastic = False
  steps_together = False
  planned_mesh = {}
  serves_gradients = True

  def default_config(self) -> dict[str, keys.Key]:
    """The servers, when they update, and what they wait for."""
    declared = {
      'servers': keys.integer(
        1, 'number of server processes, the first ones; each keeps a slice of the weights', above=0
      ),
      'dedicated': keys.flag(False, 'whether server processes only serve, and do not also train'),
      'mode': keys.text(
        'async',
        'update mode; rennala: the first gradients of one version together; '
        'synchronous: all workers together',
        ('async', 'rennala', 'synchronous'),
      ),
      'parts': keys.integer(
        0,
        'gradients of an update of rennala, each of a part of a batch; 0: as many as workers',
        at_least=0,
      ),
      'backup_workers': keys.integer(
        0, 'workers that a synchronous update does not wait for', at_least=0
      ),
      'look_ahead': keys.text(
        'none', 'how workers read weights that momentum has moved already', ('none', 'dana')
      ),
      'in_flight': keys.integer(
        1, 'gradients in flight per worker; 2 overlaps compute and transfer', above=0
      ),
      **_SIMULATION,
    }
    settings = {name: dataclasses.replace(key, resumable=True) for name, key in declared.items()}
    return settings | transport_keys.KEYS

  def check(self, config: dict[str, Any]) -> None:
    """Refuses optimizers and modes that slices of weights cannot have."""
    rules.check_tls(config)
    optimizer, mode = config['optimizer.name'], config['strategy.mode']
    elementwise = [name for name, entry in optimizers.OPTIMIZERS.items() if entry.is_elementwise]
    has_simulation = bool(config['strategy.simulate.workers'])
    condition = "where strategy.simulate.workers are simulated and strategy.mode is not 'async'"
    looks_ahead = config['strategy.look_ahead'] != 'none'
    for refused, key, expected in (
      (
        optimizer not in elementwise,
        'optimizer.name',
        f'one of {", ".join(elementwise)} where strategy.name is parameter_server: a server '
        'updates a slice of the weights, element by element',
      ),
      (
        has_simulation and config['strategy.servers'] > 1,
        'strategy.servers',
        '1 where strategy.simulate.workers are simulated',
      ),
      (
        config['strategy.backup_workers'] and mode != 'synchronous',
        'strategy.backup_workers',
        f"0 where strategy.mode is '{mode}': nobody is waited for there",
      ),
      (
        config['strategy.parts'] and mode != 'rennala',
        'strategy.parts',
        f"0 where strategy.mode is '{mode}': only rennala collects gradients",
      ),
      (
        has_simulation and mode != 'async' and config.get('optimizer.clip_norm'),
        'optimizer.clip_norm',
        f'0 {condition}: real workers clip the gradients of an update one by one',
      ),
      (
        has_simulation and mode != 'async' and config.get('model.norm_group') == 0,
        'model.norm_group',
        f'1 or more {condition}: real workers normalise the parts of an update one by one',
      ),
      (
        config['strategy.dedicated'] and not config['batch_size'],
        'batch_size',
        "a number of images where strategy.dedicated is True: servers do not see workers' devices",
      ),
      (
        looks_ahead and mode != 'async',
        'strategy.look_ahead',
        f"'none' where strategy.mode is '{mode}': no gradient is stale there",
      ),
      (
        looks_ahead and optimizer not in ('momentum', 'nesterov'),
        'strategy.look_ahead',
        f"'none' where optimizer.name is {optimizer!r}: only momentum and nesterov have the "
        'momentum for it',
      ),
    ):
      rules.check(not refused, key, config.get(key), expected)
    rules.check_replicated(
      config, 'strategy.name is parameter_server: the servers divide the state'
    )

  def joins_jax(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns whether the processes compute together: those that train send gradients."""
    return mode != 'train'

  def mixes_platforms(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns whether servers may compute on their CPUs; workers are compared by server 0."""
    return config.strategy.dedicated and mode == 'train'

  def run_ends_if_lost(self, config: ml_collections.ConfigDict, mode: str, index: int) -> bool:
    """Returns True for a server, whose slice is lost with it, and False for a worker."""
    return mode != 'train' or index < config.strategy.servers

  def needs_platform(self, config: ml_collections.ConfigDict, mode: str, index: int) -> bool:
    """Returns False for a process that only serves; process 0 evaluates as well."""
    s = config.strategy
    return mode != 'train' or not (s.dedicated and 0 < index < s.servers)

  def xla_settings(self, config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Threads for updates that come while a worker computes."""
    return {'spare': spare_threads()}

  def planned_parts(
    self, config: ml_collections.ConfigDict, cluster: 'collectives.Cluster'
  ) -> tuple[int, int]:
    """Divides a batch over a worker's devices, or those of all that an update is of."""
    s = config.strategy
    workers = cluster.nodes - s.servers * bool(s.dedicated)
    if workers <= s.backup_workers:
      raise config_lib.ConfigError(
        f'{cluster.nodes} nodes are too few for config.strategy.servers='
        f'{s.servers} and backup_workers={s.backup_workers}'
      )
    return self.update_shards(config, workers) * cluster.devices, config.accumulate

  def update_shards(self, config: ml_collections.ConfigDict, workers: int) -> int:
    """In mode rennala config.strategy.parts, in synchronous one of each worker but the backups."""
    from anp_jax.runtimes.parameter_server import scheduler

    return scheduler.data_shards(config, workers)

  def predicted_step(self, setting: 'steps.Setting', images: int) -> 'steps.Step':
    """Predicts a step from how often the workers finish a gradient."""
    from anp_jax.runtimes.parameter_server import server_cost

    return server_cost.predicted_step(setting, images)

  def state_bytes(
    self, config: ml_collections.ConfigDict, workload: 'work.Workload', devices: int, divided: int
  ) -> float:
    """Weights and statistics: a host's memory holds the optimizer's state."""
    return workload.param_bytes + 4 * workload.statistics

  def simulation(self, spec: 'run_spec.RunSpec', workdir: str, step: int) -> Any:
    """The order of the updates of simulated workers; None of real ones."""
    if not spec.config.strategy.simulate.workers:
      return None
    from anp_jax.runtimes.parameter_server import simulation

    return simulation.Simulation(spec, workdir, step)

  def order_size(self, config: ml_collections.ConfigDict) -> int:
    """The numbers of a `delayed_step.Order`, for simulated workers."""
    if not config.strategy.simulate.workers:
      return 0
    from anp_jax.runtimes.parameter_server import delayed_step

    return len(delayed_step.Order._fields)

  def build(
    self,
    config: ml_collections.ConfigDict,
    specs: Any,
    forward_order: Sequence[str] = (),
    offload_devices: Sequence[Any] = (),
  ) -> 'sync_step.SyncStep':
    """Makes the step of a worker, or of all where they are simulated."""
    if not config.strategy.simulate.workers:
      return super().build(config, specs, forward_order, offload_devices)
    from anp_jax.runtimes.parameter_server import delayed_step

    return delayed_step.DelayedStep(config, specs, forward_order)

  def run(
    self, invocation: strategy_lib.Invocation, loop: Callable[[strategy_lib.Invocation], dict]
  ) -> dict[str, float]:
    """Serves, trains, or both."""
    config, processes = invocation.config, invocation.processes
    workers = config.strategy.simulate.workers
    if invocation.mode == 'train' and workers and processes.count > 1:
      raise config_lib.ConfigError(
        f'config.strategy.simulate.workers={workers}: expected one process, which computes for '
        f'all of them, found {processes.count}'
      )
    if invocation.mode != 'train' or workers:
      return loop(invocation)
    from anp_jax.runtimes.parameter_server import parameter_server_run as run  # Flight is imported

    return run.run(config, invocation.workdir, processes)


def spare_threads() -> int:
  """Returns how many threads more than cores XLA's CPU devices have."""
  return _SPARE_THREADS if cores.count() == 1 else 0
