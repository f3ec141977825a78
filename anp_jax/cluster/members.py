"""The processes of a run, as process 0 knows them."""

import asyncio
from collections.abc import Container, Mapping, Sequence
import dataclasses
from typing import Any

from anp_jax.cluster import process_info, watchdog

# What a process does one after another until JAX is up, and at a step.
_ORDER = (None, *watchdog.JOINING, 'starting', 'input', 'step', 'evaluating', 'saving', 'leaving')
_MAX_NAMES = 8


@dataclasses.dataclass
class Member:
  """A process that is connected.

  Attributes:
    info: description from `process_info.collect`.
    writer: stream to the process.
    last_heard: seconds of the coordinator's clock.
    state: last heartbeat; {} before.
    left: whether it is gone.
  """

  info: dict
  writer: asyncio.StreamWriter
  last_heard: float
  state: dict = dataclasses.field(default_factory=dict)
  left: bool = False

  @property
  def index(self) -> int:
    """Rank of the process."""
    return self.info['index']

  @property
  def name(self) -> str:
    """Name for people: 'rank 1 on node2'."""
    return process_info.name(self.info)

  def progress(self) -> tuple[int, int]:
    """A key that orders processes by how far they are."""
    phase = self.state.get('phase')
    # All else comes before the steps, or is the compiling of the first.
    order = _ORDER.index(phase if phase in _ORDER else 'starting')
    return self.state.get('step', 0), order


class Members(dict[int, Member]):
  """The connected processes of a run by rank, and who of the others is missing.

  A run begins with all of its processes, or without some that it can do without;
  only these may be lost and come again afterwards.
  """

  def __init__(self, count: int, token: str):
    """Creates a run that nobody has joined.

    Args:
      count: number of the run's processes.
      token: identifier of this launch, which each must show.
    """
    super().__init__()
    self._count, self._token = count, token
    self._start: dict[str, Any] = {}  # what all processes were sent when the run began
    self._devices: dict[int, list[int] | None] = {}  # of each process that was there then

  @property
  def have_begun(self) -> bool:
    """Whether the run has begun."""
    return bool(self._start)

  def is_ours(self, info: dict) -> bool:
    """Whether a process belongs to this launch."""
    return info['token'] == self._token

  def can_go_without(self, index: int) -> bool:
    """Whether the run goes on if this process is lost, which process 0 alone decides."""
    return self.have_begun and index in self[0].info['optional']

  def are_enough(self) -> bool:
    """Whether only processes are missing that the run can do without."""
    return 0 in self and set(range(self._count)) <= {*self, *self[0].info['optional']}

  def are_complete(self) -> bool:
    """Whether all processes are here."""
    return len(self) == self._count

  def refusal(self, info: dict) -> str:
    """Why a process that has just come cannot take part; '' if it can."""
    index, name = info['index'], process_info.name(info)
    if not self.is_ours(info):
      return f'{name} belongs to another job than rank 0'
    if self.have_begun and not self.can_go_without(index):
      return f'{name} found a run that has begun already at rank 0: choose another port'
    if info['count'] != self._count:
      return f'{name} expects {info["count"]} processes, rank 0 {self._count}'
    if index not in range(self._count):
      return f'{name} is none of {self._count}'
    if self.have_begun:
      return process_info.mismatch_with_first([self[0].info, info])
    if index in self:
      return f'rank {index} came twice: from {self[index].info["host"]} and from {info["host"]}'
    return ''

  def begin(self, port: int) -> str:
    """Begins the run with the processes that are here.

    Args:
      port: TCP port of JAX's coordinator.

    Returns:
      What keeps them from starting; '' if they can.
    """
    infos = [member.info for _, member in sorted(self.items())]
    if problem := process_info.first_mismatch(infos):
      return problem
    devices, _ = process_info.devices(infos)
    self._devices = dict(zip(sorted(self), devices, strict=True))
    hosts = {info['index']: info['host'] for info in infos}
    self._start = {'port': port, 'hosts': [hosts.get(i, '') for i in range(self._count)]}
    return ''

  def start_of(self, member: Member) -> dict:
    """What a process is sent for its start: port, hosts and its own devices."""
    # One that comes again, on another host, uses all the GPUs that it sees.
    is_here = member.info['host'] == self._start['hosts'][member.index]
    return {**self._start, 'devices': self._devices[member.index] if is_here else None}

  def by_rank(self, values: Mapping[int, Any]) -> list:
    """Lists the values of all processes; None where one has none."""
    return [values.get(i) for i in range(self._count)]

  def missing(self, present: Container[int]) -> str:
    """Names the processes whose rank is not among these: 'rank 1, rank 2 have'."""
    names = [
      self[i].name if i in self else f'rank {i}' for i in range(self._count) if i not in present
    ]
    return f'{listed(names)} {"has" if len(names) == 1 else "have"}'

  def presence(self) -> str:
    """How many have come: '2 of 3 are here'."""
    return f'{len(self)} of {self._count} are here'

  def late(self) -> str:
    """Names the processes that are behind: 'rank 1 on node2 is'; all if none is."""
    ordered = [member for _, member in sorted(self.items())]
    least = min(member.progress() for member in ordered)
    names = [m.name for m in ordered if m.progress() == least]
    if len(names) == len(ordered):
      return 'all ranks are equally'
    return f'{listed(names)} {"is" if len(names) == 1 else "are"}'

  def whereabouts(self) -> str:
    """What each process does, and at which step, in parentheses."""
    states = [
      f'{i}: {member.state.get("phase", "starting")} {member.state.get("step") or ""}'.strip()
      for i, member in sorted(self.items())
    ]
    return f' (rank: what it does, step; {"; ".join(states)})'


def listed(names: Sequence[str]) -> str:
  """Joins names; of many, the first ones and the number of the others."""
  rest = len(names) - _MAX_NAMES
  return ', '.join(names[:_MAX_NAMES]) + f' and {rest} more' * (rest > 0)
