"""Worker processes for the tasks of a preparation.

A worker that dies costs its task alone, which is done again. Each worker has an
executor of its own: a ProcessPoolExecutor that loses one of several processes
fails all of its tasks and does not say which of them was at fault.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import process
import contextlib
import ctypes
import dataclasses
import multiprocessing
import os
import signal
import threading

from anp_jax import config as config_lib
from anp_jax.system import progress as progress_lib

_SECONDS = 0.5  # between two looks at the clock
_LOG_SECONDS = 10.0
_ENVIRONMENT = {
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  # Of a killed command it removes the semaphores, and would warn of them.
  'PYTHONWARNINGS': 'ignore:resource_tracker',
}
# In a worker: the index of the file that its task is at, which the parent reads
# when the worker has died.
_position = ctypes.c_longlong()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
  """Work on some files that leaves one file.

  What it leaves does not depend on the worker that does it.

  Attributes:
    root: folder that `files` are relative to.
    files: names; `run` calls `begin_file` before each.
    out: path of a file that is there, and whole, once the task is done.
    suspect: the file at which a worker died that did this task; '' for none.
  """

  root: str
  files: Sequence[str]
  out: str
  suspect: str = ''

  def run(self) -> int:
    """Does the work; returns how many of the files are damaged."""
    raise NotImplementedError

  def after_crash(self, file: str, exit_code: int) -> 'Task':
    """Returns the task to do after a worker died at one of the files.

    Args:
      file: one of `files`.
      exit_code: of the worker; -n if it died by signal n.

    Raises:
      ConfigError: the second time.
    """
    if file == self.suspect:
      raise config_lib.ConfigError(
        f'{os.path.join(self.root, file)} ended two worker processes, the last '
        f'{_cause(exit_code)}: try fewer --workers'
      )
    return dataclasses.replace(self, suspect=file)


def begin_file(index: int) -> None:
  """Records which file of its task this worker is at."""
  _position.value = index


class Pool:
  """Worker processes, each started for its first task and then kept.

  Args:
    count: of processes at most.
  """

  def __init__(self, count: int):
    self._workers = [_Worker() for _ in range(count)]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for worker in self._workers:
      worker.close()

  def make(self, title: str, tasks: Sequence[Task]) -> None:
    """Does the tasks whose files are not there yet.

    Args:
      title: of the progress line.
      tasks: any number.

    Raises:
      ConfigError: if a task fails.
    """
    existing = _existing(tasks)
    self._run(title, tasks, [t for t in tasks if t.out not in existing])

  def verify(self, title: str, tasks: Sequence[Task]) -> None:
    """Does the tasks whose files are there, from an earlier command; `make`."""
    existing = _existing(tasks)
    tasks = [t for t in tasks if t.out in existing]
    self._run(title, tasks, tasks)

  def _run(self, title, tasks, remaining):
    if not remaining:
      return
    total = sum(len(task.files) for task in tasks)
    left = sum(len(task.files) for task in remaining)
    progress = progress_lib.Progress(title, total, total - left, log_seconds=_LOG_SECONDS)
    try:
      for task, damaged in self._results(remaining, progress.line.note):
        progress.add(len(task.files) if task else 0, damaged)
    finally:
      progress.close()

  def _results(
    self, tasks: Iterable[Task], note: Callable[[str], None]
  ) -> Iterator[tuple[Task | None, int]]:
    """Yields tasks with their results; (None, 0) while there is none."""
    waiting, retries = iter(tasks), []
    idle, running = list(self._workers), {}
    while True:
      while idle:
        task = retries.pop() if retries else next(waiting, None)
        if task is None:
          break
        worker = idle.pop()
        running[worker.submit(task)] = worker, task
      if not running:
        return
      done, _ = futures.wait(running, _SECONDS, futures.FIRST_COMPLETED)
      if not done:
        yield None, 0
      for future in done:
        worker, task = running.pop(future)
        idle.append(worker)
        try:
          damaged = future.result()
        except process.BrokenProcessPool:
          retries.append(_after_crash(worker, task, note))
        else:
          yield task, damaged


class _Worker:
  """One process in an executor, and the pipe by which it sees its end."""

  def __init__(self):
    self._executor = None

  def submit(self, task: Task) -> futures.Future:
    """Starts a task, and the process if there is none."""
    if self._executor:
      self._position.value = 0
      try:
        return self._executor.submit(_do, task)
      except process.BrokenProcessPool:  # it died while it was idle
        self.close()
    with _environment():
      # Forked workers would share the locks of this process's threads.
      context = multiprocessing.get_context('spawn')
      reader, self._lifeline = context.Pipe(duplex=False)
      self._position = context.RawValue(ctypes.c_longlong, 0)
      self._executor = futures.ProcessPoolExecutor(1, context, _begin, (reader, self._position))
      siblings = multiprocessing.active_children()
      with _interrupts_blocked():
        future = self._executor.submit(_do, task)
      (self._process,) = set(multiprocessing.active_children()) - {*siblings}
      reader.close()
    return future

  def position(self) -> int:
    """The index of the file that the process is at."""
    return self._position.value

  def close(self) -> int | None:
    """Ends the process, if there is one; returns its exit code."""
    if not self._executor:
      return None
    self._process.kill()
    self._lifeline.close()
    self._executor.shutdown(cancel_futures=True)
    self._executor = None
    return self._process.exitcode


def _begin(reader, position):
  """Prepares a worker process."""
  global _position
  _position = position
  os.dup2(2, 1)  # where results go, no library prints

  def watch():
    with contextlib.suppress(EOFError):
      reader.recv()
    os._exit(0)  # at once, also from the middle of a task

  threading.Thread(target=watch, daemon=True).start()


def _do(task):
  """Does a task in a worker; every error becomes a ConfigError.

  An error of a library might not survive the way to the parent, which would
  then take the worker for dead.
  """
  try:
    return task.run()
  except (OSError, config_lib.ConfigError) as e:
    raise config_lib.ConfigError(str(e)) from e
  except Exception as e:
    raise config_lib.ConfigError(f'{type(e).__name__}: {e}') from e


@contextlib.contextmanager
def _environment():
  """Sets the environment that workers inherit."""
  before = {name: os.environ.get(name) for name in _ENVIRONMENT}
  os.environ.update(_ENVIRONMENT)
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value


@contextlib.contextmanager
def _interrupts_blocked():
  """Has a process that is started here ignore Ctrl-C, from its first moment.

  Ctrl-C reaches all processes of a terminal; this one then ends the workers.
  Not around the start of multiprocessing's resource tracker, which unblocks.
  """
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_crash(worker, task, note):
  """The task to do after its worker died."""
  file, exit_code = task.files[worker.position()], worker.close()
  retry = task.after_crash(file, exit_code)
  note(
    f'a worker process ended {_cause(exit_code)} at '
    f'{os.path.join(task.root, file)}: its files are taken again'
  )
  return retry


def _existing(tasks):
  """The files of tasks that are there; makes and lists each folder once."""
  paths = set()
  for folder in {os.path.dirname(task.out) for task in tasks}:
    os.makedirs(folder, exist_ok=True)
    paths.update(os.path.join(folder, name) for name in os.listdir(folder))
  return paths


def _cause(exit_code):
  if exit_code >= 0:
    return f'with status {exit_code}'
  hint = ' (out of memory?)' if -exit_code == signal.SIGKILL else ''
  return f'by signal {-exit_code}{hint}'
