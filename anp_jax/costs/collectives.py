"""Seconds of collectives over nodes of linked devices.

The model of a message is Hockney's (1994): latency plus bytes over bandwidth.
Rings are those of Patarasuk and Yuan (2009), trees the double binary trees of
Sanders, Speck and Traff (2009) as NCCL has them.
"""

import dataclasses
import math

from anp_jax.costs import hardware


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Nodes of devices, all alike.

  Attributes:
    nodes: number of nodes.
    devices: devices per node.
    node_link: link of a device to the others of its node; in a torus, to all.
    link: all ports of a node together.
  """

  nodes: int
  devices: int
  node_link: hardware.Link
  link: hardware.Link

  @property
  def size(self) -> int:
    """Number of all devices."""
    return self.nodes * self.devices

  @property
  def is_torus(self) -> bool:
    """Whether the devices' own links join the nodes, too."""
    return self.node_link.topology == 'torus'


def ring_all_reduce(devices: int, size: float, link: hardware.Link) -> float:
  """Seconds to sum `size` bytes over a ring.

  Each device sends and receives 2 (n - 1) / n of them.
  """
  steps = 2 * (devices - 1)
  return steps * (size / devices / link.bandwidth + link.latency)


def tree_all_reduce(devices: int, size: float, link: hardware.Link) -> float:
  """Seconds to sum `size` bytes over two pipelined binary trees.

  Each device sends every byte up and down once, at the full bandwidth.
  """
  if devices == 1:
    return 0.0
  depth = math.ceil(math.log2(devices))
  return 2 * size / link.bandwidth + 2 * depth * link.latency


def torus_all_reduce(devices: int, size: float, axes: int, link: hardware.Link) -> float:
  """Seconds to sum over a torus, one axis after another.

  All axes work at once, each on its part of the bytes, so that the bandwidth of
  all of a device's links is used; the steps are those of rings along the axes.
  """
  if devices == 1:
    return 0.0
  side = devices ** (1 / axes)
  steps = 2 * axes * (side - 1)
  share = 2 * (devices - 1) / devices
  return share * size / link.bandwidth + steps * link.latency


def hierarchical_all_reduce(cluster: Cluster, size: float, trees: bool = True) -> float:
  """Seconds to sum within nodes, between them, and to gather within them.

  Between nodes each device sums its part with its peers, in a ring or, if `trees`
  are allowed, in a tree; the devices share the ports of their node.
  """
  within = _within(cluster)
  part = size / cluster.devices
  ports = _ports(cluster)
  port = dataclasses.replace(ports, bandwidth=ports.bandwidth / cluster.devices)
  between = ring_all_reduce(cluster.nodes, part, port)
  if trees:
    between = min(between, tree_all_reduce(cluster.nodes, part, port))
  return ring_all_reduce(cluster.devices, size, within) + between


def all_reduce(cluster: Cluster, size: float) -> float:
  """Seconds to sum `size` bytes over all devices with the fastest algorithm."""
  if cluster.size == 1 or not size:
    return 0.0
  if cluster.is_torus:
    link = cluster.node_link
    return torus_all_reduce(cluster.size, size, link.axes, link)
  within = _within(cluster)
  if cluster.nodes == 1:
    return min(
      ring_all_reduce(cluster.devices, size, within), tree_all_reduce(cluster.devices, size, within)
    )
  slowest = _slowest(cluster)
  return min(
    ring_all_reduce(cluster.size, size, slowest),
    tree_all_reduce(cluster.size, size, slowest),
    hierarchical_all_reduce(cluster, size),
  )


def gather(cluster: Cluster, size: float) -> float:
  """Seconds to gather `size` bytes on all devices, of the parts that they hold.

  It takes half as long as a sum, in rings: a tree would pass all bytes. A
  reduce-scatter takes as long, in the other direction.
  """
  if cluster.size == 1 or not size:
    return 0.0
  if cluster.is_torus:
    return all_reduce(cluster, size) / 2
  if cluster.nodes == 1:
    return ring_all_reduce(cluster.devices, size, _within(cluster)) / 2
  ring = ring_all_reduce(cluster.size, size, _slowest(cluster))
  return min(ring, hierarchical_all_reduce(cluster, size, trees=False)) / 2


def send(link: hardware.Link, size: float) -> float:
  """Seconds of one message."""
  return link.latency + size / link.bandwidth


def parameter_servers(cluster: Cluster, size: float) -> float:
  """Seconds in which servers on all nodes receive gradients and send weights.

  Each worker sends and receives all `size` bytes over its node's bus. The sum of
  a node's workers, and one copy of the weights, pass over its ports: each node's
  servers hold an equal part. The slower of the two counts.
  """
  sharing = cluster.devices if cluster.node_link.is_shared else 1
  local = 2 * sharing * size / _within(cluster).bandwidth
  away = (cluster.nodes - 1) / cluster.nodes
  remote = 2 * size * away / cluster.link.bandwidth
  return max(local, remote) + 2 * cluster.link.latency


def _ports(cluster: Cluster) -> hardware.Link:
  """A node's ports, with the bandwidth that its devices reach.

  Devices on a bus share it with the ports: a message is staged through the
  host, first over the bus and then over the port.
  """
  if not cluster.node_link.is_shared or cluster.devices < 2:
    return cluster.link
  bus = _within(cluster).bandwidth
  bandwidth = 1 / (1 / cluster.link.bandwidth + 1 / bus)
  return dataclasses.replace(cluster.link, bandwidth=bandwidth)


def _slowest(cluster: Cluster) -> hardware.Link:
  """The slowest link of a ring or tree through all devices."""
  bandwidth = _ports(cluster).bandwidth
  if cluster.devices > 1:
    bandwidth = min(bandwidth, _within(cluster).bandwidth)
  return hardware.Link('slowest', bandwidth, cluster.link.latency)


def _within(cluster: Cluster) -> hardware.Link:
  """The link of a device in its node; devices on one bus share it."""
  link = cluster.node_link
  if not link.is_shared or cluster.devices < 3:
    return link
  # Neighbours of a ring meet on the bus's root: two streams at a time pass.
  return dataclasses.replace(link, bandwidth=link.bandwidth * 0.5)
