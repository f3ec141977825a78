"""Sees that the steps of a process go on."""

import collections
from collections.abc import Callable
import threading
import time

# Of one step's time, and of the set bound for what is no step: a compile, a
# save, an evaluation, the start.
_STEPS, _ELSE = 10, 10
_RECENT = 32
STEPPING = ('input', 'step')
# What a process does once all have met, until JAX is up in each, in this order.
JOINING = ('loading', 'joining', 'opening', 'comparing')
PAUSES = ('evaluating', 'saving')


class Watchdog:
  """Knows what this process does since when, and calls when it lasts too long.

  The bound on a step adapts: ten times the longest of the last 32, and never
  less than config.cluster.stall_timeout; all else may take ten times that, but
  until JAX is up it is config.cluster.rendezvous_timeout.
  """

  def __init__(
    self, stall_timeout: float, stalled: Callable[[dict], None],
    pulse: Callable[[dict], None] = lambda state: None, seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic, joining_timeout: float = 0.0,
  ):  # fmt: skip
    """Makes a watch that is not running yet.

    Args:
      stall_timeout: seconds; 0: it never calls.
      stalled: called once with the state, from the watch's thread.
      pulse: called with the state every `seconds`.
      seconds: between two looks.
      clock: returns seconds that never run backwards.
      joining_timeout: seconds for each of JOINING.
    """
    self._stall_timeout = stall_timeout
    self._stalled = stalled
    self._pulse = pulse
    self._seconds = seconds
    self._clock = clock
    self._joining_timeout = joining_timeout
    # One tuple, so that the watch's thread never reads half of a change.
    self._at = ('starting', 0, clock())
    self._stepped = None  # when the last step began
    self._durations = collections.deque(maxlen=_RECENT)
    self._entered = clock()  # when the present phase began
    self._pause = 0.0  # the longest save or evaluation
    self._thread = threading.Thread(target=self._run, name='watch', daemon=True)
    self._ended = threading.Event()

  def start(self) -> None:
    """Begins to look, in a thread of its own; a second call begins nothing."""
    if self._thread.ident is None:
      self._thread.start()

  def stop(self) -> None:
    """Ends the thread; `stalled` is not called after this."""
    self._ended.set()

  def heartbeat(self, phase: str, step: int = 0) -> None:
    """Says that this process begins something: 'input', 'step', 'saving' ...

    The same phase of the same step again: that it gets on with it.
    """
    now = self._clock()
    if phase == 'step':
      if self._stepped is not None:
        self._durations.append(now - self._stepped)
      self._stepped = now
    elif phase not in STEPPING:
      self._stepped = None  # a pause is no step's time
    before = self._at[:2]
    if before[0] in PAUSES:
      self._pause = max(self._pause, now - self._entered)
    if before != (phase, step):
      self._entered = now
    self._at = (phase, step, now)

  def state(self) -> dict:
    """{'phase', 'step', 'seconds'}: what, at which step, for how long."""
    phase, step, since = self._at
    return {'phase': phase, 'step': step, 'seconds': self._clock() - since}

  def timeout(self, phase: str) -> float:
    """Seconds that a phase may last."""
    if phase in JOINING:
      return self._joining_timeout
    if phase not in STEPPING:
      return _ELSE * self._stall_timeout
    longest = max(self._durations, default=0.0)
    return max(self._stall_timeout, _STEPS * longest)

  def expected_stop_seconds(self) -> float:
    """Seconds that a stop may take from the vote to the end of its save."""
    # A vote is read some steps after it was given.
    return 2 * self._pause + 8 * max(self._durations, default=0.0)

  def is_stalled(self) -> bool:
    """Whether the present phase lasts too long."""
    state = self.state()
    too_long = state['seconds'] > self.timeout(state['phase'])
    return bool(self._stall_timeout) and too_long

  def _run(self):
    while not self._ended.wait(self._seconds):
      self._pulse(self.state())
      if self.is_stalled():
        self._stalled(self.state())
        return
