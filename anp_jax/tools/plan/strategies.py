"""Seconds of a step of each strategy, on any number of nodes.

Each function takes a Setting and the images that a device computes at a time,
and gives a Step. docs/strategies.md says what the strategies do.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from anp_jax import config as config_lib
from anp_jax.parallel.local_sgd import exchanges
from anp_jax.tools.plan import (
  collectives,
  model,
  order_statistics,
  plan_tables,
  server,
  sizes,
  workload as workload_lib,
)


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is planned for.

  Attributes:
    config: resolved.
    workload: of its network.
    device: that computes.
    cluster: nodes and links, nominal.
    efficiency: what is reached.
    jitter: standard deviation of a device's step over its mean.
    measured: a and c of T(b) = a + c b, where the device's step was timed.
    slow: factors of the nodes that take so many times as long.
    sharing: devices that share the cores of one, on a machine with too few.
    handling: seconds of work that each gradient of `parameter_server` is for its worker
      and for the servers, where the cores that compute do it and it was timed.
  """

  config: Any
  workload: workload_lib.Workload
  device: plan_tables.Device
  cluster: collectives.Cluster
  efficiency: model.Efficiency
  jitter: float = model.JITTER
  measured: tuple[float, float] | None = None
  slow: tuple[float, ...] = ()
  sharing: float = 1.0
  handling: tuple[float, float] | None = None

  @property
  def reached(self) -> collectives.Cluster:
    """The cluster with the bandwidths that are reached."""
    return model.scaled(self.cluster, self.efficiency)

  @property
  def is_sharded(self) -> bool:
    """Whether parameters are divided over the devices (FSDP)."""
    return any(rule == 'fsdp' for _, rule in self.config.sharding)

  def alone(self, images: float, share: float = 1.0) -> model.Compute:
    """A step of one device that waits for nobody."""
    if self.measured is not None:
      fixed, per_image = (self.sharing * seconds for seconds in self.measured)
      # A measured step has its micro-batches' starts in it.
      return model.Compute(per_image * images, 0.0, fixed)
    alone = model.compute(self.workload, self.device, images, self.efficiency, share)
    # Each micro-batch starts the same kernels again.
    extra = self.config.accumulate - 1
    starts = self.workload.kernels * self.efficiency.kernel_seconds
    return dataclasses.replace(alone, fixed=alone.fixed + extra * starts)

  def lateness(self, seconds: float, count: int) -> float:
    """How much longer than one the last of `count` devices takes."""
    factors = [f for f in self.slow for _ in range(self.cluster.devices)]
    late = order_statistics.slowest(seconds, self.jitter, count, factors=factors)
    return late - seconds


@dataclasses.dataclass(frozen=True)
class Step:
  """One step of all devices.

  Attributes:
    images: that all devices compute in it.
    compute: seconds that grow with a device's images.
    fixed: seconds whatever they are.
    communication: seconds that are neither: waiting for data or for others.
    run_factor: seconds of a run over those of its images at this rate.
    update_images: of one update of the weights, where it is not `images`; 0:
      it is.
  """

  images: float
  compute: float
  fixed: float
  communication: float
  run_factor: float = 1.0
  update_images: float = 0

  @property
  def seconds(self) -> float:
    """All of it, without waiting for input."""
    return self.compute + self.fixed + self.communication


def step(setting: Setting, images: int) -> Step:
  """A step of config.strategy.

  Args:
    setting: what is planned for.
    images: that a device computes in a step; with `channel_split`, and for a
      worker's devices together with `parameter_server`, see `plan.images_per_device`.

  Raises:
    ConfigError: if the strategy is of another module, or does not fit.
  """
  name = setting.config.strategy.name
  if name not in _STEPS:
    raise config_lib.ConfigError(
      f'config.strategy.name={name!r}: no model of it; expected one of '
      f'{", ".join(_STEPS)}{config_lib.nearest(name, _STEPS)}'
    )
  return _STEPS[name](setting, images)


def _synchronous(setting: Setting, images: int, cluster=None, overlap=None) -> Step:
  """Gradients of all devices are summed, with parameters whole or divided."""
  cluster = cluster or setting.cluster
  reached = model.scaled(cluster, setting.efficiency)
  if overlap is None:
    # Micro-batches are added before anything is sent.
    is_one = setting.config.accumulate == 1
    overlap = setting.efficiency.overlap if is_one else 0.0
  size = cluster.size
  alone = setting.alone(images, 1 / size if setting.is_sharded else 1.0)
  s = setting.config.strategy
  buckets = model.buckets(setting.workload, model.width(s.reduce_dtype), s.bucket_megabytes)
  collective = collectives.all_reduce
  gathered = 0.0
  if setting.is_sharded and size > 1:
    gather = collectives.gather(reached, setting.workload.param_bytes)
    gathered = gather * (1 - overlap)
    collective = collectives.gather  # a reduce-scatter takes as long
  waiting = setting.lateness(alone.total, size)
  waiting += model.waiting(alone, buckets, reached, overlap, 0.0, collective)
  return Step(
    images=images * size, compute=alone.images, fixed=alone.fixed, communication=waiting + gathered
  )


def _invariant(setting: Setting, images: int) -> Step:
  """Logical shards one after another; sums follow the backward pass."""
  shards, size = setting.config.strategy.logical_shards, setting.cluster.size
  result = _synchronous(setting, images, overlap=0.0)
  per_device = max(1, shards // size)
  starts = setting.workload.kernels * setting.efficiency.kernel_seconds
  # A device sends that many sums of the tree; the first is in `result`.
  partial = per_device // (per_device & -per_device) if size > 1 else 1
  reached = model.scaled(setting.cluster, setting.efficiency)
  sent = setting.workload.param_bytes + 4 * setting.workload.statistics
  scattered = collectives.gather(reached, sent)
  return dataclasses.replace(
    result,
    fixed=result.fixed + (per_device - 1) * starts,
    communication=result.communication + (partial - 1) * scattered,
  )


def _local(setting: Setting, images: int) -> Step:
  """Synchronous within groups, which exchange weights now and then."""
  s, cluster = setting.config.strategy, setting.cluster
  groups = min(s.groups, cluster.size)
  # A device of several groups makes a pass and an update for each.
  passes = max(1, s.groups // cluster.size)
  size = cluster.size // groups
  devices = min(size, cluster.devices)
  group = dataclasses.replace(cluster, nodes=max(1, size // devices), devices=devices)
  punctual = dataclasses.replace(setting, jitter=0.0, slow=())
  inner = _synchronous(punctual, images, cluster=group)
  inner = dataclasses.replace(inner, fixed=passes * inner.fixed)
  # A group that is smaller than a node exchanges within it, too.
  within = max(1, cluster.devices // devices) if size <= cluster.devices else 1
  peers = dataclasses.replace(setting.reached, nodes=max(1, groups // within), devices=within)
  size = setting.workload.param_bytes + 4 * setting.workload.statistics
  if s.moments == 'average':
    size += setting.workload.state_bytes - setting.workload.param_bytes
  share = exchanges.share(setting.config, images * cluster.size, setting.workload.examples)
  exchange = share * collectives.all_reduce(peers, size)
  # Groups exchange numbers of each step, so that all wait for the last device.
  late = setting.lateness(inner.compute + inner.fixed, cluster.size)
  return dataclasses.replace(
    inner, images=images * cluster.size, communication=inner.communication + exchange + late
  )


def _server(setting: Setting, images: int) -> Step:
  """Workers of a node each pull weights and push gradients."""
  alike = dataclasses.replace(setting, slow=())
  node = dataclasses.replace(setting.cluster, nodes=1)
  inner = _synchronous(alike, images, cluster=node)
  cycle = server.cycle(setting, inner.seconds)
  images *= setting.cluster.devices * cycle.useful
  return Step(
    images=images,
    compute=inner.compute,
    fixed=inner.fixed,
    communication=cycle.seconds - inner.compute - inner.fixed,
    update_images=images / cycle.updates,
  )


def _channel_split(setting: Setting, images: int) -> Step:
  """Convolutions divided by channels, each where that is faster."""
  config, cluster = setting.config, setting.cluster
  data, count = sizes.mesh(config, cluster.size)
  if count == 1:  # the batch is divided, and nothing else
    return _synchronous(setting, images)
  split = _part(setting.reached, count)
  alone = setting.alone(images)
  flops = sum(x.flops for x in setting.workload.layers) or 1.0
  number = model.width(setting.workload.dtype)
  compute = communication = 0.0
  # Over 'data': of split kernels, a device's own part.
  summed = 4.0 * setting.workload.statistics
  wire = model.width(config.strategy.reduce_dtype)
  is_split = {}
  for i, layer in enumerate(setting.workload.layers):
    unsplit = alone.images * layer.flops / flops
    # The map is gathered, and the gradient of the operand summed: a device gets
    # all of it, or its own channels. The images need no gradient.
    sent = collectives.gather(split, layer.gathered * images * number)
    if i:
      total = collectives.gather if is_split.get(layer.reads) else collectives.all_reduce
      sent += total(split, layer.inputs * images * number)
    is_split[layer.path] = layer.is_convolution and unsplit / count + sent < unsplit
    if is_split[layer.path]:
      compute += unsplit / count
      communication += sent
      summed += layer.parameters * wire / count
    else:
      compute += unsplit
      summed += layer.parameters * wire
  total = compute + alone.fixed
  communication += setting.lateness(total, cluster.size)
  communication += collectives.all_reduce(_peers(setting.reached, data, count), summed)
  return Step(images * data, compute, alone.fixed, communication)


def _part(cluster, count) -> collectives.Cluster:
  """The first `count` devices of a cluster, whole nodes if there are more."""
  devices = min(count, cluster.devices)
  return dataclasses.replace(cluster, nodes=max(1, count // devices), devices=devices)


def _peers(cluster, data, count) -> collectives.Cluster:
  """The devices that hold one part of `count`, one in each group of them.

  The parts of a node's devices travel at the same time and share its ports.
  """
  devices = min(data, max(1, cluster.devices // count))
  together = min(count, cluster.devices)
  link = dataclasses.replace(cluster.link, bandwidth=cluster.link.bandwidth / together)
  return dataclasses.replace(cluster, nodes=max(1, data // devices), devices=devices, link=link)


def _model_ring(setting: Setting, images: int) -> Step:
  """Models go round a ring of stations, each with its part of the data."""
  s, cluster = setting.config.strategy, setting.cluster
  per_device = s.station == 'device'
  stations = cluster.size if per_device else cluster.nodes
  models = len(s.models)
  active = min(models, stations)
  node = dataclasses.replace(cluster, nodes=1, devices=1 if per_device else cluster.devices)
  inner = _synchronous(setting, images, cluster=node)
  steps = max(1.0, setting.workload.examples / stations / inner.images)
  reached = setting.reached
  link = reached.link if cluster.nodes > 1 else reached.node_link
  sent = 0.0
  if stations > 1:
    sent = collectives.send(link, setting.workload.state_bytes) / steps
  late = setting.lateness(inner.seconds, active)
  epochs = max(1, round(setting.workload.total_images / setting.workload.examples))
  laps = max(models, stations)
  slots = laps * epochs + active - 1
  return Step(
    images=inner.images * active,
    compute=inner.compute,
    fixed=inner.fixed,
    communication=inner.communication + sent + late,
    run_factor=models * slots / (laps * epochs),
  )


_STEPS: dict[str, Callable[[Setting, int], Step]] = {
  'sync': _synchronous,
  'invariant': _invariant,
  'local_sgd': _local,
  'parameter_server': _server,
  'channel_split': _channel_split,
  'model_ring': _model_ring,
}
