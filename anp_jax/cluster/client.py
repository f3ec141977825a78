"""What a process says to process 0, and through it to all others."""

from collections.abc import Callable
import queue
import threading
from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import (
  cluster_env,
  connection as connection_lib,
  coordinator,
  process_info,
  termination,
)

# Longer than process 0 may hold a failure back.
_PASSES_ON_WITHIN = 5.0  # seconds


class CoordinatorClient:
  """Sends the heartbeats of this process; receives the order to end.

  Attributes:
    hosts: host of each process, by index; '' where it has not come.
    devices: ordinals of the GPUs that this process uses; None: all it sees.
    port: TCP port of JAX's coordinator on process 0.
  """

  def __init__(
    self,
    env: cluster_env.ClusterEnv,
    info: dict,
    settings: ml_collections.ConfigDict,
    leave: Callable[[int, str, bool], None] = termination.end_process,
  ):
    """Connects to process 0 and waits until all processes have come.

    Args:
      env: place of this process.
      info: description from `process_info.collect`.
      settings: config.cluster.
      leave: called (code, text, stacks) when all must end.

    Raises:
      ConfigError: if the processes do not go together.
      PeerLostError: if one did not come in time.
    """
    self._leave = leave
    self._mail: queue.SimpleQueue[tuple] = queue.SimpleQueue()
    self._gathers = 0
    self._gathered: queue.SimpleQueue[list] = queue.SimpleQueue()
    self._ended = threading.Event()  # all may hang up, or were told to end
    self._connection = connection_lib.Connection(
      connection_lib.connect(env, settings.rendezvous_timeout),
      # Process 0 keeps the time; this one only outlives it a little.
      settings.rendezvous_timeout + 30,
    )
    self._connection.send(info)
    messages = self._connection.messages()
    go = _wait_for_go(messages, env.coordinator_address)
    self.hosts, self.devices, self.port = tuple(go['hosts']), go['devices'], go['port']
    self._connection.max_silence = settings.heartbeat_timeout
    threading.Thread(target=self._listen, args=(messages,), name='client', daemon=True).start()

  def heartbeat(self, state: dict) -> None:
    """Reports where this process is: {'phase', 'step', 'seconds'}."""
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
    """Ends all processes; returns once process 0 has passed it on.

    That is at once, or when it has seen whether another process is lost.
    """
    self._connection.send({'fail': [code, text]})
    self._ended.wait(self._connection.max_silence + _PASSES_ON_WITHIN)

  def close(self) -> None:
    """Waits until all have come to the end, then hangs up."""
    self.gather(0, coordinator.LEAVE)
    self._hang_up()

  def _hang_up(self):
    self._connection.send({'bye': 0})
    self._connection.close()

  def _listen(self, messages):
    for message in messages:
      if self._receive(message):
        break
    if not self._ended.is_set():
      reason = 'has gone: its process was ended, or its host'
      if self._connection.is_silent:
        reason = (
          f'has been silent for {self._connection.max_silence:g} s: its '
          'process is stopped, or its host dead or cut off from the network'
        )
      first = process_info.name({'index': 0, 'host': self.hosts[0]})
      self._leave(termination.TRY_AGAIN, f'{first} {reason}', False)

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
    elif 'end' in message:
      self._ended.set()
      self._leave(*message['end'])
      return True
    return False


def _wait_for_go(messages, address):
  for message in messages:
    if 'go' in message:
      return message['go']
    if 'end' in message:
      code, text = message['end'][:2]
      if code == termination.BAD_INPUT:
        raise config_lib.ConfigError(text)
      raise termination.PeerLostError(text)
  raise termination.PeerLostError(f'rank 0 at {address} has gone before all came')
