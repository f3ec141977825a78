"""Watches that the steps of a process finish."""

import collections
from collections.abc import Callable
import threading
import time

from anp_jax.cluster import awake_clock

# The timeout of a step is a multiple of the longest recent step; that of a
# compile, a save, an evaluation or the start is a multiple of stall_timeout.
_STEP_FACTOR, OTHER_FACTOR = 10, 10
_RECENT = 32
STEPPING = ('input', 'step')
# Phases of a process from the rendezvous until JAX is up, in this order.
JOINING = ('loading', 'joining', 'opening', 'comparing')
# The last is to wait for what other processes save.
PAUSES = ('evaluating', 'saving', 'committing')


class Watchdog:
  """Records the phases of this process, and calls when one lasts too long.

  The timeout of a step adapts: it is ten times the longest of the last 32, and
  at least config.cluster.stall_timeout. Other phases may take ten times the
  stall timeout, and those until JAX is up config.cluster.rendezvous_timeout.
  Seconds in which the process is stopped do not count.
  """

  def __init__(
    self,
    stall_timeout: float,
    on_stall: Callable[[dict], None],
    report: Callable[[dict], None] = lambda state: None,
    period: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    joining_timeout: float = 0.0,
  ):
    """Creates a watchdog that is not running yet.

    Args:
      stall_timeout: seconds; 0: it never calls.
      on_stall: called once with the state, from the watchdog's thread.
      report: called with the state every period.
      period: seconds between two checks.
      clock: returns seconds that never run backwards.
      joining_timeout: seconds for each phase of JOINING.
    """
    self._stall_timeout = stall_timeout
    self._on_stall = on_stall
    self._report = report
    self._period = period
    self._clock = awake_clock.AwakeClock(period, clock)
    self._joining_timeout = joining_timeout
    # Phase, step, its last heartbeat and its begin. One tuple, so that the
    # watchdog's thread never reads half of a change.
    now = self._clock()
    self._latest = ('starting', 0, now, now)
    self._last_step: float | None = None  # when the last step began
    self._durations: collections.deque[float] = collections.deque(maxlen=_RECENT)
    self._longest_pause = 0.0  # a save or an evaluation
    self._thread = threading.Thread(target=self._run, name='watchdog', daemon=True)
    self._ended = threading.Event()

  def start(self) -> None:
    """Starts the thread that checks; a second call does nothing."""
    if self._thread.ident is None:
      self._clock.tick()
      self._thread.start()

  def stop(self) -> None:
    """Ends the thread; `on_stall` is not called after this."""
    self._ended.set()

  def heartbeat(self, phase: str, step: int = 0) -> None:
    """Records that a phase begins: 'input', 'step', 'saving' ...

    A repeated phase of the same step shows progress.
    """
    now = self._clock()
    if phase == 'step':
      if self._last_step is not None:
        self._durations.append(now - self._last_step)
      self._last_step = now
    elif phase not in STEPPING:
      self._last_step = None  # a pause is no step's time
    *before, _, begin = self._latest
    if before[0] in PAUSES:
      self._longest_pause = max(self._longest_pause, now - begin)
    if before != [phase, step]:
      begin = now
    self._latest = (phase, step, now, begin)

  def state(self) -> dict:
    """Returns {'phase', 'step', 'seconds'}: what, where, for how long."""
    phase, step, since, _ = self._latest
    return {'phase': phase, 'step': step, 'seconds': self._clock() - since}

  def timeout(self, phase: str) -> float:
    """Returns the seconds that a phase may last."""
    if phase in JOINING:
      return self._joining_timeout
    if phase not in STEPPING:
      return OTHER_FACTOR * self._stall_timeout
    longest = max(self._durations, default=0.0)
    return max(self._stall_timeout, _STEP_FACTOR * longest)

  def expected_stop_seconds(self, ahead: int) -> float:
    """Returns the seconds from a vote to stop to the end of its save.

    Args:
      ahead: number of batches, with a vote in each, that are made ahead.
    """
    steps = ahead + 6  # its own, one until its metrics are read, and a margin
    return 2 * self._longest_pause + steps * max(self._durations, default=0.0)

  def is_stalled(self) -> bool:
    """Returns whether the current phase lasts too long."""
    state = self.state()
    too_long = state['seconds'] > self.timeout(state['phase'])
    return bool(self._stall_timeout) and too_long

  def _run(self):
    while not self._ended.wait(self._period):
      self._clock.tick()
      self._report(self.state())
      if self.is_stalled():
        self._on_stall(self.state())
        return
