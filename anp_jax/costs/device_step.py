"""Seconds of a step on one device, and of synchronous steps on many."""

from collections.abc import Sequence
import dataclasses

from anp_jax.costs import collectives, hardware, order_statistics, work

# The backward pass has two products for each one of the forward pass.
BACKWARD = 2 / 3
# Standard deviation of a device's step over its mean, where none was measured.
JITTER = 0.005
_BYTES = {'float64': 8, 'float32': 4, 'bfloat16': 2, 'float16': 2}


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """What a device and its links reach of what their data sheets say.

  Attributes:
    product: share of the peak FLOP/s, in convolutions and matrix products.
    memory: share of the memory's bandwidth, of the bytes that are counted if
      everything element-wise is fused; above 1 where caches serve a part.
    kernel_seconds: fixed cost of one pass over arrays.
    wire: share of the links' bandwidth.
    overlap: largest share of the communication that the backward pass hides.
  """

  product: float
  memory: float
  kernel_seconds: float
  wire: float
  overlap: float = 0.5


@dataclasses.dataclass(frozen=True)
class Compute:
  """Seconds of one device's step.

  Attributes:
    products: of convolutions and matrix products.
    memory: of what moves through the memory.
    fixed: whatever the batch: kernels' starts, weights and optimizer.
  """

  products: float
  memory: float
  fixed: float

  @property
  def images(self) -> float:
    """Seconds that grow with the images."""
    return self.products + self.memory

  @property
  def total(self) -> float:
    """All seconds."""
    return self.products + self.memory + self.fixed


def width(dtype: str) -> int:
  """Bytes of a number."""
  return _BYTES[dtype]


def compute(
  workload: work.Workload,
  device: hardware.Device,
  images: float,
  efficiency: Efficiency,
  share: float = 1.0,
) -> Compute:
  """Seconds of a step of some images on one device.

  Args:
    workload: of the network.
    device: that computes.
    images: of the step on this device.
    efficiency: of the device.
    share: of the state that its optimizer updates.
  """
  bandwidth = device.gigabytes_per_second * 1e9 * efficiency.memory
  peak = device.peak(workload.dtype) * efficiency.product
  return Compute(
    products=images * workload.image_flops / peak,
    memory=images * workload.image_bytes / bandwidth,
    fixed=workload.kernels * efficiency.kernel_seconds + share * workload.step_bytes / bandwidth,
  )


def buckets(
  workload: work.Workload, number_bytes: int, megabytes: float
) -> tuple[tuple[float, float], ...]:
  """Buckets of gradients, in the order in which the backward pass fills them.

  Args:
    workload: of the network.
    number_bytes: of a gradient's number.
    megabytes: of a bucket, as config.strategy.bucket_megabytes.

  Returns:
    (share of the backward pass that is over, bytes) of each bucket.
  """
  total = sum(layer.flops for layer in workload.layers) or 1.0
  limit = megabytes * 1e6
  # Statistics and metrics leave with the last ones, in a bucket that is small:
  # nothing is left to compute while it travels. As `parallel.buckets` has it.
  result, size, before = [], workload.statistics * 4.0, 0.0
  over, full = 1.0, limit / 16
  for layer in workload.layers:
    size += layer.parameters * number_bytes
    before += layer.flops / total
    if size >= full:
      result.append((over, size))
      size, over, full = 0.0, 1 - before, limit
  if size:
    result.append((over, size))
  return tuple(reversed(result))


def scaled(cluster: collectives.Cluster, efficiency: Efficiency) -> collectives.Cluster:
  """The cluster with the bandwidths that are reached."""

  def reached(link):
    bandwidth = link.bandwidth * efficiency.wire
    return dataclasses.replace(link, bandwidth=bandwidth)

  return dataclasses.replace(
    cluster, node_link=reached(cluster.node_link), link=reached(cluster.link)
  )


def exposed_sum(
  gradient_buckets: Sequence[tuple[float, float]],
  cluster: collectives.Cluster,
  backward: float,
  overlap: float,
  collective=collectives.all_reduce,
) -> tuple[float, float]:
  """Seconds of summing gradients, in all and after the backward pass.

  A bucket leaves when its last gradient is there and the bucket before it is
  through. Sums that travel while a device computes also slow it down, so that
  at most `overlap` of them is hidden.

  Args:
    gradient_buckets: from `buckets`.
    cluster: with the bandwidths that are reached.
    backward: seconds of the backward pass.
    overlap: largest share that is hidden; 0: nothing leaves before the end.
    collective: (cluster, bytes) to seconds.

  Returns:
    Seconds in all, and those that a step waits.
  """
  clock = total = 0.0
  for over, size in gradient_buckets:
    seconds = collective(cluster, size)
    total += seconds
    clock = max(clock, over * backward) + seconds
  return total, max(clock - backward, (1 - overlap) * total)


def waiting(
  alone: Compute,
  gradient_buckets: Sequence[tuple[float, float]],
  cluster: collectives.Cluster,
  overlap: float,
  jitter: float = JITTER,
  collective=collectives.all_reduce,
) -> float:
  """Seconds of a synchronous step in which a device computes nothing.

  It waits for the slowest device and for what `exposed_sum` leaves exposed.

  Args:
    alone: step of one device that waits for nobody.
    gradient_buckets: from `buckets`.
    cluster: with the bandwidths that are reached.
    overlap: largest share that is hidden.
    jitter: standard deviation of a device's step over its mean.
    collective: (cluster, bytes) to seconds.
  """
  late = order_statistics.slowest(alone.total, jitter, cluster.size)
  _, exposed = exposed_sum(gradient_buckets, cluster, BACKWARD * alone.images, overlap, collective)
  return late - alone.total + exposed
