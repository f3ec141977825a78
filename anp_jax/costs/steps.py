"""Seconds of a synchronous step, on any number of nodes.

Each strategy answers `predicted_step` from here, or with an arithmetic of its
own, which stands in its folder.
"""

import dataclasses
from typing import Any

from anp_jax.costs import collectives, device_step, hardware, order_statistics, work


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
  def reached(self) -> collectives.Cluster:
    """The cluster with the bandwidths that are reached."""
    return device_step.scaled(self.cluster, self.efficiency)

  @property
  def is_sharded(self) -> bool:
    """Whether parameters are divided over the devices (FSDP)."""
    return any(rule == 'fsdp' for _, rule in self.config.sharding)

  def alone(self, images: float, share: float = 1.0) -> device_step.Compute:
    """A step of one device that waits for nobody."""
    if self.measured is not None:
      fixed, per_image = (self.sharing * seconds for seconds in self.measured)
      # A measured step has its micro-batches' starts in it.
      return device_step.Compute(per_image * images, 0.0, fixed)
    alone = device_step.compute(self.workload, self.device, images, self.efficiency, share)
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


def synchronous(
  setting: Setting,
  images: int,
  cluster: collectives.Cluster | None = None,
  overlap: float | None = None,
) -> Step:
  """Returns a step in which all devices sum their gradients.

  Parameters are whole on each device or divided over them.

  Args:
    setting: what is predicted for.
    images: images that a device computes in the step.
    cluster: devices that sum their gradients; None: all of the setting.
    overlap: largest share of the communication that the backward pass hides;
      None: that of the setting.
  """
  cluster = cluster or setting.cluster
  reached = device_step.scaled(cluster, setting.efficiency)
  if overlap is None:
    # Micro-batches are added before anything is sent.
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
    gather = collectives.gather(reached, setting.workload.param_bytes)
    gathered = gather * (1 - overlap)
    collective = collectives.gather  # a reduce-scatter takes as long
  waiting = setting.lateness(alone.total, size)
  waiting += device_step.waiting(alone, buckets, reached, overlap, 0.0, collective)
  return Step(
    images=images * size, compute=alone.images, fixed=alone.fixed, communication=waiting + gathered
  )
