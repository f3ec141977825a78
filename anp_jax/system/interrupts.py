"""Ctrl-C ends a command at once, with one line and status 130.

KeyboardInterrupt cannot promise that. Raised while a C extension is imported,
it leaves half a library, on which the interpreter crashes as it shuts down;
raised in a callback from native code or of the garbage collector, it is
dropped; and while native code compiles or waits, it is not raised at all. So no
Python code is unwound: whatever has to last is whole on disk at any moment, as
`kill -9` needs it too. In the training loop `cluster.preemption` takes over,
which saves first.

A command imports this first. Before `install`, Ctrl-C still ends in a stack
trace: so next to nothing is imported here.
"""

import atexit
from collections.abc import Callable
import os
import signal
import sys

STATUS = 130  # as a shell says of what SIGINT ended: 128 + 2
_FLUSH = 1.0  # seconds; a pipe that nobody reads would hold it for ever

_line = 'interrupted'
_callbacks: list[Callable[[], None]] = []
_status: int | None = None


def install() -> None:
  """Ends the process on Ctrl-C, from the first line of a command on."""
  # Ignored by what a shell started with `&`: that stays.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave_now)
  # Held back while `xla_flags.use_huge_pages` restarted the process.
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
  atexit.register(_end)  # the first one, so it is called last


def listen() -> None:
  """Handles Ctrl-C in a thread too, while the main thread is in native code."""
  if signal.getsignal(signal.SIGINT) is not _leave_now:
    return
  import threading

  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  threading.Thread(target=_read, args=(reader,), name='interrupts', daemon=True).start()
  # The thread has its number already.
  signal.signal(signal.SIGINT, lambda *_: None)


def set_line(line: str) -> None:
  """Sets what is printed on Ctrl-C from now on."""
  global _line
  _line = line


def before_leaving(callback: Callable[[], None]) -> None:
  """Registers a function to call on Ctrl-C, in a thread, before the line is printed.

  Args:
    callback: quick function, which may tell other processes.
  """
  _callbacks.append(callback)


def exit(status: int) -> None:
  """Ends a command with a status.

  After the last exit handler Python takes itself and large libraries to pieces,
  for up to a second, with no handler of signals left: that part is skipped.
  """
  global _status
  _status = status
  sys.exit(status)


def _end():
  if _status is not None:
    try:
      sys.stdout.flush()
      sys.stderr.flush()
    except (OSError, ValueError):
      return  # Python tells of it
    os._exit(_status)


def _read(reader):
  import threading

  is_leaving = False
  while data := os.read(reader, 64):
    for _ in range(data.count(signal.SIGINT)):
      if is_leaving:  # the second time at once
        _leave_now()
      is_leaving = True
      threading.Thread(target=_leave, name='leave', daemon=True).start()


def _leave():
  import threading

  for callback in _callbacks:
    try:
      callback()
    except Exception:  # noqa: BLE001 - whatever it is, Ctrl-C ends the process
      pass
  flush = threading.Thread(target=_flush, daemon=True)
  flush.start()
  flush.join(_FLUSH)
  _leave_now()


def _flush():
  try:
    sys.stdout.flush()
  except Exception:  # noqa: BLE001 - of a reader that has gone, say
    pass


def _leave_now(*_):
  try:
    os.write(2, f'\n{_line}\n'.encode(errors='backslashreplace'))
  except OSError:
    pass
  os._exit(STATUS)
