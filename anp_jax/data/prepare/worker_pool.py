"""The worker processes of a preparation."""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import process
import multiprocessing
import os
import signal
import threading
from typing import Any

from anp_jax import config as config_lib
from anp_jax.system import progress as progress_lib

# What a program sets for its workers: each computes on one core. Python's
# resource tracker would warn of the semaphores that a killed command leaves.
ENVIRONMENT = {'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore:resource_tracker'}
_LOG_SECONDS = 10.0
# In a worker, shared with the parent: for each task, the file that is read,
# counted from 1; 0 before and after.
_positions: Any = []


def run(
  title: str,
  function: Callable,
  tasks: Sequence[tuple],
  workers: int,
  damaged: Callable[[Any], int] | None = None,
) -> list:
  """Runs a function in worker processes.

  Args:
    title: word of the progress line.
    function: called with `begin_file` and the arguments of a task; calls
      `begin_file` with the index of each file before it reads it.
    tasks: arguments, first an object whose `paths` returns the files' paths.
    workers: processes at most.
    damaged: counts a task's damaged files, by its result; None: not counted.

  Returns:
    The results, in the order of the tasks.

  Raises:
    ConfigError: if a task fails, or a worker dies.
  """
  if not tasks:
    return []
  # Forked workers would share the locks of this process's threads.
  context = multiprocessing.get_context('spawn')
  positions = context.RawArray('q', len(tasks))
  counts = [len(files.paths()) for files, *_ in tasks]
  progress = progress_lib.Progress(title, sum(counts), log_seconds=_LOG_SECONDS)
  workers = min(workers, len(tasks))
  with futures.ProcessPoolExecutor(workers, context, _begin, (positions,)) as executor:
    siblings = multiprocessing.active_children()
    task_futures = _submit(executor, function, tasks)
    processes = {*multiprocessing.active_children()} - {*siblings}
    try:
      for future in futures.as_completed(task_futures):
        result = future.result()
        progress.add(counts[task_futures[future]], damaged(result) if damaged else 0)
      return [future.result() for future in task_futures]
    except process.BrokenProcessPool as e:
      executor.shutdown()
      paths = [task[0].paths()[i - 1] for task, i in zip(tasks, positions) if i]
      raise config_lib.ConfigError(
        f'a worker process died while it read {" or ".join(paths) or "no file"}: leave out a file '
        'that crashes the decoder (--workers=1 names it), or try fewer --workers'
      ) from e
    finally:
      for child in processes:  # also in the middle of a task, if another one failed
        child.kill()
      progress.close()


def _submit(executor, function, tasks):
  """Starts the workers, which ignore Ctrl-C from their first moment.

  Ctrl-C reaches all processes of a terminal; this one then ends, and the
  workers with it.
  """
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    return {executor.submit(_run, i, function, task): i for i, task in enumerate(tasks)}
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin(positions):
  """Prepares a worker process."""
  global _positions
  _positions = positions
  os.dup2(2, 1)  # where results go, no library prints

  def end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(0)  # at once, also from the middle of a task

  threading.Thread(target=end_with_parent, daemon=True).start()


def _run(number, function, task):
  """Does a task in a worker; every error becomes a ConfigError.

  An error of a library might not survive the way to the parent.
  """

  def begin_file(index):
    _positions[number] = index + 1

  try:
    return function(begin_file, *task)
  except (OSError, config_lib.ConfigError) as e:
    raise config_lib.ConfigError(str(e)) from e
  except Exception as e:
    path = task[0].paths()[_positions[number] - 1]
    raise config_lib.ConfigError(f'{path}: {type(e).__name__}: {e}') from e
  finally:
    _positions[number] = 0
