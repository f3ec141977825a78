"""Starts main.py in processes that fork from one which has imported everything.

The imports are most of what a rank of a tiny run computes. A fork has its own number,
files and signals, as any process; it exists before JAX opens a device.
"""

import ast
import atexit
import contextlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context('forkserver')
_CONTEXT.set_forkserver_preload(
  ['anp_jax.train', 'anp_jax.runtimes.parameter_server', 'anp_jax.runtimes.model_ring']
)


class Process:
  """A process of the interface of subprocess.Popen."""

  def __init__(self, command: list[str], environment: dict[str, str]):
    """Starts it.

    Args:
      command: path of a script below the root, and its arguments.
      environment: all its environment variables.
    """
    self.stdout, output = _CONTEXT.Pipe(duplex=False)
    self._process = _CONTEXT.Process(target=_run, args=(command, environment, output))
    with contextlib.chdir(_ROOT):  # the fork server imports from there
      self._process.start()
    output.close()
    self.pid = self._process.pid
    self.kill, self.terminate = self._process.kill, self._process.terminate

  def poll(self) -> int | None:
    return self._process.exitcode

  def wait(self, timeout: float | None = None) -> int:
    self._process.join(timeout)
    if self._process.exitcode is None:
      raise subprocess.TimeoutExpired(str(self.pid), timeout)
    return self._process.exitcode

  def send_signal(self, number: signal.Signals) -> None:
    os.kill(self.pid, number)


def _run(command, environment, output):
  """Turns this fork into the process that the command would have started."""
  os.chdir(_ROOT)
  for number in (1, 2):
    os.dup2(output.fileno(), number)
  output.close()
  _configure_jax(environment)
  os.environ.clear()
  os.environ.update(environment)
  sys.argv, sys.orig_argv = list(command), [sys.executable, *command]
  try:
    runpy.run_path(command[0], run_name='__main__')
  finally:
    # A fork would leave without these.
    threading._shutdown()
    atexit._run_exitfuncs()


def _configure_jax(environment):
  """JAX has read the variables of the fork server already, and no others."""
  import jax

  for variable, text in environment.items():
    name = variable.lower()
    if name in jax.config.values and text != os.environ.get(variable):
      kind = type(jax.config.values[name])
      is_number = kind in (bool, int)
      jax.config.update(name, kind(ast.literal_eval(text)) if is_number else text)
