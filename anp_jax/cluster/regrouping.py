"""When the processes of an elastic run restart in place, and with whom.

They do so at once when one is lost. When one comes that the batch could use, or one is
told to leave, all first agree on a step, as they do for a stop, and keep the state of
that step. Whoever connects to a port of this run and finds a coordinator there joins
it; so of two parts that lost each other one goes on, and the other joins it or ends.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent import futures
import json

from anp_jax.cluster import handshake, members as members_lib

# Signals to several processes that come so soon after each other are for all.
TOLD_WITHIN = 5.0  # seconds
_LOOK_PERIOD = 0.2  # seconds between two looks at who is missing
_DEAD = 'dead'


class Regrouping:
  """The end of one generation of a run, as its coordinator prepares it.

  Attributes:
    has_begun: whether all processes were told to restart.
  """

  def __init__(
    self,
    members: members_lib.Members,
    send: Callable[[int, dict], None],
    call_later: Callable,
    secret: str,
  ):
    """Creates the regrouping of a generation.

    Args:
      members: processes of the run.
      send: called with a rank and a message for it.
      call_later: called with seconds, a function and its arguments.
      secret: the run's secret.
    """
    self._members, self._send, self._call_later = members, send, call_later
    self._secret = secret
    self._told: set[int] = set()  # ranks that were told to leave
    self._ready: set[int] = set()  # ranks that wait for the restart
    self._is_stopping = False
    self._unasked: set[int] | None = None  # ranks that were not asked yet
    self.has_begun = False

  def begin(
    self, lost: Mapping[int, str], ends: Mapping[int, list] = {}, coordinator: int | None = None
  ) -> None:
    """Has all processes restart without some; a second call only ends processes.

    Args:
      lost: why each process is missing, by rank.
      ends: how those end that certainly do, by rank: status, reason, whether with stacks.
      coordinator: rank of another coordinator, which all join; None: there is none.
    """
    is_first, self.has_begun = not self.has_begun, True
    message = self._members.next_generation(lost, ends)
    message['stops'] = self._told >= set(self._members.ranks) - lost.keys()
    if coordinator is not None:
      message['coordinator'] = coordinator
    # A process that leaves ends as soon as it hears of it.
    for rank in self._members.in_order():
      if rank in ends:
        self._send(rank, {'end': ends[rank]})
      elif is_first:
        self._send(rank, {'regroup': message})

  def tell(self, rank: int) -> None:
    """Notes that a process was told to leave; if all were, the run stops."""
    self._told.add(rank)
    if self._told >= set(self._members.ranks):
      self._stop()
    else:
      self._call_later(TOLD_WITHIN, self._hand_over)

  def grow_if_useful(self) -> None:
    """Asks for a restart if the batch divides over the spares, too."""
    if self._members.could_grow() and not self._told:
      self._send_all({'pause': 0})

  def note_ready(self, rank: int) -> None:
    """Notes that a process waits for the restart, which begins with the last one."""
    self._ready.add(rank)
    if self._ready < set(self._members.ranks) or self.has_begun:
      return
    leaving = self._told & set(self._members.ranks)
    if leaving == set(self._members.ranks):  # the others were told meanwhile: they stop
      leaving = set()
    lost = {rank: f'{self._members[rank].name} was told to leave' for rank in sorted(leaving)}
    self.begin(lost, dict.fromkeys(leaving, [0, 'the other processes go on with the run', False]))

  async def look_around(self, on_answer: Callable[[], None]) -> None:
    """Until the run goes on: joins another coordinator, and dismisses who is dead.

    Args:
      on_answer: called when a process has answered, or is known to be dead.
    """
    addresses = dict(self._members.addresses)
    addresses.pop(self._members.first_rank, None)
    self._unasked = set(addresses)
    # A thread for each: one that lives and does not coordinate holds it for handshake.WITHIN.
    pool = futures.ThreadPoolExecutor(len(addresses) or 1, 'look around')
    asyncio.get_running_loop().set_default_executor(pool)
    on_answer()
    await asyncio.gather(*(self._ask_on(*item, on_answer) for item in addresses.items()))

  @property
  def has_looked(self) -> bool:
    """Whether each process that had not come was asked."""
    return self._unasked is not None and not self._unasked - self._members.keys()

  async def _ask_on(self, rank, address, on_answer):
    answer = None
    while answer != _DEAD and not (self._members.have_begun or self.has_begun):
      if rank not in self._members:
        answer = await asyncio.to_thread(_ask, address, self._secret)
        if self._members.have_begun:
          return
        if answer == _DEAD:
          self._members.dismiss(rank)
        elif answer and (answer['has_begun'] or rank < self._members.first_rank):
          self.begin({}, coordinator=rank)
        self._unasked.discard(rank)
        on_answer()
      await asyncio.sleep(_LOOK_PERIOD)

  def _hand_over(self):
    if not self._members.are_enough_without(self._told):
      self._stop()
    elif not self._is_stopping:
      self._send_all({'pause': 0})

  def _stop(self):
    self._is_stopping = True
    self._send_all({'stop': 0})

  def _send_all(self, message):
    for rank in self._members.in_order():
      self._send(rank, message)


def _ask(address, secret):
  """What answers at an address: a coordinator's words, _DEAD, or None."""
  try:
    with handshake.connect(address, secret) as connection:
      connection.settimeout(handshake.WITHIN)
      connection.sendall(b'{"ask": 0}\n')
      with connection.makefile() as lines:
        return json.loads(lines.readline())
  except (ConnectionRefusedError, handshake.RefusedError):
    return _DEAD
  except (OSError, ValueError):
    return None
