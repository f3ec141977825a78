"""The strategy `local_sgd`: its groups of devices; see its step."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from anp_jax import config as config_lib
from anp_jax.config import keys, simulation_keys, strategy
from anp_jax.costs import collectives, steps, work
from anp_jax.parallel.sync import sync_strategy as sync

if TYPE_CHECKING:
  from anp_jax.parallel import simulated_clock
  from anp_jax.parallel.local_sgd import local_sgd_step


class LocalSgd(sync.Sync):
  """Groups of devices that exchange weights periodically."""

  state = 'local_sgd'
  has_group_weights = True

  def default_config(self) -> dict[str, keys.Key]:
    """The groups, and the times and the form of their exchanges."""
    shared = super().default_config()
    del shared['rows']  # a group's rows are equal
    return {
      'groups': keys.integer(
        2, 'groups of neighbouring devices; one device may also hold several', above=0
      ),
      'period': keys.staircase(
        '8', "steps between exchanges; '1,8@1000 steps': 8 after 1000 steps"
      ),
      'moments': keys.text(
        'keep', "what an exchange does with a group's optimizer state", ('keep', 'average')
      ),
      **shared,
      'simulate.exchange_seconds': simulation_keys.seconds(
        'seconds of an exchange of weights between groups'
      ),
    }

  def check(self, config: dict[str, Any]) -> None:
    """Refuses simulated workers that divide neither the batch nor groups."""
    simulation_keys.check(config, config.get('strategy.groups', 1))

  def describe_scores(self, config: ConfigDict) -> str:
    """The mean that is evaluated."""
    return f', the mean of {config.strategy.groups} groups'

  def groups(self, config: ConfigDict, devices: int) -> int:
    """The mesh's groups; if there are more than devices, a device has several."""
    groups = config.strategy.groups
    # With four groups on six devices, a device would have rows of two groups.
    if groups % devices and devices % groups:
      raise config_lib.ConfigError(
        f'config.strategy.groups={groups}: expected a number that divides the '
        f'{devices} devices of the batch, or a multiple of it'
      )
    return min(groups, devices)

  def batch_division(self, config: ConfigDict, devices: int) -> strategy.BatchDivision:
    """A part for each device, or for each group if there are more groups."""
    groups = config.strategy.groups
    if groups <= devices:
      return super().batch_division(config, devices)
    return strategy.BatchDivision(
      groups * config.accumulate,
      groups,
      f'config.strategy.groups={groups} x config.accumulate={config.accumulate}',
    )

  def predicted_step(self, setting: steps.Setting, images: int) -> steps.Step:
    """Predicts a step within groups, and a part of an exchange between them."""
    from anp_jax.parallel.local_sgd import exchanges

    s, cluster = setting.config.strategy, setting.cluster
    groups = min(s.groups, cluster.size)
    # A device of several groups makes a pass and an update for each.
    passes = max(1, s.groups // cluster.size)
    size = cluster.size // groups
    devices = min(size, cluster.devices)
    group = dataclasses.replace(cluster, nodes=max(1, size // devices), devices=devices)
    punctual = dataclasses.replace(setting, jitter=0.0, slow=())
    inner = steps.synchronous(punctual, images, cluster=group)
    inner = dataclasses.replace(inner, fixed=passes * inner.fixed)
    # A group that is smaller than a node also exchanges within the node.
    within = max(1, cluster.devices // devices) if size <= cluster.devices else 1
    peers = dataclasses.replace(setting.effective, nodes=max(1, groups // within), devices=within)
    size = setting.workload.param_bytes + 4 * setting.workload.statistics
    if s.moments == 'average':
      size += setting.workload.state_bytes - setting.workload.param_bytes
    share = exchanges.share(setting.config, images * cluster.size, setting.workload.examples)
    exchange = share * collectives.all_reduce(peers, size)
    # Groups exchange the values of each step, so that all wait for the slowest device.
    late = setting.straggler_delay(inner.compute + inner.fixed, cluster.size)
    return dataclasses.replace(
      inner, images=images * cluster.size, communication=inner.communication + exchange + late
    )

  def passes(self, config: ConfigDict, devices: int) -> int:
    """A pass for each group of a device."""
    return max(1, config.strategy.groups // devices)

  def state_bytes(
    self, config: ConfigDict, workload: work.Workload, devices: int, divided: int
  ) -> float:
    """The bytes of a state for each group."""
    return super().state_bytes(config, workload, devices, divided) * self.passes(config, devices)

  def in_steps(self, spec: Any) -> ConfigDict:
    """The config, with the starts of its periods in steps."""
    from anp_jax.parallel.local_sgd import exchanges

    return exchanges.in_steps(spec.config, spec.batch_size, spec.examples)

  def step_class(self) -> 'type[local_sgd_step.LocalStep]':
    """The class that sums inside a group, and exchanges between groups."""
    from anp_jax.parallel.local_sgd import local_sgd_step

    return local_sgd_step.LocalStep

  def simulation(
    self, spec: Any, workdir: str, step: int
  ) -> 'simulated_clock.SimulatedClock | None':
    """The clock of groups that wait for each other in exchanges only."""
    s = spec.config.strategy
    if not s.simulate.workers:
      return None
    from anp_jax.parallel import simulated_clock
    from anp_jax.parallel.local_sgd import exchanges

    is_exchange = functools.partial(exchanges.is_due, self.in_steps(spec))
    return simulated_clock.SimulatedClock(
      spec.config, s.groups, is_exchange, s.simulate.exchange_seconds
    )
