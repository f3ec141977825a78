"""Prefixes each line that a process writes with its rank and host."""

import contextlib
import io
import os
import subprocess
import sys

# A separate process outlives a crash of ours, and so passes on its last words,
# those of native code too. Without site it starts in 20 ms.
_PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
  signal.signal(number, signal.SIG_IGN)
prefix = sys.argv[1].encode()
out = sys.stdout.buffer
for line in sys.stdin.buffer:
  out.write(prefix + line)
  out.flush()
"""


def install(prefix: str) -> None:
  """Prefixes every line on standard output and error from now on.

  Child processes inherit the prefix. Where no process can be started, nothing
  changes.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
      number = stream.fileno()
      with open(os.dup(number), 'wb') as target:
        child = subprocess.Popen(
          [sys.executable, '-I', '-S', '-c', _PROGRAM, prefix],
          stdin=subprocess.PIPE,
          stdout=target,
          start_new_session=True,  # Ctrl-C ends us, and then it
        )
      assert child.stdin is not None
      os.dup2(child.stdin.fileno(), number)
      child.stdin.close()
      # It ends by itself; nobody waits for it.
      child.returncode = 0
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(line_buffering=True)
