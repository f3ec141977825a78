"""The processes of a run, as its coordinator knows them."""

import asyncio
import collections
from collections.abc import Container, Iterable, Mapping, Sequence
import dataclasses
import time
from typing import Any

from anp_jax import config as config_lib
from anp_jax.cluster import generation as generation_lib, process_info, termination, watchdog

# What a process does one after another until JAX is up, and at a step.
_ORDER = (None, *watchdog.JOINING, 'starting', *watchdog.STEPPING, *watchdog.PAUSES, 'leaving')
# Why a process is missing.
GONE = 'has gone: its process was ended, or its host'
SILENT = 'its process is stopped, or its host dead or cut off from the network'
_MISSING = 'did not come to the restart: its process was ended or is stopped, or its host'
_MAX_NAMES = 8
_HEARTBEATS = 8  # those of the last seconds


@dataclasses.dataclass
class Member:
  """A process that is connected.

  Attributes:
    info: description from `process_info.collect`.
    writer: stream to the process.
    last_heard: seconds of the coordinator's clock.
    state: last heartbeat; {} before.
    left: whether it is gone.
    history: time and state of the last heartbeats.
  """

  info: dict
  writer: asyncio.StreamWriter
  last_heard: float
  state: dict = dataclasses.field(default_factory=dict)
  left: bool = False
  history: collections.deque = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_HEARTBEATS)
  )

  @property
  def index(self) -> int:
    """Rank of the process."""
    return self.info['index']

  @property
  def name(self) -> str:
    """Name for people: 'rank 1 on node2'."""
    return process_info.name(self.info)

  def receive(self, state: dict) -> None:
    """Takes a heartbeat, which has just been heard."""
    self.state = state
    self.history.append((self.last_heard, state))

  def progress(self) -> tuple[int, int]:
    """A key that orders processes by how far they are."""
    phase = self.state.get('phase')
    # All else comes before the steps, or is the compiling of the first.
    order = _ORDER.index(phase if phase in _ORDER else 'starting')
    return self.state.get('step', 0), order


class Members(dict[int, Member]):
  """The connected processes of a run by rank, and who of the others is missing.

  A run begins with all of its processes, or without some that it can do without;
  only these may be lost and come again afterwards. A generation of an elastic run
  begins with those that are left; what comes later, or does not fit, is a spare.

  Attributes:
    first_rank: rank of the coordinator's process.
    ranks: ranks that train, in the order of JAX's processes.
    addresses: host and port of each process that may live, by rank.
    sizes: numbers of processes over which the batch divides; (): not known yet.
  """

  def __init__(
    self,
    count: int,
    token: str,
    first: int = 0,
    generation: generation_lib.Generation = generation_lib.FIRST,
  ):
    """Creates a run that nobody has joined.

    Args:
      count: number of processes that the launcher has started.
      token: identifier of this launch, which each must show.
      first: rank of the coordinator's process.
      generation: generation of the run.
    """
    super().__init__()
    self._count, self._token, self.first_rank = count, token, first
    self._generation = generation._replace(started_at=generation.started_at or time.time())
    self.addresses = dict(generation.addresses)
    everyone = set(self.addresses) if generation.number else set(range(count))
    # The coordinator's process may have missed its own words, in a time without a core.
    self._expected = everyone - (generation.lost.keys() - {first})
    self.ranks = sorted(self._expected)
    self.sizes = generation.sizes
    self._least = 1  # processes of an elastic run
    self._start: dict[str, Any] = {}  # what all processes were sent when the run began

  @property
  def first(self) -> Member:
    """The process of the coordinator."""
    return self[self.first_rank]

  @property
  def go_on(self) -> bool:
    """Whether they restart in place, to go on with a run."""
    return self._generation.number > 0

  @property
  def have_begun(self) -> bool:
    """Whether the run has begun."""
    return bool(self._start)

  @property
  def are_elastic(self) -> bool:
    """Whether a loss begins another generation."""
    return self.have_begun and self.first.info['elastic']

  def in_order(self) -> list[int]:
    """Returns the ranks that are here in the order in which they are sent a message.

    The coordinator's process is the last: when it hears of an end, the others have
    been sent it.
    """
    return sorted(self, key=lambda rank: (rank == self.first_rank, rank))

  def spares(self) -> list[int]:
    """Returns the ranks that are here and do not train."""
    return sorted(self.keys() - set(self.ranks))

  def is_ours(self, info: dict) -> bool:
    """Whether a process belongs to this launch, or to an elastic run."""
    return info['token'] == self._token or self._takes_newcomers()

  def can_go_without(self, index: int) -> bool:
    """Whether the run goes on if this process is lost, which process 0 alone decides."""
    return self.have_begun and index in self.first.info['optional']

  def are_enough(self) -> bool:
    """Whether only processes are missing that the run can do without."""
    return self.first_rank in self and self._expected <= {*self, *self.first.info['optional']}

  def are_complete(self) -> bool:
    """Whether all processes are here that are waited for."""
    return self._expected <= self.keys()

  def dismiss(self, rank: int) -> None:
    """Stops waiting for a process that does not live any more."""
    self._expected.discard(rank)
    self.addresses.pop(rank, None)

  def refusal(self, info: dict) -> str:
    """Why a process that has just come cannot take part; '' if it can."""
    index, name = info['index'], process_info.name(info)
    if not self.is_ours(info):
      return f'{name} belongs to another job than rank 0'
    if self._takes_newcomers():
      first = self.get(self.first_rank)
      return process_info.mismatch_with_first([first.info, info]) if first else ''
    if self.have_begun and not self.can_go_without(index):
      return f'{name} found a run that has begun already at rank 0: choose another port'
    if info['count'] != self._count:
      return f'{name} expects {info["count"]} processes, rank 0 {self._count}'
    if index not in range(self._count):
      return f'{name} is none of {self._count}'
    if self.have_begun:
      return process_info.mismatch_with_first([self.first.info, info])
    if index in self:
      return f'rank {index} came twice: from {self[index].info["host"]} and from {info["host"]}'
    return ''

  def unlike_the_first(self) -> dict[int, str]:
    """Returns why processes cannot go on with the first one, before which they came, by rank."""
    mismatch, first = process_info.mismatch_with_first, self.get(self.first_rank)
    if not self.go_on or not first:
      return {}
    problems = {rank: mismatch([first.info, member.info]) for rank, member in self.items()}
    return {rank: problem for rank, problem in problems.items() if problem}

  def is_new(self, member: Member) -> bool:
    """Whether a process came to a run that goes on, whose state others have."""
    have_state = any(other.info['has_state'] for other in self.values())
    return self.go_on and have_state and not member.info['has_state']

  def take_in(self, member: Member) -> None:
    """Adds a process; one whose rank is taken in an elastic run gets another."""
    if self._takes_newcomers() and member.index in self:
      member.info['index'] = max(*self, *self.addresses, self._count - 1) + 1
    self[member.index] = member
    if self.have_begun:
      process_info.assign_free_gpus([m.info for m in self.values()])
    if member.info['address']:
      self.addresses[member.index] = member.info['address']

  def begin(self, port: int, least: int) -> None:
    """Begins the run with the processes that are here.

    Args:
      port: TCP port of JAX's coordinator.
      least: number of processes below which an elastic run ends.

    Raises:
      ConfigError: if they do not go together.
      PeerLostError: if too few are left.
    """
    self._least = max(least, 1)
    if self.go_on:
      self.ranks = self._chosen()
      self._generation = self._generation._replace(lost=self._lost())
    present = sorted(self.keys() & set(self.ranks))
    infos = [self[rank].info for rank in present]
    if not self.go_on:
      devices, shortage = process_info.devices(infos)
      if problem := process_info.mismatch_with_first(infos) or shortage:
        raise config_lib.ConfigError(problem)
      for info, ordinals in zip(infos, devices, strict=True):
        info['devices'] = ordinals
    process_info.assign_free_gpus(infos)
    hosts = {info['index']: info['host'] for info in infos}
    self._start = {
      'port': port,
      'ranks': self.ranks,
      'hosts': [hosts.get(i, '') for i in self.ranks],
    }

  def start_of(self, member: Member) -> dict:
    """What a process is sent for its start: port, hosts, ranks and its own devices."""
    start = {**self._start, 'rank': member.index, 'addresses': self.addresses, 'sizes': self.sizes}
    start |= {name: getattr(self._generation, name) for name in ('number', 'started_at', 'lost')}
    start['could_grow'] = self.could_grow()
    return start | ({'devices': member.info['devices']} if member.index in self.ranks else {})

  def next_generation(self, lost: Mapping[int, str], gone: Container[int] = ()) -> dict:
    """What all processes are sent when the next generation begins.

    Args:
      lost: why each process is missing that will not take part, by rank.
      gone: ranks in `lost` that certainly end; a closed connection does not say so.
    """
    here = self.keys() - lost.keys()
    return {
      'addresses': {rank: a for rank, a in self.addresses.items() if rank not in gone},
      'lost': dict(lost),
      'coordinator': self.first_rank if self.first_rank in here else -1,
      'sizes': self.sizes,
    }

  def could_grow(self) -> bool:
    """Whether the batch divides over more of the present processes than train."""
    return self._size(len(self)) > len(self.ranks)

  def are_enough_without(self, ranks: set[int]) -> bool:
    """Whether an elastic run goes on if some of its processes leave."""
    return self._size(len(self.keys() - ranks)) >= self._least

  def _takes_newcomers(self):
    """Whether processes may come that the launcher did not start with the others."""
    return self.go_on or self.are_elastic

  def _size(self, count):
    """The largest number of processes, of so many, over which the batch divides."""
    sizes = self.sizes or range(1, count + 1)
    return max((size for size in sizes if size <= count), default=0)

  def _lost(self):
    """Why each process is missing that trained before, by rank, also if nobody was told."""
    before, names = self._generation.lost, self._generation.interruption.names
    # One that did not come to the restart before may be here now, and the coordinator's is.
    lost = {
      rank: why
      for rank, why in before.items()
      if rank != self.first_rank and (rank not in self or not why.endswith(_MISSING))
    }
    for rank in names.keys() - self.keys():
      lost.setdefault(rank, f'{names[rank]} {_MISSING}')
    return lost

  def _chosen(self):
    """The ranks that train, the coordinator's first, then those with the state."""
    unknown = self.addresses.keys() - self.keys()
    # Else both halves of a network that is cut would go on.
    if len(self) < len(unknown) or (len(self) == len(unknown) and min(unknown) < min(self)):
      raise termination.PeerLostError(
        f'{listed([f"rank {rank}" for rank in sorted(unknown)])} may go on without '
        f'{listed([member.name for member in self.values()])}: ending'
      )
    size = self._size(len(self))
    if size < self._least:
      raise termination.PeerLostError(
        f'{len(self)} of {self._count} processes are left, over which a batch divides '
        f'by {size}, fewer than config.cluster.min_processes={self._least}: ending'
      )

    def order(rank):
      return rank != self.first_rank, not self[rank].info['has_state'], rank

    return sorted(self, key=order)[:size]

  def missing(self, present: Container[int]) -> str:
    """Names the processes whose rank is not among these: 'rank 1, rank 2 have'."""
    names = [
      self[i].name if i in self else f'rank {i}' for i in sorted(self._expected) if i not in present
    ]
    return f'{listed(names)} {"has" if len(names) == 1 else "have"}'

  def presence(self) -> str:
    """How many have come: '2 of 3 are here'."""
    return f'{len(self)} of {len(self._expected)} are here'

  def late_ranks(self, stalled: Member) -> list[int]:
    """Returns the ranks that train and are behind when one has stalled; all if none is.

    Where processes make steps of their own, only that one is known to be late once it
    has made some.
    """
    if stalled.state.get('step') and not stalled.info['steps_together']:
      return [stalled.index]
    progress = {i: self[i].progress() for i in sorted(self.keys() & set(self.ranks))}
    least = min(progress.values())
    return [i for i, where in progress.items() if where == least]

  def late(self, stalled: Member) -> str:
    """Names the processes that are behind, and what they do; all if none is."""
    ranks = self.late_ranks(stalled)
    names = f'{listed([self[i].name for i in ranks])} {"is" if len(ranks) == 1 else "are"}'
    if len(ranks) == len(self.keys() & set(self.ranks)):
      names = 'all ranks are equally'
    return f'{names} late ({self.doing(ranks)})'

  def doing(self, ranks: Iterable[int]) -> str:
    """What processes do, and at which steps: 'saving 60, starting'."""
    states = [self[rank].state for rank in ranks if rank in self]
    texts = {f'{s.get("phase", "starting")} {s.get("step") or ""}'.strip() for s in states}
    return listed(sorted(texts))

  def losses(self) -> list[str]:
    """Why, and after which step, processes were lost before the last restart."""
    step = self._generation.interruption.step
    return [f'{why}, at step {step}' for _, why in sorted(self._generation.lost.items())]


def listed(names: Sequence[str]) -> str:
  """Joins names; of many, the first ones and the number of the others."""
  rest = len(names) - _MAX_NAMES
  return ', '.join(names[:_MAX_NAMES]) + f' and {rest} more' * (rest > 0)
