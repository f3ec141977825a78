"""Seconds of a step on one device, and of synchronous steps on many."""

from collections.abc import Callable, Sequence
import dataclasses

from anp_jax.costs import collectives, hardware, order_statistics, work

# Share of a step that is its backward pass, which has two products for each one of
# the forward pass.
BACKWARD = 2 / 3
# Standard deviation of a device's step time over its mean, where none was measured.
JITTER = 0.005
_BYTES = {'float64': 8, 'float32': 4, 'bfloat16': 2, 'float16': 2}


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Shares of the data sheets' numbers that a device and its links reach.

  Attributes:
    product: share of the peak FLOP/s, in convolutions and matrix products.
    memory: share of the memory's bandwidth, for the bytes that move if all
      element-wise work is fused; above 1 where caches serve a part.
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
    products: seconds of convolutions and matrix products.
    memory: seconds of memory traffic.
    fixed: seconds that do not depend on the batch: kernel launches, weights and
      optimizer.
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
    return self.images + self.fixed


def width(dtype: str) -> int:
  """Bytes of a number of a dtype."""
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
    workload: work of the network.
    device: data sheet of the device.
    images: images that this device computes.
    efficiency: shares of the data sheet that the device reaches.
    share: share of the state that this device updates.
  """
  bandwidth = device.gigabytes_per_second * 1e9 * efficiency.memory
  peak = device.peak(workload.dtype) * efficiency.product
  return Compute(
    products=images * workload.image_flops / peak,
    memory=images * workload.image_bytes / bandwidth,
    fixed=workload.kernels * efficiency.kernel_seconds + share * workload.step_bytes / bandwidth,
  )


def buckets(workload: work.Workload, number_bytes: int, megabytes: float) -> tuple:
  """Buckets of gradients, in the order in which the backward pass fills them.

  Args:
    workload: work of the network.
    number_bytes: bytes of a gradient's number.
    megabytes: size of a full bucket, config.strategy.bucket_megabytes.

  Returns:
    For each bucket, (share of the backward pass that is done, bytes).
  """
  total = sum(layer.flops for layer in workload.layers) or 1.0
  limit = megabytes * 1e6
  # Statistics and metrics leave with the last gradients, in a small bucket: nothing
  # is left to compute while it is sent. `parallel.buckets` has the same rule.
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
  """The cluster with the bandwidths that its links reach."""

  def effective(link: hardware.Link) -> hardware.Link:
    bandwidth = link.bandwidth * efficiency.wire
    return dataclasses.replace(link, bandwidth=bandwidth)

  return dataclasses.replace(
    cluster, node_link=effective(cluster.node_link), link=effective(cluster.link)
  )


def waiting(
  alone: Compute,
  gradient_buckets: Sequence[tuple],
  cluster: collectives.Cluster,
  overlap: float,
  jitter: float = JITTER,
  collective: Callable = collectives.all_reduce,
) -> float:
  """Seconds of a synchronous step in which a device computes nothing.

  It waits for the slowest device and for the sum of gradients. A bucket leaves when
  its last gradient is computed and the bucket before it has arrived. Communication
  also slows down the computation that runs meanwhile, so that at most `overlap` of
  it is hidden.

  Args:
    alone: step of one device that waits for no other.
    gradient_buckets: buckets from `buckets`.
    cluster: cluster from `scaled`.
    overlap: largest share of the communication that is hidden; 0: no bucket leaves
      before the end of the backward pass.
    jitter: standard deviation of a device's step time over its mean.
    collective: (cluster, bytes) to seconds.
  """
  late = order_statistics.slowest(alone.total, jitter, cluster.size)
  backward = BACKWARD * alone.images
  clock = total = 0.0
  for over, size in gradient_buckets:
    seconds = collective(cluster, size)
    total += seconds
    clock = max(clock, over * backward) + seconds
  return late - alone.total + max(clock - backward, (1 - overlap) * total)
