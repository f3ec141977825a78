"""The connection of a process to process 0, and so to all others."""

from collections.abc import Callable, Sequence
import contextlib
import json
import socket
import threading
import time
from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import (
  awake_clock,
  cluster_env,
  coordinator,
  handshake,
  process_info,
  secret as secret_lib,
  termination,
)

_RETRY = 0.3  # seconds between two attempts to reach process 0
# Attempts: process 0 may close a connection when many come at once.
_MAX_REFUSALS = 10
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
    self._env = env
    self._settings = settings
    self._leave = leave
    self._send_lock = threading.Lock()
    self._answers: dict[str, list] = {}
    self._answered = threading.Condition()
    self._gathers = 0
    self._end: Sequence | None = None  # the (code, text, ...) with which all must end
    self._on_mail: Callable | None = None
    self._mail: list[tuple] = []
    self._mail_lock = threading.Lock()
    self._clock = awake_clock.AwakeClock(coordinator.HEARTBEAT_PERIOD)
    self._is_silent, self._hung_up = False, threading.Event()
    self._socket = self._connect()
    self._lines = self._socket.makefile('rb')
    # Process 0 keeps the time; this one only outlives it a little.
    self._expect_within(settings.rendezvous_timeout + 30)
    threading.Thread(target=self._watch, name='silence', daemon=True).start()
    self._send(info)
    try:
      go = self._wait_for_go()
    except BaseException:
      self._hung_up.set()
      raise
    self.hosts = tuple(go['hosts'])
    self.devices = go['devices']
    self.port = go['port']
    self._expect_within(settings.heartbeat_timeout)
    threading.Thread(target=self._listen, name='client', daemon=True).start()

  def heartbeat(self, state: dict) -> None:
    """Reports where this process is: {'phase', 'step', 'seconds'}."""
    self._send({'heartbeat': state})

  def stalled(self) -> None:
    """Reports that this process is stuck; all end, and the late one is named."""
    self._send({'stalled': 0})

  def gather(self, value: Any, name: str = '') -> list:
    """Returns every process's value, by index; all must call it as often."""
    if not name:
      self._gathers += 1
      name = f'value {self._gathers}'
    self._send({'gather': [name, value]})
    with self._answered:
      self._answered.wait_for(lambda: name in self._answers)
      return self._answers.pop(name)

  def send(self, index: int, value: Any) -> None:
    """Sends a JSON value to one process; see `receive_mail`."""
    self._send({'mail': [index, value]})

  def receive_mail(self, on_mail: Callable) -> None:
    """Has a function called with what `send` sent here, before and from now on.

    Args:
      on_mail: (index of the sender, value, why it is lost); where a process
        that the run can do without is lost, process 0 gets no value. Called in
        a thread of the connection.
    """
    with self._mail_lock:
      self._on_mail = on_mail
      for mail in self._mail:
        on_mail(*mail)
      self._mail.clear()

  def leave(self) -> None:
    """Hangs up before the others, for a process that they can do without."""
    with self._answered:
      self._end = (0, '')
    self._send({'bye': 0})
    self._socket.close()

  def fail(self, code: int, text: str) -> None:
    """Ends all processes; returns once process 0 has passed it on.

    That is at once, or when it has seen whether another process is lost.
    """
    self._send({'fail': [code, text]})
    within = self._settings.heartbeat_timeout + _PASSES_ON_WITHIN
    with self._answered:
      self._answered.wait_for(lambda: self._end is not None, within)

  def close(self) -> None:
    """Waits until all have come to the end, then hangs up."""
    self.gather(0, coordinator.LEAVE)
    self._send({'bye': 0})
    if self._env.index:
      self._socket.close()

  def _connect(self):
    host, port = cluster_env.split_address(self._env.coordinator_address)
    ports = [port, *self._env.other_ports]
    period = len(ports) * 2 * handshake.WITHIN + _RETRY
    refusals, clock = 0, awake_clock.AwakeClock(period)
    start = last_line = clock()
    deadline = start + self._settings.rendezvous_timeout
    while True:
      clock.tick()
      connection, errors = self._try(host, ports)
      if connection:
        return connection
      refused = [e for e in errors if isinstance(e, handshake.RefusedError)]
      # The right process 0 may come yet, at a port where nobody is.
      refusals = refusals + 1 if len(refused) == len(ports) else 0
      is_late = clock() > deadline
      if refusals == _MAX_REFUSALS or (refused and is_late):
        raise config_lib.ConfigError(self._no_secret()) from refused[0]
      if is_late:
        raise termination.PeerLostError(self._no_answer(host, errors[0])) from errors[0]
      now = clock()
      # One process a host says it: the others of a hundred see the same.
      if now - last_line >= coordinator.LOG_PERIOD and self._env.local_index < 1:
        last_line = now
        print(
          f'waiting: rank 0 at {self._env.coordinator_address} does not answer yet; '
          f'{deadline - now:.0f} s left; {self._no_secret() if refused else _reason(errors[0])}'
        )
      time.sleep(_RETRY)

  def _try(self, host, ports):
    """Tries ports in turn; returns a connection, or None and all errors."""
    errors = []
    for port in ports:
      try:
        return handshake.connect((host, port), self._env.secret), []
      except OSError as e:
        errors.append(e)
    return None, errors

  def _no_secret(self):
    return (
      f'rank {self._env.index} on {socket.gethostname()}: what answers at '
      f'{self._env.coordinator_address} does not know the secret of this run: '
      'the processes must share --workdir, no other run may use the port, and '
      f'{secret_lib.VARIABLE} must be the same for each if it is set'
    )

  def _no_answer(self, host, error):
    hint = (
      '; a loopback address reaches this host only' if cluster_env.is_loopback_name(host) else ''
    )
    return (
      f'rank {self._env.index} on {socket.gethostname()}: no answer from rank '
      f'0 at {self._env.coordinator_address} within '
      f'{self._settings.rendezvous_timeout:g} s ({_reason(error)}){hint}'
    )

  def _wait_for_go(self):
    # A torn line is a ValueError, and so is a ConfigError.
    with contextlib.suppress(OSError, json.JSONDecodeError, UnicodeDecodeError):
      for line in self._lines:
        message = json.loads(line)
        if 'go' in message:
          return message['go']
        if 'end' in message:
          code, text = message['end'][:2]
          if code == termination.BAD_INPUT:
            raise config_lib.ConfigError(text)
          raise termination.PeerLostError(text)
    raise termination.PeerLostError(
      f'rank 0 at {self._env.coordinator_address} has gone before all came'
    )

  def _expect_within(self, seconds):
    """Hangs up if process 0 says nothing for so long; see `_watch`."""
    # Not by the socket's own time-out: that counts the seconds in which this
    # process is stopped.
    self._socket.settimeout(None)
    self._last_heard, self._silence = self._clock(), seconds

  def _watch(self):
    """Hangs up on a process 0 that is silent, which wakes who reads."""
    while not self._hung_up.wait(coordinator.HEARTBEAT_PERIOD):
      self._clock.tick()
      if self._clock() - self._last_heard > self._silence:
        self._is_silent = True
        with contextlib.suppress(OSError):
          self._socket.shutdown(socket.SHUT_RDWR)
        return

  def _listen(self):
    with contextlib.suppress(OSError, ValueError):
      for line in self._lines:
        self._last_heard = self._clock()
        if self._receive(json.loads(line)):
          break
    self._hung_up.set()
    if self._end is None:
      reason = 'has gone: its process was ended, or its host'
      if self._is_silent:
        reason = (
          f'has been silent for {self._settings.heartbeat_timeout:g} s: its '
          'process is stopped, or its host dead or cut off from the network'
        )
      first = process_info.name({'index': 0, 'host': self.hosts[0]})
      self._leave(termination.TRY_AGAIN, f'{first} {reason}', False)

  def _receive(self, message):
    """Handles a message; returns whether it was the last one."""
    if 'gathered' in message:
      name, values = message['gathered']
      with self._answered:
        self._answers[name] = values
        if name == coordinator.LEAVE:  # all may hang up from now on
          self._end = (0, '')
        self._answered.notify_all()
    elif 'mail' in message:
      index, value = message['mail']
      self._take_mail(index, value, '')
    elif 'lost' in message:
      index, why = message['lost']
      self._take_mail(index, None, why)
    elif 'ping' in message:
      # Also while the main thread starts JAX, which may take a minute.
      self._send({'pong': 0})
    elif 'end' in message:
      with self._answered:
        self._end = message['end']
        self._answered.notify_all()
      self._leave(*self._end)
      return True
    return False

  def _take_mail(self, *mail):
    with self._mail_lock:
      if self._on_mail is None:
        self._mail.append(mail)
      else:
        self._on_mail(*mail)

  def _send(self, message):
    # A message that cannot be sent is missed by process 0, which acts on it.
    with self._send_lock, contextlib.suppress(OSError):
      self._socket.sendall(json.dumps(message).encode() + b'\n')


def _reason(error):
  return error.strerror or error
