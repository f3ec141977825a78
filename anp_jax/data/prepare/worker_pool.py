"""The worker processes of a preparation."""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import process
import multiprocessing
import os
import signal
import threading
from typing import Any, Protocol

from anp_jax import config as config_lib
from anp_jax.system import progress as progress_lib

# What a program sets for its workers: each computes on one core. Python's
# resource tracker would warn of the semaphores that a killed command leaves.
ENVIRONMENT = {
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  'PYTHONWARNINGS': 'ignore:resource_tracker',
}
_LOG_SECONDS = 10.0
# In a worker, shared with the parent: for each task, the file that is read,
# counted from 1; 0 before and after.
_positions = []


class Task(Protocol):
  """Work on some files."""

  def paths(self) -> list[str]:
    """The path of every file."""

  def run(self, begin_file: Callable[[int], None]) -> Any:
    """Does the work in a worker process.

    Args:
      begin_file: called with the index of each file before it is read.
    """


def run(
  title: str,
  tasks: Sequence[Task],
  workers: int,
  count_damaged: Callable[[Any], int] = lambda result: 0,
) -> list:
  """Runs tasks in worker processes.

  Args:
    title: of the progress line.
    tasks: any number.
    workers: processes at most.
    count_damaged: returns how many of a task's files are damaged, by its result.

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
  counts = [len(task.paths()) for task in tasks]
  progress = progress_lib.Progress(title, sum(counts), log_seconds=_LOG_SECONDS)
  count = min(workers, len(tasks))
  with futures.ProcessPoolExecutor(count, context, _begin, (positions,)) as executor:
    task_futures = _submit(executor, tasks)
    processes = multiprocessing.active_children()
    try:
      for future in futures.as_completed(task_futures):
        progress.add(counts[task_futures[future]], count_damaged(future.result()))
      return [future.result() for future in task_futures]
    except process.BrokenProcessPool as e:
      executor.shutdown()
      files = [task.paths()[i - 1] for task, i in zip(tasks, positions) if i]
      raise config_lib.ConfigError(
        f'a worker process died while it read {" or ".join(files) or "no file"}: leave out a file '
        'that crashes the decoder (--workers=1 names it), or try fewer --workers'
      ) from e
    except BaseException:
      for child in processes:
        child.kill()
      raise
    finally:
      progress.close()


def _submit(executor, tasks):
  """Starts the workers, which ignore Ctrl-C from their first moment.

  Ctrl-C reaches all processes of a terminal; this one then ends, and the
  workers with it.
  """
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    return {executor.submit(_run, i, task): i for i, task in enumerate(tasks)}
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


def _run(number, task):
  """Does a task in a worker; every error becomes a ConfigError.

  An error of a library might not survive the way to the parent.
  """

  def begin_file(index):
    _positions[number] = index + 1

  try:
    return task.run(begin_file)
  except (OSError, config_lib.ConfigError) as e:
    raise config_lib.ConfigError(str(e)) from e
  except Exception as e:
    raise config_lib.ConfigError(f'{type(e).__name__}: {e}') from e
  finally:
    _positions[number] = 0
