"""Being told to stop: signals, and the end of the time that a run has."""

import functools
import math
import os
import signal
import socket
import sys
import threading
import time

# Votes: what a process asks of all, the largest wins.
CONTINUE, TIME_LIMIT, STOP = range(3)
VOTES = 3
REASONS = {TIME_LIMIT: 'the time limit', STOP: 'a signal'}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Slurm sends SIGTERM twice at a time limit, and `scancel` of a step may meet a
# trap of the batch script: within this many seconds they are one.
_ECHO = 5.0
# A terminal sends Ctrl-C to all processes of a launcher, which passes it on.
_PASSED_ON = 0.3  # seconds
# Of the time that is left when a run begins to stop, on top of what it needs.
_MARGIN = 15.0  # seconds
# A signal this near to the end of the time is for that end, which then alone
# bounds the stop.
_NEAR, _LAST = 300.0, 5.0  # seconds


class StopHandler:
  """Turns signals and the time limit into this process's vote.

  Signals are read by a thread, so that they are heard while the main thread is
  deep in a compile or a collective.

  Attributes:
    interrupted: whether the first signal was Ctrl-C.
  """

  def __init__(
    self, config, needed=float, environment=os.environ, clock=time.time
  ):
    """Makes it; nothing is caught yet.

    Args:
      config: the run's config.
      needed: returns the seconds that a stop takes.
      environment: variables; Slurm's end of the job is among them.
      clock: returns seconds since 1970.
    """
    self._timeout = config.cluster.stop_timeout
    self._needed = needed
    self._clock = clock
    self._ends = _end_of_time(config.time_limit, environment, clock())
    # Set by two threads, so two attributes.
    self._out_of_time = False
    self._heard = None  # when the first signal came
    self.interrupted = False
    self._before = {}
    self._pipe = None
    self._cannot = None

  def vote(self) -> int:
    """What this process asks of all: CONTINUE, TIME_LIMIT or STOP."""
    if self._heard is not None:
      return STOP
    if self._ends is not None and not self._out_of_time:
      left = self._ends - self._clock()
      if left < _MARGIN + self._needed():
        self._out_of_time = True
        _say(f'{max(left, 0):.0f} s of time are left: saving, then stopping')
    return TIME_LIMIT if self._out_of_time else CONTINUE

  def listen(self, cannot) -> 'StopHandler':
    """Catches signals from now on, in the main thread only.

    Args:
      cannot: called (text) where a stop that was asked for did not come about
        within config.cluster.stop_timeout seconds; ends all processes.
    """
    # Python lets only the main thread set handlers.
    if threading.current_thread() is not threading.main_thread():
      return self
    self._cannot = cannot
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
      end.setblocking(False)
    self._pipe = (ours, theirs, signal.set_wakeup_fd(theirs.fileno()))
    for number in SIGNALS:
      # The handler itself has nothing to do: the number is in the pipe.
      self._before[number] = signal.signal(number, lambda *_: None)
    ours.setblocking(True)
    threading.Thread(
      target=self._listen, args=(ours,), name='signals', daemon=True
    ).start()
    return self

  def close(self) -> None:
    """Gives the signals back; an echo of the one that was heard is nothing."""
    for number, handler in self._before.items():
      if self._heard is not None and number != signal.SIGINT:
        # A small run stops before Slurm has sent the second SIGTERM.
        handler = functools.partial(self._after, handler)
      signal.signal(number, handler)
    self._before = {}
    if self._pipe:
      ours, theirs, before = self._pipe
      signal.set_wakeup_fd(before)
      theirs.close()  # which ends the thread
      self._pipe = None
      self._cannot = None

  def _listen(self, pipe):
    with pipe:
      while data := pipe.recv(64):
        for number in data:
          if number in SIGNALS:
            self._hear(number)

  def _hear(self, number):
    now = time.monotonic()
    name = signal.Signals(number).name
    if self._heard is not None:
      echo = _PASSED_ON if number == signal.SIGINT else _ECHO
      if now - self._heard > echo:
        os._exit(128 + number)
      return
    self._heard = now
    self.interrupted = number == signal.SIGINT
    _say(f'{name}: saving, then stopping; once more to leave at once')
    if self._timeout:
      seconds = self._allowed()
      timer = threading.Timer(seconds, self._too_late, (name, seconds))
      timer.daemon = True
      timer.start()

  def _allowed(self):
    """Seconds that a stop may take from now on."""
    allowed = self._timeout + self._needed()
    left = self._ends - self._clock() if self._ends else math.inf
    return max(allowed, left - _LAST) if left < _NEAR else allowed

  def _after(self, handler, number, frame):
    """Handles a signal that comes when the run has stopped."""
    del frame
    if time.monotonic() - self._heard > _ECHO:
      signal.signal(number, handler)
      signal.raise_signal(number)

  def _too_late(self, name, seconds):
    cannot = self._cannot
    if cannot:
      cannot(f'could not stop within {round(seconds, 1):g} s of {name}')


def _end_of_time(minutes, environment, now):
  """Seconds since 1970 at which this process must be gone; None: never."""
  ends = []
  if minutes:
    ends.append(now + 60 * minutes)
  # Set by newer versions of Slurm, and for older ones by train.sbatch.
  text = environment.get('SLURM_JOB_END_TIME', '')
  if text.isdigit() and int(text) > now:
    ends.append(int(text))
  return min(ends, default=None)


def _say(text):
  print(f'\n{text}', file=sys.stderr, flush=True)
