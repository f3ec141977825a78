"""How a process of a run ends: errors, exit statuses and last words."""

import contextlib
import faulthandler
import os
import sys
import threading

from anp_jax import config as config_lib
from anp_jax.system import error_lines, interrupts

FAILED, BAD_INPUT = 1, 2
# Another process is lost, late or missing: sysexits' EX_TEMPFAIL. Starting
# again may help; a launcher should try.
TRY_AGAIN = 75
# Until a process ends that cannot write its last line, as its output is stuck.
_LAST_WORDS = 10.0  # seconds


class RunFailedError(RuntimeError):
  """A run that cannot go on; the message alone says what to do."""


class PeerLostError(RuntimeError):
  """Another process is missing, lost or late; starting again may help."""


# Errors that end a process with one line.
EXPECTED = (config_lib.ConfigError, PeerLostError, RunFailedError)


def exit_status(error: BaseException) -> tuple[int, str]:
  """Returns what a process ends with, and the line that says why.

  Returns:
    0 (well), 1 (failed), 2 (bad input), 75 (start it again), 130 (Ctrl-C).
  """
  if isinstance(error, KeyboardInterrupt):
    return interrupts.STATUS, 'interrupted'
  if not isinstance(error, EXPECTED):
    return FAILED, error_lines.typed_line(error)
  line = error_lines.first_line(error)
  if isinstance(error, config_lib.ConfigError):
    return BAD_INPUT, line
  return (TRY_AGAIN if isinstance(error, PeerLostError) else FAILED), line


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
  print(f'error: {text}', file=sys.stderr, flush=True)
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  os._exit(code)


def print_stacks() -> None:
  """Prints what every thread does, without source: the file system may be what hangs."""
  names = [f'{t.ident:#018x}: {t.name}' for t in threading.enumerate()]
  print('threads', *names, sep='\n', file=sys.stderr, flush=True)
  with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
    faulthandler.dump_traceback(sys.stderr)
