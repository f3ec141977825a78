"""The processes of a run, as process 0 knows them."""

import asyncio
from collections.abc import Mapping, Sequence
import dataclasses

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


def late(members: Mapping[int, Member]) -> str:
  """Names the processes that are behind: 'rank 1 on node2 is'; all if none is.

  Args:
    members: connected processes by rank.
  """
  ordered = [member for _, member in sorted(members.items())]
  least = min(member.progress() for member in ordered)
  names = [m.name for m in ordered if m.progress() == least]
  if len(names) == len(ordered):
    return 'all ranks are equally'
  return f'{listed(names)} {"is" if len(names) == 1 else "are"}'


def whereabouts(members: Mapping[int, Member]) -> str:
  """What each process does, and at which step, in parentheses."""
  states = [
    f'{m.index}: {m.state.get("phase", "starting")} {m.state.get("step") or ""}'.strip()
    for _, m in sorted(members.items())
  ]
  return f' (rank: what it does, step; {"; ".join(states)})'


def listed(names: Sequence[str]) -> str:
  """Joins names; of many, the first ones and the number of the others."""
  rest = len(names) - _MAX_NAMES
  return ', '.join(names[:_MAX_NAMES]) + f' and {rest} more' * (rest > 0)
