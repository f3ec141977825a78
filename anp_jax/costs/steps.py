"""Seconds of a synchronous step, on any number of nodes.

Strategies that sum gradients in every step predict their steps with `synchronous`.
"""

import dataclasses

from ml_collections import ConfigDict

from anp_jax.config import emulation_keys
from anp_jax.costs import collectives, device_step, hardware, order_statistics, work


@dataclasses.dataclass(frozen=True)
class Setting:
  """A config, its workload, and the cluster that its steps are predicted for.

  Attributes:
    config: resolved config.
    workload: work of its network.
    device: data sheet of the devices.
    cluster: nodes and links with the bandwidths of their data sheets.
    efficiency: shares of the data sheets that devices and links reach.
    jitter: standard deviation of a device's step time over its mean.
    measured: a and c of T(b) = a + c b, where the device's step was timed.
    slow: slowdown of each slow node.
    sharing: devices per set of cores, above 1 on a machine with too few cores.
    handling: seconds that a gradient of `parameter_server` costs its worker and the
      servers, where the same cores compute and it was timed.
  """

  config: ConfigDict
  workload: work.Workload
  device: hardware.Device
  cluster: collectives.Cluster
  efficiency: device_step.Efficiency
  jitter: float = device_step.JITTER
  measured: tuple[float, float] | None = None
  slow: tuple[float, ...] = ()
  sharing: float = 1.0
  handling: tuple[float, float] | None = None

  @property
  def effective(self) -> collectives.Cluster:
    """The cluster with the bandwidths that its links reach."""
    return device_step.scaled(self.cluster, self.efficiency)

  @property
  def is_sharded(self) -> bool:
    """Whether parameters are divided over the devices (FSDP)."""
    return any(rule == 'fsdp' for _, rule in self.config.sharding)

  def alone(self, images: float, share: float = 1.0) -> device_step.Compute:
    """A step of one device that waits for no other."""
    if emulation_keys.sleeps(self.config):
      times = self.config.emulate
      return device_step.Compute(times.step_seconds + times.image_seconds * images, 0.0, 0.0)
    if self.measured is not None:
      fixed, per_image = (self.sharing * seconds for seconds in self.measured)
      # A measured step includes the launches of its micro-batches.
      return device_step.Compute(per_image * images, 0.0, fixed)
    alone = device_step.compute(self.workload, self.device, images, self.efficiency, share)
    # Each micro-batch launches the same kernels again.
    extra = self.config.accumulate - 1
    starts = self.workload.kernels * self.efficiency.kernel_seconds
    return dataclasses.replace(alone, fixed=alone.fixed + extra * starts)

  def straggler_delay(self, seconds: float, count: int) -> float:
    """Seconds that the slowest of `count` devices takes longer than the mean."""
    factors = [f for f in self.slow for _ in range(self.cluster.devices)]
    late = order_statistics.slowest(seconds, self.jitter, count, factors=factors)
    return late - seconds


@dataclasses.dataclass(frozen=True)
class Step:
  """One step of all devices, which ends in an update of the weights.

  Attributes:
    images: images of all devices.
    compute: seconds that grow with a device's images.
    fixed: seconds that do not depend on the images.
    communication: seconds of waiting for data or for other devices.
    run_factor: seconds of a run over those of its images at this rate.
  """

  images: float
  compute: float
  fixed: float
  communication: float
  run_factor: float = 1.0

  @property
  def seconds(self) -> float:
    """All seconds, without waiting for input."""
    return self.compute + self.fixed + self.communication


def synchronous(
  setting: Setting,
  images: int,
  cluster: collectives.Cluster | None = None,
  overlap: float | None = None,
) -> Step:
  """Returns a step in which all devices sum their gradients.

  Parameters are whole on each device or divided over them.

  Args:
    setting: config and cluster.
    images: images that a device computes in the step.
    cluster: devices that sum their gradients; None: all of the setting.
    overlap: largest share of the communication that the backward pass hides;
      None: that of the setting.
  """
  cluster = cluster or setting.cluster
  effective = device_step.scaled(cluster, setting.efficiency)
  if overlap is None:
    # Gradients of micro-batches are added before any is sent.
    is_one = setting.config.accumulate == 1
    overlap = setting.efficiency.overlap if is_one else 0.0
  size = cluster.size
  alone = setting.alone(images, 1 / size if setting.is_sharded else 1.0)
  s = setting.config.strategy
  buckets = device_step.buckets(
    setting.workload, device_step.width(s.reduce_dtype), s.bucket_megabytes
  )
  collective = collectives.all_reduce
  gathered = 0.0
  if setting.is_sharded and size > 1:
    gather = collectives.gather(effective, setting.workload.param_bytes)
    gathered = gather * (1 - overlap)
    collective = collectives.gather  # a reduce-scatter takes as long
  waiting = setting.straggler_delay(alone.total, size)
  waiting += device_step.waiting(alone, buckets, effective, overlap, 0.0, collective)
  return Step(
    images=images * size, compute=alone.images, fixed=alone.fixed, communication=waiting + gathered
  )
