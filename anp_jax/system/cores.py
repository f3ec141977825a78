"""CPU cores: their number, and how threads share them."""

import contextlib
import os


def count() -> int:
  """Returns the number of cores that this process may use; all, where it is unknown."""
  if hasattr(os, 'sched_getaffinity'):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def cpu_line(field: str) -> str:
  """Returns the first line of a field in /proc/cpuinfo, such as 'flags'; '' without one."""
  with contextlib.suppress(OSError), open('/proc/cpuinfo') as f:  # not Linux
    return next((line for line in f if line.startswith(field)), '')
  return ''


def wait_for_turn() -> None:
  """Keeps this thread, and threads it starts, from interrupting others on waking up.

  It sets Linux's scheduling policy SCHED_BATCH. Gloo, with which JAX sums over CPUs of
  several processes, needs it: its thread that receives tries to lock what the
  thread that sends holds, again and again. Where it wakes up on the same core,
  it interrupts the sender, which then cannot let go until Linux takes the core
  away from the receiver, mostly after 4 ms. Between two processes of one core a
  sum of 4 KB took 4.0 ms, with this 0.2, and one of 1.6 MB 4.0 and 0.5 ms.
  """
  if not hasattr(os, 'SCHED_BATCH'):  # not Linux
    return
  # A policy that the user chose stays; a sandbox may refuse the call.
  with contextlib.suppress(OSError):
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
      os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_getparam(0))
