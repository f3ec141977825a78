"""Process 0's desk: all processes report here, and learn of each other.

One line of JSON a message. It knows who has come, who has gone and who is late,
so that the others can be told by name; gradients never pass here.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time

from anp_jax.cluster import process_info
from anp_jax.cluster import watchdog

# Exit status of a process that ends because another is lost, late or missing:
# sysexits' EX_TEMPFAIL. Starting again may help; a launcher should try.
TRY_AGAIN = 75
FAILED, BAD_INPUT = 1, 2
LEAVE = 'leave'  # the name of what is gathered last
PULSE = 1.0  # seconds between two signs of life
SAY_EVERY = 10.0  # seconds between two lines on what is waited for
# For the others to tell where they are, once one has said that it is stuck.
_HEAR_ALL = 2.5 * PULSE
# An error of one process may follow from the loss of another, which is seen
# only now.
_SEE_LOSS = PULSE
_MOST = 2**22  # bytes of a line
# What a process does one after another at a step.
_ORDER = ('input', 'step', 'evaluating', 'saving', 'leaving')


@dataclasses.dataclass
class _Member:
  card: dict
  writer: asyncio.StreamWriter
  heard: float
  state: dict = dataclasses.field(default_factory=dict)
  left: bool = False


class Coordinator:
  """Lets all processes start together, and ends all when one is lost."""

  def __init__(
    self, port: int, count: int, token: str, *, rendezvous_timeout: float,
    heartbeat_timeout: float, leave_timeout: float, say=print,
    clock=time.monotonic, sleep=asyncio.sleep,
  ):  # fmt: skip
    """Opens the port and serves it from a thread of its own.

    Args:
      port: TCP, of all of this host's addresses.
      count: of processes.
      token: that every process's card must show.
      rendezvous_timeout: seconds until all must have come.
      heartbeat_timeout: seconds of silence after which a process is lost.
      leave_timeout: seconds until all must have come to the end.
      say: called with a line for people.
      clock: returns seconds that never run backwards.
      sleep: waits for seconds of that clock.

    Raises:
      OSError: if the port is taken.
    """
    self._count = count
    self._token = token
    self._rendezvous_timeout = rendezvous_timeout
    self._heartbeat_timeout = heartbeat_timeout
    self._leave_timeout = leave_timeout
    self._say = say
    self._clock = clock
    self._sleep = sleep
    self._members: dict[int, _Member] = {}
    self._running = False
    self._ended = None  # what all were told
    self._gathered: dict[str, dict] = {}
    self._leaving_since = 0.0
    self._tasks = set()
    # Both families where the system allows it.
    dual = socket.has_dualstack_ipv6()
    self._socket = socket.create_server(
      ('', port),
      family=socket.AF_INET6 if dual else socket.AF_INET,
      dualstack_ipv6=dual,
      backlog=1024,
    )
    threading.Thread(target=self._run, name='hub', daemon=True).start()

  def _run(self):
    asyncio.run(self._serve())

  async def _serve(self):
    await asyncio.start_server(self._meet, sock=self._socket, limit=_MOST)
    start = said = self._clock()
    while True:
      before = self._clock()
      await self._sleep(PULSE)
      now = self._clock()
      # While this process was itself stopped, or a library held its
      # interpreter, nobody could be heard.
      for member in self._members.values():
        member.heard += now - before - PULSE
      if self._running:
        self._look_after(now)
      elif now - start > self._rendezvous_timeout:
        self._end(
          TRY_AGAIN,
          f'{self._missing(self._members)} not come within '
          f'{self._rendezvous_timeout:g} s ({self._present()}): see their '
          'logs, or raise config.cluster.rendezvous_timeout',
        )
      elif now - said >= SAY_EVERY and not self._ended:
        said = now
        left = self._rendezvous_timeout - (now - start)
        self._say(
          f'waiting: {self._missing(self._members)} not come yet '
          f'({self._present()}); {left:.0f} s left'
        )

  async def _meet(self, reader, writer):
    """Serves one process until it goes."""
    member = None
    try:
      line = await asyncio.wait_for(reader.readline(), 30)
      card = json.loads(line)
      problem = self._refused(card)
      if problem or self._ended:
        ours = card['token'] == self._token and not self._running
        told = self._ended if ours else None
        _send(writer, told or {'end': [BAD_INPUT, problem]})
        if ours:  # a run that goes on is not harmed
          self._end(BAD_INPUT, problem)
        await writer.drain()
        return
      member = _Member(card, writer, self._clock())
      self._members[card['index']] = member
      if len(self._members) == self._count:
        self._begin()
      async for line in reader:
        member.heard = self._clock()
        self._read(member, json.loads(line))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
      pass  # not one of ours, or its connection broke
    finally:
      if member is not None and not member.left:
        self._lost(member, 'has gone: its process was ended, or its host')
      with contextlib.suppress(OSError):
        writer.close()

  def _refused(self, card):
    """Why a process that has just come cannot take part; '' if it can."""
    index = card['index']
    if card['token'] != self._token:
      return f'{process_info.name(card)} belongs to another job than rank 0'
    if self._running:
      return (
        f'{process_info.name(card)} found a run that has begun already at '
        'rank 0: choose another port'
      )
    if card['count'] != self._count:
      return (
        f'{process_info.name(card)} expects {card["count"]} processes, rank 0 '
        f'{self._count}'
      )
    if index not in range(self._count):
      return f'{process_info.name(card)} is none of {self._count}'
    if index in self._members:
      other = self._members[index].card['host']
      return f'rank {index} came twice: from {other} and from {card["host"]}'
    return ''

  def _begin(self):
    shown = [self._members[i].card for i in range(self._count)]
    problem = process_info.first_mismatch(shown)
    if problem:
      self._end(BAD_INPUT, problem)
      return
    taken, _ = process_info.devices(shown)
    port = _free_port()
    hosts = [card['host'] for card in shown]
    self._running = True
    for index, member in self._members.items():
      member.heard = self._clock()
      _send(
        member.writer,
        {'go': {'port': port, 'devices': taken[index], 'hosts': hosts}},
      )

  def _read(self, member, message):
    for kind, value in message.items():
      if kind == 'beat':
        member.state = value
      elif kind == 'gather':
        self._gather(member, *value)
      elif kind == 'fail':
        code, text = value
        text = f'{process_info.name(member.card)}: {text}'
        if code == FAILED:
          self._later(_SEE_LOSS, self._end, code, text)
        else:
          self._end(code, text)
      elif kind == 'stalled':
        self._later(_HEAR_ALL, self._stalled, member)
      elif kind == 'bye':
        member.left = True

  def _gather(self, member, name, value):
    values = self._gathered.setdefault(name, {})
    values[member.card['index']] = value
    if name == LEAVE and not self._leaving_since:
      self._leaving_since = self._clock()
    if len(values) == self._count:
      del self._gathered[name]
      if name == LEAVE:
        self._leaving_since = 0.0
      values = [values[i] for i in range(self._count)]
      self._tell_all({'gathered': [name, values]})

  def _look_after(self, now):
    """One pulse of a run: signs of life out, and a look at those that came."""
    if self._ended:
      return
    for member in self._members.values():
      if not member.left:
        _send(member.writer, {'ping': 0})
        quiet = now - member.heard
        if quiet > self._heartbeat_timeout:
          self._lost(
            member,
            f'has been silent for {quiet:.0f} s: its process is stopped, '
            'or its host dead or cut off from the network',
          )
          return
    late = self._gathered.get(LEAVE, {})
    if self._leaving_since and now - self._leaving_since > self._leave_timeout:
      self._end(
        TRY_AGAIN,
        f'{self._missing(late)} not come to the end within '
        f'{self._leave_timeout:g} s of the others{self._whereabouts()}',
      )

  def _stalled(self, member):
    state = member.state
    self._end(
      TRY_AGAIN,
      f'nothing has moved for {state.get("seconds", 0):.0f} s: '
      f'{self._late()} late{self._whereabouts()}',
      stacks=True,
    )

  def _late(self):
    """Who is behind: 'rank 1 on node2 is'; all of them where none is."""

    def progress(member):
      phase = member.state.get('phase', '')
      # All else comes before the steps, or is the compiling of the first.
      order = _ORDER.index(phase) if phase in _ORDER else -1
      if phase in watchdog.JOINING:
        order = watchdog.JOINING.index(phase) - len(watchdog.JOINING) - 1
      elif not phase:  # not even that
        order = -len(watchdog.JOINING) - 2
      return member.state.get('step', 0), order

    members = [member for _, member in sorted(self._members.items())]
    least = min(map(progress, members))
    late = [m for m in members if progress(m) == least]
    if len(late) == len(members):
      return 'all ranks are equally'
    names = _listed([process_info.name(m.card) for m in late])
    return f'{names} {"is" if len(late) == 1 else "are"}'

  def _whereabouts(self):
    states = [
      f'{m.card["index"]}: {m.state.get("phase", "starting")} '
      f'{m.state.get("step") or ""}'.strip()
      for _, m in sorted(self._members.items())
    ]
    return f' (rank: what it does, step; {"; ".join(states)})'

  def _lost(self, member, why):
    if self._running:
      self._end(TRY_AGAIN, f'{process_info.name(member.card)} {why}')
    else:  # it may come again: nothing has begun
      self._members.pop(member.card['index'], None)

  def _end(self, code, text, stacks=False):
    """Tells all that it is over; the first to say so is right."""
    if not self._ended:
      self._ended = {'end': [code, text, stacks]}
      self._tell_all(self._ended)

  def _tell_all(self, message):
    # Process 0 last: when it reads this, the others have been sent it.
    for _, member in sorted(self._members.items(), reverse=True):
      if not member.left:
        _send(member.writer, message)

  def _later(self, seconds, call, *arguments):
    async def wait():
      await self._sleep(seconds)
      call(*arguments)

    task = asyncio.ensure_future(wait())
    self._tasks.add(task)  # asyncio itself keeps none alive
    task.add_done_callback(self._tasks.discard)

  def _missing(self, present):
    names = [
      process_info.name(self._members[i].card)
      if i in self._members
      else f'rank {i}'
      for i in range(self._count)
      if i not in present
    ]
    return f'{_listed(names)} {"has" if len(names) == 1 else "have"}'

  def _present(self):
    return f'{len(self._members)} of {self._count} are here'


def _listed(names):
  more = f' and {len(names) - 8} more' if len(names) > 8 else ''
  return ', '.join(names[:8]) + more


def _send(writer, message):
  if not writer.is_closing():
    writer.write(json.dumps(message).encode() + b'\n')


def _free_port():
  with socket.socket() as s:
    s.bind(('', 0))
    return s.getsockname()[1]
