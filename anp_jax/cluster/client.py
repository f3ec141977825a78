"""What a process says to the coordinator, and through it to all others."""

from collections.abc import Callable, Sequence
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, NamedTuple, NoReturn

import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import (
  connection as connection_lib,
  coordinator,
  generation as generation_lib,
  members,
  termination,
)

NO_STEP = -1
# Longer than the coordinator may hold a failure back.
_PASSES_ON_WITHIN = 5.0  # seconds


class Start(NamedTuple):
  """A start of the processes that train.

  Attributes:
    rank: rank of this process.
    ranks: ranks of the processes, in the order of JAX's processes.
    hosts: host of each of them; '' where it has not come.
    devices: ordinals of the GPUs that this process uses; None: all it sees.
    port: TCP port of JAX's coordinator.
  """

  rank: int = -1
  ranks: Sequence[int] = ()
  hosts: tuple[str, ...] = ()
  devices: list[int] | None = None
  port: int = 0

  def name(self, index: int) -> str:
    """Returns the name of one of JAX's processes: 'rank 1 on node2'."""
    return f'rank {self.ranks[index]} on {self.hosts[index]}'


class CoordinatorClient:
  """Sends the heartbeats of this process; receives the order to end or to restart.

  Attributes:
    start: what the coordinator has sent for the start.
    is_elastic: whether the run goes on without a process that is lost.
    generation: generation that this process belongs to, with all addresses.
  """

  def __init__(
    self,
    connected: socket.socket,
    info: dict,
    settings: ml_collections.ConfigDict,
    generation: generation_lib.Generation = generation_lib.FIRST,
    leave: Callable[[int, str, bool], None] = termination.end_process,
    restart: Callable[[generation_lib.Generation], None] = generation_lib.restart,
  ):
    """Waits until all processes have come.

    Args:
      connected: connection to the coordinator, from `connection`.
      info: description from `process_info.collect`.
      settings: config.cluster.
      generation: generation that this process belongs to.
      leave: called (code, text, stacks) when all must end.
      restart: called with the next generation when this process must restart.

    Raises:
      ConfigError: if the processes do not go together.
      PeerLostError: if one was lost, or did not come in time.
    """
    self._leave, self._restart = leave, restart
    self.generation, self.is_elastic = generation, info['elastic']
    self._mail: queue.SimpleQueue[tuple] = queue.SimpleQueue()
    self._gathers = 0
    self._gathered: queue.SimpleQueue[list] = queue.SimpleQueue()
    self._ended = threading.Event()  # all may hang up, or were told to end
    # Until they are attached
    self._order: Callable[[str], object] = lambda order: None
    self._step: Callable[[], int] = lambda: NO_STEP
    self.start = Start()
    self._connection = connection_lib.Connection(connected, settings.heartbeat_timeout)
    self._connection.send(info)
    messages = self._connection.messages()
    self._wait_for_go(messages)
    threading.Thread(target=self._listen, args=(messages,), name='client', daemon=True).start()

  def heartbeat(self, state: dict) -> None:
    """Reports where this process is: see `watchdog` and `activity`."""
    self._connection.send({'heartbeat': state})

  def stalled(self) -> None:
    """Reports that this process is stuck; all end, and the late one is named."""
    self._connection.send({'stalled': 0})

  def gather(self, value: Any, name: str = '') -> list:
    """Returns every process's value, by index; all must call it as often."""
    if not name:
      self._gathers += 1
      name = f'value {self._gathers}'
    self._connection.send({'gather': [name, value]})
    return self._gathered.get()

  def send(self, index: int, value: Any) -> None:
    """Sends a JSON value to one process; see `receive_mail`."""
    self._connection.send({'mail': [index, value]})

  def receive_mail(self, on_mail: Callable[[int, Any, str], None]) -> None:
    """Has a function called with what `send` sent here, before and from now on.

    Args:
      on_mail: (index of the sender, value, why it is lost); where a process
        that the run can do without is lost, process 0 gets no value. Called in
        a thread of its own.
    """

    def deliver():
      try:
        while True:
          on_mail(*self._mail.get())
      except BaseException as e:  # noqa: BLE001 - a process that hears nothing must not go on
        self._leave(1, f'a message could not be handled: {e!r}', True)

    threading.Thread(target=deliver, name='mail', daemon=True).start()

  def leave(self) -> None:
    """Hangs up before the others, for a process that they can do without."""
    self._ended.set()
    self._hang_up()

  def fail(self, code: int, text: str) -> None:
    """Ends all processes; returns once the coordinator has passed it on.

    That is at once, or when it has seen whether another process is lost. An elastic
    run may also go on without this process.
    """
    self._connection.send({'fail': [code, text]})
    self._ended.wait(self._connection.max_silence + _PASSES_ON_WITHIN)

  def set_sizes(self, sizes: Sequence[int]) -> None:
    """Sets the numbers of processes over which the batch divides."""
    self.generation = self.generation._replace(sizes=tuple(sizes))
    self._connection.send({'sizes': sizes})

  def attach(
    self, order: Callable[[str], object], step: Callable[[], int] = lambda: NO_STEP
  ) -> None:
    """Sets what this process does and tells at the coordinator's word.

    Args:
      order: makes this process vote to 'stop', or to 'pause' for a restart.
      step: returns the last step whose numbers were read; NO_STEP until one has been computed
        since the start.
    """
    self._order, self._step = order, step

  def tell(self) -> None:
    """Reports that this process was told to leave; see `regrouping`."""
    self._connection.send({'told': 0})

  def wait_for_restart(self) -> NoReturn:
    """Reports that this process has kept its state, and waits for the restart."""
    self._connection.send({'ready': 0})
    while True:
      time.sleep(1)

  def close(self) -> None:
    """Waits until all have come to the end, then hangs up."""
    self.gather(0, coordinator.LEAVE)
    self._hang_up()

  def _hang_up(self):
    self._connection.send({'bye': 0})
    self._connection.close()

  def _wait_for_go(self, messages):
    """Returns once this process trains; meanwhile it is a spare."""
    for message in messages:
      if 'go' in message:
        go = generation_lib.parsed(message['go'])
        could_grow, sizes = go.pop('could_grow'), go.pop('sizes') or self.generation.sizes
        values = {name: go.pop(name) for name in ('number', 'addresses', 'lost', 'started_at')}
        self.generation = self.generation._replace(rank=go['rank'], sizes=sizes, **values)
        self.start = Start(**{**go, 'hosts': tuple(go['hosts'])})
        if self.start.rank in self.start.ranks:
          return
        self._step = int  # it does not know what the others compute
        if not could_grow:
          print('this process is a spare: it waits until another one is lost', flush=True)
        if threading.current_thread() is threading.main_thread():
          for number in generation_lib.HELD_BACK:
            signal.signal(number, lambda *_: os._exit(0))  # nothing is lost with it
          signal.pthread_sigmask(signal.SIG_UNBLOCK, generation_lib.HELD_BACK)
      elif 'end' in message:
        code, text = message['end'][:2]
        if code == termination.BAD_INPUT:
          raise config_lib.ConfigError(text)
        if code:
          raise termination.PeerLostError(text, code)
        print(text, flush=True)
        sys.exit(0)
      else:
        self._receive(message)
    if self.generation.number or self.generation.addresses:
      self._go_on_without_coordinator()
    raise termination.PeerLostError('rank 0 has gone before all came')

  def _listen(self, messages):
    for message in messages:
      if self._receive(message):
        break
    if not self._ended.is_set():
      self._go_on_without_coordinator()

  def _go_on_without_coordinator(self):
    """Restarts this process, or ends it where the run cannot go on."""
    reason = members.GONE
    if self._connection.is_silent:
      reason = f'has been silent for {self._connection.max_silence:g} s: {members.SILENT}'
    lost = {rank: f'{self.start.name(0)} {reason}' for rank in self.start.ranks[:1]}
    if self.is_elastic:
      self._restart_with(lost=lost, coordinator=-1)
    else:
      self._leave(termination.TRY_AGAIN, *lost.values(), False)

  def _restart_with(self, **values):
    """Restarts this process; what was lost since the last step counts together."""
    values |= {'number': self.generation.number + 1, 'devices': self.start.devices}
    ranks, step = self.start.ranks, self._step()
    if step == NO_STEP and self.generation.interruption.at:
      earlier = {rank: why for rank, why in self.generation.lost.items() if rank not in ranks}
      values['lost'] = earlier | values['lost']
    else:
      names = {rank: self.start.name(index) for index, rank in enumerate(ranks)}
      values['interruption'] = generation_lib.Interruption(time.time(), max(step, 0), names)
    try:
      self._restart(self.generation._replace(**values))
    except OSError as e:
      self._leave(termination.TRY_AGAIN, f'this process cannot restart: {e}', False)
    self._ended.set()

  def _receive(self, message):
    """Handles a message; returns whether it was the last one."""
    if 'gathered' in message:
      name, values = message['gathered']
      if name == coordinator.LEAVE:  # all may hang up from now on
        self._ended.set()
      self._gathered.put(values)
    elif 'mail' in message:
      self._mail.put((*message['mail'], ''))
    elif 'lost' in message:
      index, why = message['lost']
      self._mail.put((index, None, why))
    elif 'ping' in message:
      # Also while the main thread starts JAX, which may take a minute.
      self._connection.send({'pong': 0})
    elif 'sizes' in message:
      self.generation = self.generation._replace(sizes=tuple(message['sizes']))
    elif 'stacks' in message:
      termination.print_stacks()
    elif 'stop' in message or 'pause' in message:
      self._order(*message)
    elif 'regroup' in message:
      values = message['regroup']
      self._restart_with(**generation_lib.parsed(values))
      return True
    elif 'end' in message:
      self._leave(*message['end'])  # before `fail` returns, which would end it otherwise
      self._ended.set()
      return True
    return False
