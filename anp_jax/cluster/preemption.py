"""Preemption: signals, and the end of the time that a run has."""

from collections.abc import Callable, Mapping
import functools
import math
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import ml_collections

from anp_jax.cluster import generation

# Votes of a process; the largest wins.
CONTINUE, RESTART, TIME_LIMIT, STOP = range(4)
VOTES = 4
REASONS = {TIME_LIMIT: 'the time limit', STOP: 'a signal'}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Slurm sends SIGTERM twice at a time limit, and `scancel` of a step may meet a
# trap of the batch script: within this many seconds they are one.
_ECHO = 5.0
# A terminal sends Ctrl-C to all processes of a launcher, which passes it on.
_PASSED_ON = 0.3  # seconds
# A run begins to stop this long before the end, on top of what a stop takes.
_MARGIN = 15.0  # seconds
# A signal this near to the end of the time is for that end, which then alone
# bounds the stop.
_NEAR, _LAST = 300.0, 5.0  # seconds


class StopHandler:
  """Turns signals and the time limit into this process's vote.

  Signals are read by a thread, so that they are received while the main thread
  is deep in a compile or a collective.

  Attributes:
    interrupted: whether the first signal was Ctrl-C.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    stop_seconds: Callable[[], float] = float,
    tell: Callable[[], None] | None = None,
    environment: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.time,
  ):
    """Creates a handler that catches nothing yet.

    Args:
      config: the run's config.
      stop_seconds: returns the seconds that a stop takes.
      tell: called at SIGTERM, which may be for this process alone; it then votes
        only once it is ordered to. None: every signal stops the run.
      environment: variables; Slurm's end of the job is among them.
      clock: returns seconds since 1970.
    """
    self._timeout = config.cluster.stop_timeout
    self._stop_seconds = stop_seconds
    self._clock = clock
    began_at = generation.current(environment).started_at or clock()
    self._end = _end_of_time(config.time_limit, environment, began_at, clock())
    # Set by two threads, so two attributes.
    self._out_of_time = False
    self._signal_time: float | None = None  # of the first signal
    self._tell = tell
    # Each is set by one thread.
    self._votes = {'signal': CONTINUE, 'order': CONTINUE}
    self.interrupted = False
    self._old_handlers: dict[int, Any] = {}
    self._pipe: tuple | None = None
    self._on_timeout: Callable[[str], None] | None = None

  def vote(self) -> int:
    """Returns the vote of this process: CONTINUE, RESTART, TIME_LIMIT or STOP."""
    vote = max(self._votes.values())
    if vote == STOP:
      return STOP
    if self._end is not None and not self._out_of_time:
      left = self._end - self._clock()
      if left < _MARGIN + self._stop_seconds():
        self._out_of_time = True
        _say(f'{max(left, 0):.0f} s of time are left: saving, then stopping')
    return TIME_LIMIT if self._out_of_time else vote

  def order(self, order: str) -> None:
    """Votes as the coordinator orders: to 'stop' the run, or to 'pause' for a restart."""
    vote = {'stop': STOP, 'pause': RESTART}[order]
    self._votes['order'] = max(self._votes['order'], vote)

  def listen(self, on_timeout: Callable[[str], None]) -> None:
    """Catches signals from now on, in the main thread only.

    Args:
      on_timeout: called with a line where a stop did not come about within
        config.cluster.stop_timeout seconds; ends all processes.
    """
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
      return
    self._on_timeout = on_timeout
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    self._pipe = (writer, signal.set_wakeup_fd(writer.fileno()))
    for number in SIGNALS:
      # The handler itself has nothing to do: the number is in the pipe.
      self._old_handlers[number] = signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, generation.HELD_BACK)
    threading.Thread(target=self._listen, args=(reader,), name='signals', daemon=True).start()

  def close(self) -> None:
    """Restores the old handlers; an echo of the first signal is ignored."""
    for number, handler in self._old_handlers.items():
      if self._signal_time is not None and number != signal.SIGINT:
        # A small run stops before Slurm has sent the second SIGTERM.
        handler = functools.partial(self._handle_late, handler)
      signal.signal(number, handler)
    self._old_handlers = {}
    if self._pipe:
      writer, old_descriptor = self._pipe
      signal.set_wakeup_fd(old_descriptor)
      writer.close()  # which ends the thread
      self._pipe = None
      self._on_timeout = None

  def _listen(self, pipe):
    with pipe:
      while data := pipe.recv(64):
        for number in data:
          if number in SIGNALS:
            self._receive(number)

  def _receive(self, number):
    now = time.monotonic()
    name = signal.Signals(number).name
    if self._signal_time is not None:
      echo = _PASSED_ON if number == signal.SIGINT else _ECHO
      if now - self._signal_time > echo:
        os._exit(128 + number)
      return
    self._signal_time = now
    self.interrupted = number == signal.SIGINT
    if self._tell and number == signal.SIGTERM:
      self._tell()
      _say(f'{name}: stopping, or leaving the run to the others; once more to leave at once')
    else:
      self._votes['signal'] = STOP
      _say(f'{name}: saving, then stopping; once more to leave at once')
    if self._timeout:
      seconds = self._max_stop_seconds()
      timer = threading.Timer(seconds, self._too_late, (name, seconds))
      timer.daemon = True
      timer.start()

  def _max_stop_seconds(self):
    """Seconds that a stop may take from now on."""
    seconds = self._timeout + self._stop_seconds()
    left = self._end - self._clock() if self._end else math.inf
    return max(seconds, left - _LAST) if left < _NEAR else seconds

  def _handle_late(self, handler, number, frame):
    """Handles a signal that arrives after the run has stopped."""
    del frame
    if time.monotonic() - self._signal_time > _ECHO:
      signal.signal(number, handler)
      signal.raise_signal(number)

  def _too_late(self, name, seconds):
    on_timeout = self._on_timeout
    if on_timeout:
      on_timeout(f'could not stop within {round(seconds, 1):g} s of {name}')


def _end_of_time(minutes, environment, began_at, now):
  """Seconds since 1970 at which this process must be gone; None: never."""
  ends = []
  if minutes:
    ends.append(began_at + 60 * minutes)
  # Set by newer versions of Slurm, and for older ones by train.sbatch.
  text = environment.get('SLURM_JOB_END_TIME', '')
  if text.isdigit() and int(text) > now:
    ends.append(int(text))
  return min(ends, default=None)


def _say(text):
  print(f'\n{text}', file=sys.stderr, flush=True)
