"""The share of its speed that a run keeps when nodes fail.

Nodes fail independently of each other, after exponential times. All times are in seconds.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np
from scipy import special

_MOMENTS = 100  # moments between two ends of a job at which its live nodes are counted
_ENDS = 5  # from so many on, the mean time to an end decides


@dataclasses.dataclass(frozen=True)
class Faults:
  """How often nodes fail, and how long a run then stands still.

  Attributes:
    mtbf: mean time between failures of one node.
    repair: mean time until a failed node is back; 0: never.
    requeue: time from a loss to the first step of the requeued job.
    in_place: time from a loss to the first step of the processes that are left.
    join: time in which a returned node is taken in.
  """

  mtbf: float
  repair: float
  requeue: float
  in_place: float
  join: float


@dataclasses.dataclass(frozen=True)
class Copies:
  """Copies of the state, on disk or in memory.

  Attributes:
    cost: time that a copy holds the steps up.
    period: time of the steps between two copies.
  """

  cost: float
  period: float

  @property
  def share(self) -> float:
    """Share of the speed that is kept without failures."""
    return self.period / (self.period + self.cost)


@dataclasses.dataclass(frozen=True)
class Goodput:
  """What a run keeps of the images/s that it has without failures and copies.

  Attributes:
    loss_period: mean time between losses of a node.
    save_period: time between the config's checkpoints; at most the run's.
    save: checkpoints of the best period.
    requeued: share that is kept where a loss ends the job, which is requeued.
    requeued_daly: the same share with the checkpoints `save`.
    mirror: copies in the hosts' memory of the best period, at least a step. None, like the
      following, where the strategy cannot go on in place.
    nodes_after_loss: nodes that compute after the first loss; 0: too few are left.
    elastic: share that is kept where the others go on from a copy of the config's period.
    elastic_daly: the same share with the copies `mirror`.
  """

  loss_period: float
  save_period: float
  save: Copies
  requeued: float
  requeued_daly: float
  mirror: Copies | None = None
  nodes_after_loss: int | None = None
  elastic: float | None = None
  elastic_daly: float | None = None


def daly(cost: float, mtbf: float) -> float:
  """Returns the best time between copies, to higher order (Daly, FGCS 22(3), 2006).

  Args:
    cost: time of a copy.
    mtbf: mean time between losses of the run.
  """
  if cost >= 2 * mtbf:
    return mtbf
  ratio = cost / (2 * mtbf)
  return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def kept(copies: Copies, restart: float, losses: float) -> float:
  """Returns the share of the speed that is kept (Daly 2006, exact for exponential failures).

  Args:
    copies: copies to which a loss returns.
    restart: time until steps go on after a loss; a loss meanwhile begins it again.
    losses: losses per second.
  """
  interval = copies.period + copies.cost
  if not losses * interval:
    return copies.share
  if losses * (interval + restart) > 500:  # nothing is left, and exp would overflow
    return 0.0
  return copies.period * losses / (math.exp(losses * restart) * math.expm1(losses * interval))


def requeued(faults: Faults, nodes: int, checkpoints: Copies) -> float:
  """Returns the share that is kept where each loss ends the job, which is then requeued."""
  return kept(checkpoints, faults.requeue, nodes / faults.mtbf)


def elastic(
  faults: Faults,
  used: Sequence[int],
  speeds: Sequence[float],
  mirrors: Copies,
  checkpoints: Copies,
  seconds: float,
) -> float:
  """Returns the share that is kept where the nodes that are left go on in place.

  They go on from the newest mirror. A job with too few nodes is requeued with all of them.

  Args:
    faults: failures; a returned node joins at a mirror, and nothing is computed again.
    used: nodes that compute where 0, 1, ... nodes live; 0: too few. The others are spares.
    speeds: speed of the nodes that compute over the speed of all, likewise.
    mirrors: copies in the memory of the nodes.
    checkpoints: copies on disk.
    seconds: time of the run, over which nodes that never return become fewer.
  """
  nodes = len(used) - 1
  least = next(k for k, count in enumerate(used) if count)
  if least == nodes:  # no loss can be done without
    return requeued(faults, nodes, checkpoints)
  if faults.repair:
    # A node that is back waits for the next mirror.
    faults = dataclasses.replace(faults, repair=faults.repair + mirrors.period / 2)
    times, ends = _with_repair(faults, nodes, least)
  else:
    times, ends = _without_repair(faults, nodes, least, seconds)
  share = 0.0
  for live in range(least, nodes + 1):
    losses, joins = 0.0, 0.0
    if live > least:
      losses = used[live] / faults.mtbf
      # Nodes come into a number of live nodes as often as one is lost from it.
      joins = live / faults.mtbf if faults.repair and used[live] > used[live - 1] else 0.0
    in_state = kept(mirrors, faults.in_place, losses) * math.exp(-joins * faults.join)
    share += times[live] * speeds[live] * in_state
  return float(share) * checkpoints.share / (1 + ends * (faults.requeue + checkpoints.period / 2))


def _with_repair(faults, nodes, least) -> tuple[np.ndarray, float]:
  """Shares of the time with each number of live nodes, and ends of the job per second.

  Between two ends the number falls from `nodes` to below `least`: it falls from k to k - 1
  once more often than it rises from k - 1 to k. This gives the time with k nodes.
  """
  times, ends = np.zeros(nodes + 1), 1.0
  for k in range(least, nodes + 1):
    rises = times[k - 1] * (nodes - k + 1) / faults.repair
    times[k] = (rises + ends) * faults.mtbf / k
    # Per unit of the last time: an end may be rarer than floats are large.
    times, ends = times / times[k], ends / times[k]
  return times / times.sum(), ends / times.sum()


def _without_repair(faults, nodes, least, seconds) -> tuple[np.ndarray, float]:
  """The same over `seconds` in which no node returns, but for an end of the job."""
  # Between two ends, k nodes live for mtbf / k.
  stays = np.zeros(nodes + 1)
  stays[least:] = faults.mtbf / np.arange(least, nodes + 1)
  life = stays.sum()
  counted = min(seconds, _ENDS * life)
  moments = np.linspace(0, counted, 1 + math.ceil(_MOMENTS * max(1.0, counted / life)))
  alive = np.exp(-moments / faults.mtbf)
  at_most = special.bdtr(np.arange(nodes + 1), nodes, alive[:, np.newaxis])
  exactly = np.diff(at_most, prepend=0.0)
  exactly[:, :least] = 0
  first_ends = np.diff(at_most[:, least - 1])
  # Renewal: after an end the job begins with all nodes.
  occupied, ended = exactly.copy(), at_most[:, least - 1].copy()
  for i in range(1, len(moments)):
    occupied[i] += first_ends[:i] @ occupied[i - 1 :: -1]
    ended[i] += first_ends[:i] @ ended[i - 1 :: -1]
  lives = (seconds - counted) / life
  times = np.trapezoid(occupied, moments, axis=0) + lives * stays
  return times / times.sum(), (ended[-1] + lives) / seconds
