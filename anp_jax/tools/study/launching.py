"""Processes of this machine that are one run, a core each."""

from collections.abc import Sequence
import os
import shutil
import socket
import subprocess
import sys

TRAIN = ('-m', 'anp_jax')  # main.py, which may not be here
_INTERFACE = '/sys/class/net/lo/statistics/tx_bytes'


class RunFailedError(Exception):
  """A run of a study did not come to its end."""


def launch(
  program: Sequence[str], folder: str, count: int, arguments: list[str], cores=()
) -> float:
  """Runs a program as processes that find each other, and waits for all.

  Args:
    program: after the interpreter: a file, or '-m' and a module; it takes
      --coordinator, --num_processes and --process_id.
    folder: of the run, where each process's output goes.
    count: of processes.
    arguments: for each of them.
    cores: of this machine, dealt out in turn; () for no binding.

  Returns:
    Megabytes (1e6) that the loopback interface has sent meanwhile.

  Raises:
    RunFailedError: naming the folder and the first process's error.
  """
  os.makedirs(folder, exist_ok=True)
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  before = _sent()
  children = []
  logs = [os.path.join(folder, f'rank{i}.log') for i in range(count)]
  try:
    for i in range(count):
      command = [
        sys.executable,
        *program,
        f'--coordinator=127.0.0.1:{port}',
        f'--num_processes={count}',
        f'--process_id={i}',
        *arguments,
      ]
      if cores and shutil.which('taskset'):
        command = ['taskset', '-c', str(cores[i % len(cores)]), *command]
      with open(logs[i], 'w') as log:
        children.append(
          subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'},
          )
        )
    codes = [child.wait() for child in children]
  finally:
    for child in children:
      if child.poll() is None:
        child.terminate()
        child.wait()
  if any(codes):
    bad = next(i for i, code in enumerate(codes) if code)
    with open(logs[bad], errors='replace') as f:
      lines = [line.strip() for line in f if 'error: ' in line]
    raise RunFailedError(f'{folder}: {(lines or ["see " + logs[bad]])[0]}')
  return (_sent() - before) / 1e6


def _sent():
  """Bytes that this machine's loopback interface has sent."""
  try:
    with open(_INTERFACE) as f:
      return int(f.read())
  except OSError:  # not of Linux
    return 0
