"""How a process of a run ends: errors, exit statuses and last words."""

import contextlib
import faulthandler
import os
import sys
import threading

from anp_jax import config as config_lib
from anp_jax.system import error_lines, interrupts

FAILED, BAD_INPUT = 1, 2
# Another process is lost or late: sysexits' EX_TEMPFAIL. Starting again may help; a
# launcher should try. Or it has not come in time: EX_UNAVAILABLE. Who starts this process
# alone again waits in vain once more.
TRY_AGAIN, NOBODY_CAME = 75, 69
# Until a process ends that cannot write its last line, as its output is stuck.
_LAST_WORDS = 10.0  # seconds


class RunFailedError(RuntimeError):
  """A run that cannot go on; the message alone says what to do."""


class PeerLostError(RuntimeError):
  """Another process is missing, lost or late.

  Attributes:
    status: exit status of this process.
  """

  def __init__(self, text: str, status: int = TRY_AGAIN):
    super().__init__(text)
    self.status = status


# Errors that end a process with one line.
EXPECTED = (config_lib.ConfigError, PeerLostError, RunFailedError)


def exit_status(error: BaseException) -> tuple[int, str]:
  """Returns what a process ends with, and the line that says why.

  Returns:
    1 (failed), 2 (bad input), 69 (nobody came), 75 (start it again), 130 (Ctrl-C).
  """
  if isinstance(error, KeyboardInterrupt):
    return interrupts.STATUS, 'interrupted'
  if not isinstance(error, EXPECTED):
    return FAILED, error_lines.typed_line(error)
  is_input = isinstance(error, config_lib.ConfigError)
  return BAD_INPUT if is_input else getattr(error, 'status', FAILED), error_lines.first_line(error)


def end_process(code: int, text: str, stacks: bool = False) -> None:
  """Ends this process at once, with a line that says why.

  The exit handlers of JAX would wait for processes that are gone.

  Args:
    code: exit status.
    text: reason.
    stacks: whether to print what every thread does, too.
  """
  # A stuck pipe or file system may hold the lines below up for ever.
  with contextlib.suppress(RuntimeError):
    timer = threading.Timer(_LAST_WORDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
  if stacks:
    print_stacks()
  print(f'error: {text}' if code else text, file=sys.stderr, flush=True)
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  os._exit(code)


def print_stacks() -> None:
  """Prints what every thread does, without source: the file system may be what hangs."""
  names = [f'{t.ident:#018x}: {t.name}' for t in threading.enumerate()]
  print('threads', *names, sep='\n', file=sys.stderr, flush=True)
  with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
    faulthandler.dump_traceback(sys.stderr)
