"""Ctrl-C ends a command at once, with one line and status 130.

KeyboardInterrupt cannot promise that. Raised while a C extension is imported,
it leaves half a library, on which the interpreter crashes as it shuts down;
raised in a callback from native code or of the garbage collector, it is
dropped; and while native code compiles or waits, it is not raised at all. So no
Python code is unwound: whatever has to last is whole on disk at any moment, as
`kill -9` needs it too. In the training loop `cluster.stopping` takes over,
which saves first.

Little of the standard library: a command imports this before all else.
"""

import atexit
from collections.abc import Callable
import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

STATUS = 130  # as a shell says of what SIGINT ended: 128 + 2
_FLUSH = 1.0  # seconds; a pipe that nobody reads would hold it for ever

_line = 'interrupted'
_callbacks = []
_status = None


def watch() -> None:
  """Ends the process on Ctrl-C, from the first line of a command on."""
  # Ignored by what a shell started with `&`: that stays.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave_now)
  # Held back while `xla_flags.use_huge_pages` restarted the process.
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
  atexit.register(_end)  # the first one, so it is called last


def listen() -> None:
  """Lets a thread hear Ctrl-C too, while the main thread is in native code."""
  if signal.getsignal(signal.SIGINT) is not _leave_now:
    return
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
  threading.Thread(
    target=_read, args=(reader,), name='interrupts', daemon=True
  ).start()
  # The thread has its number already.
  signal.signal(signal.SIGINT, lambda *_: None)


def set_line(line: str) -> None:
  """Sets what is printed on Ctrl-C from now on."""
  global _line
  _line = line


def before_leaving(callback: Callable[[], None]) -> None:
  """Has a function called on Ctrl-C, in a thread, before the line is printed.

  Args:
    callback: tells other processes, say; must not take long.
  """
  _callbacks.append(callback)


def exit(status: int) -> NoReturn:
  """Ends a command that is done.

  After the last exit handler Python takes itself and large libraries to pieces,
  for up to a second, with no handler of signals left: that part is skipped.
  """
  global _status
  _status = status
  sys.exit(status)


def _end():
  if _status is not None:
    # What cannot be written, Python tells of.
    with contextlib.suppress(OSError, ValueError):
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(_status)


def _read(reader):
  is_leaving = False
  while data := os.read(reader, 64):
    for _ in range(data.count(signal.SIGINT)):
      if is_leaving:  # the second time at once
        _leave_now()
      is_leaving = True
      threading.Thread(target=_leave, name='leave', daemon=True).start()


def _leave():
  for callback in _callbacks:
    with contextlib.suppress(Exception):
      callback()
  flush = threading.Thread(target=_flush, daemon=True)
  flush.start()
  flush.join(_FLUSH)
  _leave_now()


def _flush():
  with contextlib.suppress(Exception):
    sys.stdout.flush()


def _leave_now(*_):
  with contextlib.suppress(OSError):
    os.write(2, f'\n{_line}\n'.encode(errors='backslashreplace'))
  os._exit(STATUS)
