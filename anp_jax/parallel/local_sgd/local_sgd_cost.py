"""Seconds of a step of `local_sgd`."""

import dataclasses

from anp_jax.costs import collectives, steps
from anp_jax.parallel.local_sgd import exchanges


def predicted_step(setting: steps.Setting, images: int) -> steps.Step:
  """Synchronous steps within groups, which exchange weights periodically."""
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
