"""A process's line to process 0, and so to all others."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env
from anp_jax.cluster import coordinator as hub_lib
from anp_jax.cluster import process_info

_RETRY = 0.3  # seconds between two attempts to reach process 0
# A name may appear late: that of a pod of Kubernetes once the pod has started.
_RESOLVES_WITHIN = 20.0  # seconds
# Until a process ends that cannot write down why: its output is stuck, say.
_LAST_WORDS = 10.0


class Lost(RuntimeError):
  """Another process is missing, lost or late; starting again may help."""


class CoordinatorClient:
  """Says that this process lives and where it is; hears when all must end.

  Attributes:
    hosts: of all processes, by index.
  """

  def __init__(
    self, env: cluster_env.ClusterEnv, card: dict, settings, leave=None
  ):
    """Connects to process 0 and waits until all have come.

    Args:
      env: of this process.
      card: from `process_info.collect`.
      settings: config.cluster.
      leave: called (code, text, stacks) when all must end; ends this process.

    Raises:
      ConfigError: if the processes do not go together.
      Lost: if one did not come in time.
    """
    self._env = env
    self._settings = settings
    self._leave = leave or end_process
    self._lock = threading.Lock()
    self._answers: dict[str, list] = {}
    self._answered = threading.Condition()
    self._gathers = 0
    self._over = None  # what `end` said
    self._socket = self._connect()
    self._lines = self._socket.makefile('rb')
    self._send(card)
    go = self._wait_for_go()
    self.hosts = tuple(go['hosts'])
    self.devices = go['devices']
    self.port = go['port']
    self._socket.settimeout(settings.heartbeat_timeout)
    threading.Thread(target=self._listen, name='link', daemon=True).start()

  def heartbeat(self, state: dict) -> None:
    """Tells where this process is: {'phase', 'step', 'seconds'}."""
    self._send({'beat': state})

  def stalled(self) -> None:
    """Says that nothing moves here; all will be ended, the late one named."""
    self._send({'stalled': 0})

  def gather(self, value, name: str = '') -> list:
    """Every process's value, by index; all must call it equally often."""
    if not name:
      self._gathers += 1
      name = f'value {self._gathers}'
    self._send({'gather': [name, value]})
    with self._answered:
      self._answered.wait_for(lambda: name in self._answers)
      return self._answers.pop(name)

  def fail(self, code: int, text: str) -> None:
    """Ends all processes; returns once process 0 has passed it on."""
    self._send({'fail': [code, text]})
    with self._answered:
      # Longer than process 0 may hold it back.
      self._answered.wait_for(lambda: self._over is not None, 5.0)

  def close(self) -> None:
    """Waits until all have come to the end, then hangs up."""
    self.gather(0, hub_lib.LEAVE)
    self._send({'bye': 0})
    if self._env.index:
      self._socket.close()

  def _connect(self):
    host, port = cluster_env.split_address(self._env.coordinator_address)
    self._resolve(host, port)
    patience = self._settings.rendezvous_timeout
    start = said = time.monotonic()
    deadline = start + patience
    while True:
      try:
        return socket.create_connection((host, port), timeout=5)
      except OSError as e:
        if time.monotonic() > deadline:
          hint = (
            '; a loopback address reaches this host only'
            if cluster_env.is_loopback_name(host)
            else ''
          )
          raise Lost(
            f'rank {self._env.index} on {socket.gethostname()}: no answer '
            f'from rank 0 at {self._env.coordinator_address} within '
            f'{patience:g} s ({e.strerror or e}){hint}'
          ) from e
      now = time.monotonic()
      # One process a host says it: the others of a hundred see the same.
      if now - said >= hub_lib.SAY_EVERY and self._env.local_index <= 0:
        said = now
        print(
          f'waiting: rank 0 at {self._env.coordinator_address} does not '
          f'answer yet; {deadline - now:.0f} s left'
        )
      time.sleep(_RETRY)

  def _resolve(self, host, port):
    deadline = time.monotonic() + _RESOLVES_WITHIN
    while True:
      try:
        socket.getaddrinfo(host, port)
        return
      except OSError as e:
        if time.monotonic() > deadline:
          raise config_lib.ConfigError(
            f'coordinator {self._env.coordinator_address!r} does not resolve '
            f'on {socket.gethostname()}: {e.strerror or e}'
          ) from e
      time.sleep(_RETRY)

  def _wait_for_go(self):
    # Process 0 keeps the time; this one only outlives it a little.
    self._socket.settimeout(self._settings.rendezvous_timeout + 30)
    try:
      for line in self._lines:
        message = json.loads(line)
        if 'go' in message:
          return message['go']
        if 'end' in message:
          code, text = message['end'][:2]
          kind = config_lib.ConfigError if code == hub_lib.BAD_INPUT else Lost
          raise kind(text)
    except (OSError, ValueError) as e:
      if isinstance(e, config_lib.ConfigError):
        raise
    raise Lost(
      f'rank 0 at {self._env.coordinator_address} has gone before all came'
    )

  def _listen(self):
    why = 'has gone: its process was ended, or its host'
    try:
      for line in self._lines:
        message = json.loads(line)
        if 'gathered' in message:
          name, values = message['gathered']
          with self._answered:
            self._answers[name] = values
            if name == hub_lib.LEAVE:  # all may hang up from now on
              self._over = (0, '')
            self._answered.notify_all()
        elif 'ping' in message:
          # Also while the main thread starts JAX, which may take a minute.
          self._send({'pong': 0})
        elif 'end' in message:
          with self._answered:
            self._over = message['end']
            self._answered.notify_all()
          self._leave(*self._over)
          return
    except TimeoutError:
      why = (
        f'has been silent for {self._settings.heartbeat_timeout:g} s: its '
        'process is stopped, or its host dead or cut off from the network'
      )
    except (OSError, ValueError):
      pass
    if self._over is None:
      first = process_info.name({'index': 0, 'host': self.hosts[0]})
      self._leave(hub_lib.TRY_AGAIN, f'{first} {why}', False)

  def _send(self, message):
    # One that cannot be sent is missed at the other end, and acted on there.
    with self._lock, contextlib.suppress(OSError):
      self._socket.sendall(json.dumps(message).encode() + b'\n')


def end_process(code: int, text: str, stacks: bool = False) -> None:
  """Ends this process at once, with a line that says why.

  At once: the exit handlers of JAX would wait for processes that are gone.
  """
  # Of a stuck pipe or file system, the lines below may wait for ever.
  with contextlib.suppress(RuntimeError):
    timer = threading.Timer(_LAST_WORDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
  if stacks:
    print_stacks()
  print(f'error: {text}', file=sys.stderr, flush=True)
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  os._exit(code)


def print_stacks() -> None:
  """What every thread of this process is doing, on standard error."""
  names = {t.ident: t.name for t in threading.enumerate()}
  parts = []
  for ident, frame in sys._current_frames().items():
    # No lines of source: to read them from a file system that hangs, which is
    # what stops a run most often, would hang this process too.
    calls = [
      f'  File "{f.f_code.co_filename}", line {line}, in {f.f_code.co_qualname}'
      for f, line in traceback.walk_stack(frame)
    ]
    parts += [f'thread {names.get(ident, ident)}:', *reversed(calls), '']
  print('\n'.join(parts), file=sys.stderr, flush=True)
