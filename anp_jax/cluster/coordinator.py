"""The coordinator of a run: all processes connect to it and are watched by it.

A message is one line of JSON. The coordinator knows which processes have come,
are gone or late, and names them to the others; gradients do not pass here. If a
process is lost, all restart without it (`regrouping`), or end where a run cannot go
on; a process that the run can do without is told to process 0, and may come again.
"""

import asyncio
from collections.abc import Awaitable, Callable
import contextlib
import json
import re
import threading
import time

import ml_collections

from anp_jax.cluster import (
  awake_clock,
  cluster_env,
  generation as generation_lib,
  handshake,
  lateness,
  listener,
  members as members_lib,
  regrouping,
  termination,
  watchdog,
)

LEAVE = 'leave'  # the name of what is gathered last
HEARTBEAT_PERIOD = 1.0  # seconds
LOG_PERIOD = 10.0  # seconds between two lines on what is waited for
# Until the other processes have reported where they are, once one is stuck.
_REPORTS_WITHIN = 2.5 * HEARTBEAT_PERIOD
# An error of one process may follow from the loss of another, which is seen
# only now.
_LOSS_SEEN_WITHIN = HEARTBEAT_PERIOD
# It surely does if a connection between processes broke: then the other may
# have to be silent for a while until it is known to be lost.
BROKEN = re.compile(r'\bgloo|\bnccl|connection (reset|closed|refused)', re.I)
_MAX_LINE = 2**22  # bytes


class Coordinator:
  """Lets all processes start together, and acts when one is lost.

  Attributes:
    listeners: open ports.
  """

  def __init__(
    self,
    env: cluster_env.ClusterEnv,
    settings: ml_collections.ConfigDict,
    generation: generation_lib.Generation = generation_lib.FIRST,
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable] = asyncio.sleep,
  ):
    """Opens the port and serves it from a thread of its own.

    Args:
      env: place of the coordinator's process; all must prove its secret, then show
        its count and token.
      settings: config.cluster.
      generation: generation of the run, with the ports that are open already.
      log: called with a line for people.
      clock: returns seconds that never run backwards.
      sleep: waits for seconds of that clock.

    Raises:
      ConfigError: if the port cannot be opened.
      PeerLostError: if it is taken, and so are the others that may be used.
    """
    self._settings = settings
    self._log = log
    self._clock = awake_clock.AwakeClock(HEARTBEAT_PERIOD, clock)
    self._sleep = sleep
    self._members = members_lib.Members(env.count, env.token, env.index, generation)
    self._regrouping = regrouping.Regrouping(
      self._members, self._send_to, self._call_later, env.secret
    )
    self._end_message: dict | None = None  # what all processes were sent
    self._gathered: dict[str, dict] = {}
    self._leaving_since = 0.0
    self._tasks: set[asyncio.Future] = set()
    self._gate = handshake.Gate(env.secret, env.count, self._meet, log)
    self.listeners = listener.inherited(generation.descriptors) or listener.listen(env)
    threading.Thread(
      target=lambda: asyncio.run(self._serve()), name='coordinator', daemon=True
    ).start()

  async def _serve(self):
    for listening in self.listeners:
      self._tasks.add(asyncio.ensure_future(self._gate.accept(listening)))
    if self._members.go_on:
      looking = self._regrouping.look_around(self._begin_if_complete)
      self._tasks.add(asyncio.ensure_future(looking))
    start = last_line = self._clock()
    judge = lateness.Judge(self._log)
    while True:
      self._clock.tick()
      await self._sleep(HEARTBEAT_PERIOD)
      now = self._clock()
      for member in self._members.values():
        if not member.left:
          _send(member.writer, {'ping': 0})
      timeout = self._settings.rendezvous_timeout
      if self._members.go_on:  # the others are up: only one that is lost does not come
        timeout = self._settings.heartbeat_timeout + 2 * handshake.WITHIN
      left = timeout - (now - start)
      if self._members.have_begun:
        self._check_members(now)
        judge.look(lateness.rows(self._members, now), now)
      elif left < 0 and (self._members.go_on or self._members.are_enough()):
        self._begin()
      elif left < 0:
        self._end(
          termination.NOBODY_CAME,
          f'{self._members.missing(self._members)} not come within {timeout:g} s '
          f'({self._members.presence()}): see their logs, or raise '
          'config.cluster.rendezvous_timeout',
        )
      elif now - last_line >= LOG_PERIOD and not self._end_message:
        last_line = now
        self._log(
          f'waiting: {self._members.missing(self._members)} not come yet '
          f'({self._members.presence()}); {left:.0f} s left'
        )

  async def _meet(self, connection):
    """Serves one process, which knows the secret, until it goes."""
    member = None
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_LINE)
    try:
      line = await asyncio.wait_for(reader.readline(), 30)
      info = json.loads(line)
      if 'ask' in info:
        while line:
          _send(writer, self._answer(json.loads(line)['ask']))
          line = await reader.readline()
        return
      if self._regrouping.has_begun:  # it comes again, to the next generation
        return
      problem = self._members.refusal(info)
      if problem or self._end_message:
        self._refuse(info, writer, problem)
        await writer.drain()
        return
      member = members_lib.Member(info, writer, self._clock())
      self._welcome(member)
      async for line in reader:
        member.last_heard = self._clock()
        self._receive(member, json.loads(line))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
      pass  # not one of ours, or its connection broke
    finally:
      if member is not None and not member.left:
        self._lost(member, members_lib.GONE)
      with contextlib.suppress(OSError):
        writer.close()

  def _answer(self, question):
    """What one is told that takes no part: see `tools.top`."""
    if question == 'stacks':
      self._send_all({'stacks': 0})
    table = lateness.rows(self._members, self._clock()) if question == 'rows' else []
    return {
      'has_begun': self._members.have_begun,
      'rows': table,
      'verdict': lateness.verdict(table),
      'losses': self._members.losses(),
    }

  def _refuse(self, info, writer, problem):
    """Sends a process away, and ends all if it belongs to a run that has not begun."""
    before_start = self._members.is_ours(info) and not self._members.have_begun
    before_start &= not self._members.go_on
    message = self._end_message if before_start or not problem else None
    _send(writer, message or {'end': [termination.BAD_INPUT, problem]})
    if before_start:  # a run that goes on is not harmed
      self._end(termination.BAD_INPUT, problem)

  def _welcome(self, member):
    """Takes a process in; the run begins with the last one."""
    before = self._members.get(member.index)
    if before is not None and self._members.can_go_without(member.index):
      self._drop(before, 'has been started again')  # before it was known to be lost
    self._members.take_in(member)
    if self._members.have_begun:
      self._send_start(member)
      self._regrouping.grow_if_useful()
    else:
      self._begin_if_complete()

  def _begin_if_complete(self):
    has_looked = self._regrouping.has_looked or not self._members.go_on
    if has_looked and self._members.are_complete() and not self._members.have_begun:
      self._begin()

  def _begin(self):
    for rank, problem in self._members.unlike_the_first().items():
      self._refuse(self._members[rank].info, self._members[rank].writer, problem)
      self._members.pop(rank).left = True
      self._members.dismiss(rank)
    try:
      self._members.begin(listener.reserve_port(), self._settings.min_processes)
    except termination.EXPECTED as e:
      self._end(*termination.exit_status(e))
      return
    for member in self._members.values():
      self._send_start(member)

  def _send_start(self, member):
    member.last_heard = self._clock()
    _send(member.writer, {'go': self._members.start_of(member)})

  def _receive(self, member, message):
    for kind, value in message.items():
      if kind == 'heartbeat':
        member.receive(value)
      elif kind == 'gather':
        self._gather(member, *value)
      elif kind == 'mail':
        index, content = value
        self._deliver(member, index, content)
      elif kind == 'fail':
        self._fail(member, *value)
      elif kind == 'sizes':
        self._members.sizes = value
        for rank in self._members.spares():  # one of them may be the next coordinator
          self._send_to(rank, {'sizes': value})
        self._regrouping.grow_if_useful()
      elif kind == 'told':
        self._regrouping.tell(member.index)
      elif kind == 'ready':
        self._regrouping.note_ready(member.index)
      elif kind == 'stalled':
        self._call_later(_REPORTS_WITHIN, self._stalled, member)
      elif kind == 'bye':
        member.left = True
        if self._members.can_go_without(member.index):
          self._drop(member, 'has left')

  def _fail(self, member, code, text):
    """Ends all because of a member's error, or goes on without the member."""
    if self._members.can_go_without(member.index):
      _send(member.writer, {'end': [code, text, False]})
      self._drop(member, f'has failed: {text}')
      return
    text = f'{member.name}: {text}'
    is_misfit = code == termination.BAD_INPUT and self._members.is_new(member)
    if (code == termination.TRY_AGAIN or is_misfit) and self._members.are_elastic:
      self._regrouping.begin({member.index: text}, {member.index: [code, text, False]})
    elif code == termination.FAILED:
      within = _LOSS_SEEN_WITHIN
      if BROKEN.search(text):
        within += self._settings.heartbeat_timeout
      self._call_later(within, self._end, code, text)
    else:
      self._end(code, text)

  def _gather(self, member, name, value):
    values = self._gathered.setdefault(name, {})
    values[member.index] = value
    if name == LEAVE and not self._leaving_since:
      self._leaving_since = self._clock()
    self._answer_gather(name)

  def _answer_gather(self, name):
    """Sends the gathered values, once all members have sent theirs."""
    values = self._gathered.get(name, {})
    spares = self._members.spares()
    if not values or self._members.keys() - {*values, *spares}:
      return
    del self._gathered[name]
    if name == LEAVE:
      self._leaving_since = 0.0
      for rank in spares:
        self._send_to(rank, {'end': [0, 'the run has ended without this process', False]})
    by_rank = [values.get(rank) for rank in self._members.ranks]
    for rank in self._members.in_order():
      if rank not in spares:
        self._send_to(rank, {'gathered': [name, by_rank]})

  def _deliver(self, sender, index, content):
    """Passes a value on to one process."""
    receiver = self._members.get(index)
    if receiver is not None and not receiver.left:
      _send(receiver.writer, {'mail': [sender.index, content]})

  def _check_members(self, now):
    """Ends a run, or goes on without a process, if one is lost or late."""
    if self._end_message:
      return
    for member in list(self._members.values()):
      if not member.left:
        quiet = now - member.last_heard
        if quiet > self._settings.heartbeat_timeout:
          self._lost(member, f'has been silent for {quiet:.0f} s: {members_lib.SILENT}')
    settings = self._settings
    # The others may still write what an evaluation has found.
    timeout = max(watchdog.OTHER_FACTOR * settings.stall_timeout, settings.stop_timeout)
    timeout = timeout or settings.rendezvous_timeout
    if self._leaving_since and now - self._leaving_since > timeout:
      here = self._gathered[LEAVE]
      late = set(self._members.ranks) - here.keys()
      self._end(
        termination.TRY_AGAIN,
        f'{self._members.missing(here)} not come to the end within '
        f'{timeout:g} s of the others ({self._members.doing(late)})',
      )

  def _stalled(self, member):
    seconds = f'{member.state.get("seconds", 0):.0f} s'
    if self._members.can_go_without(member.index):
      self._fail(member, termination.TRY_AGAIN, f'stuck for {seconds}')
      return
    text = f'nothing has moved for {seconds}: {self._members.late(member)}'
    late = self._members.late_ranks(member)
    if self._members.are_elastic and len(late) < len(self._members.ranks):
      end = [termination.TRY_AGAIN, text, True]
      self._regrouping.begin(dict.fromkeys(late, text), dict.fromkeys(late, end))
    self._end(termination.TRY_AGAIN, text, stacks=True)

  def _lost(self, member, why):
    if self._members.can_go_without(member.index):
      self._drop(member, why)
    elif not self._members.have_begun:  # it may come again: nothing has begun
      self._members.pop(member.index, None)
    elif member.index in self._members.spares():
      self._drop(member, why)
    elif self._members.are_elastic:
      member.left = True
      self._regrouping.begin({member.index: f'{member.name} {why}'})
    else:
      self._end(termination.TRY_AGAIN, f'{member.name} {why}')

  def _drop(self, member, why):
    """Forgets a process that may come again; process 0 is told."""
    if self._members.get(member.index) is not member:
      return  # dropped before
    del self._members[member.index]
    member.left = True
    member.writer.close()
    if not self._members.first.left:
      _send(self._members.first.writer, {'lost': [member.index, f'{member.name} {why}']})
    for name in list(self._gathered):
      self._answer_gather(name)

  def _end(self, code, text, stacks=False):
    """Ends all processes; a second reason to is ignored."""
    if not self._end_message and not self._regrouping.has_begun:
      self._end_message = {'end': [code, text, stacks]}
      self._send_all(self._end_message)

  def _send_all(self, message):
    for rank in self._members.in_order():
      self._send_to(rank, message)

  def _send_to(self, rank, message):
    if not self._members[rank].left:
      _send(self._members[rank].writer, message)

  def _call_later(self, seconds, call, *arguments):
    async def wait():
      await self._sleep(seconds)
      call(*arguments)

    task = asyncio.ensure_future(wait())
    self._tasks.add(task)  # asyncio itself keeps none alive
    task.add_done_callback(self._tasks.discard)


def _send(writer, message):
  if not writer.is_closing():
    writer.write(json.dumps(message).encode() + b'\n')
