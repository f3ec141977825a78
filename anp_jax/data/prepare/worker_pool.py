"""Tasks done by plain Python processes, which end with the one that asks.

Not `multiprocessing`: its spawned workers would first import the parent's
`__main__` with all the libraries that it uses, and outlive a killed parent.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading

from anp_jax import config as config_lib

_ROOT = str(pathlib.Path(__file__).resolve().parents[3])
_SECONDS = 0.5  # between two looks at the clock


class Pool:
  """Workers, each a process that is started for its first task and then kept.

  Args:
    module: to run, whose main calls `serve`.
    count: of processes at most.
  """

  def __init__(self, module: str, count: int):
    self._workers = [_Worker(module) for _ in range(count)]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for worker in self._workers:
      worker.close()

  def run(
    self, tasks: Sequence[int], make: Callable[[int], dict]
  ) -> Iterator[dict | None]:
    """Has tasks done, at most one at a time by each worker.

    Args:
      tasks: numbers of them.
      make: gives the task of a number, when it is its turn.

    Yields:
      The replies as they come; None now and then while there is none.

    Raises:
      ConfigError: with the text of what a worker raised, or how one died.
    """
    replies = queue.SimpleQueue()
    waiting, lock = iter(tasks), threading.Lock()

    def feed(worker):
      while True:
        with lock:
          number = next(waiting, None)
        if number is None:
          return
        try:
          replies.put(worker.ask(make(number)))
        except Exception as e:
          replies.put(e)
          return

    for worker in self._workers[: len(tasks)]:
      threading.Thread(target=feed, args=(worker,), daemon=True).start()
    left = len(tasks)
    while left:
      try:
        reply = replies.get(timeout=_SECONDS)
      except queue.Empty:
        yield None
        continue
      if isinstance(reply, Exception):
        raise reply
      left -= 1
      yield reply


def serve(handlers: dict[str, Callable[[dict], dict]]) -> None:
  """The main function of a worker: answers tasks until its parent is gone.

  A task is a line of JSON on standard input; its 'do' names the handler.
  """
  # What a library prints must not get between the replies.
  replies = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  tasks = queue.SimpleQueue()

  def listen():
    for line in sys.stdin.buffer:
      tasks.put(line)
    os._exit(0)  # at once, also from the middle of a task

  threading.Thread(target=listen, daemon=True).start()
  while True:
    task = json.loads(tasks.get())
    try:
      reply = handlers[task['do']](task)
    except Exception as e:
      known = isinstance(e, (OSError, config_lib.ConfigError))
      kind = '' if known else f'{type(e).__name__}: '
      reply = {'error': f'{kind}{e}'}
    replies.write(json.dumps(reply) + '\n')
    replies.flush()


class _Worker:
  """One process and the pipes to it."""

  def __init__(self, module):
    self._module = module
    self._process = None
    self._closed = False
    self._lock = threading.Lock()

  def ask(self, task):
    process = self._start()
    try:
      process.stdin.write(json.dumps(task).encode() + b'\n')
      process.stdin.flush()
      line = process.stdout.readline()
    except OSError:
      line = b''
    if not line:
      code = process.wait()
      how = f'by signal {-code}' if code < 0 else f'with status {code}'
      raise config_lib.ConfigError(
        f'a worker process ended {how} (out of memory?) while it did: '
        f'{task.get("what", task["do"])}'
      )
    reply = json.loads(line)
    if 'error' in reply:
      raise config_lib.ConfigError(reply['error'])
    return reply

  def close(self):
    with self._lock:
      self._closed = True
      if self._process:
        self._process.kill()
        self._process.wait()

  def _start(self):
    with self._lock:
      if self._closed:
        raise config_lib.ConfigError('closed')
      if self._process is None:
        path = os.environ.get('PYTHONPATH')
        environment = {
          'PYTHONPATH': f'{_ROOT}{os.pathsep}{path}' if path else _ROOT,
          'OMP_NUM_THREADS': '1',
          'OPENBLAS_NUM_THREADS': '1',
        }
        # `-P`: modules of the folder that we are in hide none of Python's. A
        # session of its own: Ctrl-C is for the parent, which then ends it.
        self._process = subprocess.Popen(
          [sys.executable, '-P', '-m', self._module],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          env=os.environ | environment,
          start_new_session=True,
        )
      return self._process
