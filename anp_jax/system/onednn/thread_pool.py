"""Computes pieces of an operation by the threads of XLA's pool.

XLA's foreign-function interface lets a call give tasks to the pool, without a
promise that they run at once, or before the call returns. So a task only helps:
whoever is free takes the next piece, the caller too, which waits for no piece
but those that others have begun.
"""

import atexit
from collections.abc import Sequence
import contextlib
import ctypes
import itertools
import os
import threading
import time
from typing import Any

from anp_jax.system.onednn import pieces

# Places in the structures of c_api.h, bytes.
_CONTEXT = 24  # in the call frame
_DESTROY_ERROR, _SCHEDULE = 64, 136  # in the table of functions
_EXIT_SECONDS = 5.0

# A list's pop and append, and a dictionary's, are atomic in Python.
# Of pieces, and what pieces of a call share, which may be much larger.
_idle: list[pieces.Scratch] = []
_idle_shared: list[pieces.Scratch] = []
_tasks: dict[int, '_Phase'] = {}
_numbers = itertools.count(1)
_thread = threading.local()
_ending = threading.Event()


class _ScheduleArguments(ctypes.Structure):
  """XLA_FFI_ThreadPool_Schedule_Args."""

  _fields_ = [
    ('struct_size', ctypes.c_size_t),
    ('extension', ctypes.c_void_p),
    ('context', ctypes.c_void_p),
    ('task', ctypes.c_void_p),
    ('data', ctypes.c_void_p),
  ]


class _DestroyArguments(ctypes.Structure):
  """XLA_FFI_Error_Destroy_Args."""

  _fields_ = [
    ('struct_size', ctypes.c_size_t),
    ('extension', ctypes.c_void_p),
    ('error', ctypes.c_void_p),
  ]


# With Python's lock: they return soon. A full pool runs the task at once, in
# the calling thread.
_schedule_type = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ScheduleArguments))
_destroy_type = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_DestroyArguments))


def pointer(address: int) -> Any:
  """Returns the address that lies at an address."""
  return ctypes.c_void_p.from_address(address).value


class Pool:
  """The thread pool of a call.

  Args:
    frame: address of the call frame.
    functions: address of XLA's table of functions.
  """

  def __init__(self, frame: int, functions: int):
    self._context = pointer(frame + _CONTEXT)
    self._functions = functions

  def help(self, phase: '_Phase', count: int) -> None:
    """Asks `count` threads of the pool to work for a phase."""
    size = ctypes.c_size_t.from_address(self._functions).value
    if count < 1 or size <= _SCHEDULE or _ending.is_set():
      return  # an older XLA ends before this function
    schedule = _schedule_type(pointer(self._functions + _SCHEDULE))
    for number in itertools.islice(_numbers, count):
      _tasks[number] = phase
      error = schedule(
        _ScheduleArguments(
          ctypes.sizeof(_ScheduleArguments),
          None,
          self._context,
          ctypes.cast(_task, ctypes.c_void_p),
          number,
        )
      )
      if error:  # a device without a pool: the caller does it all
        del _tasks[number]
        _destroy_type(pointer(self._functions + _DESTROY_ERROR))(
          _DestroyArguments(ctypes.sizeof(_DestroyArguments), None, error)
        )
        return


def run(operation: pieces.Operation, addresses: Sequence[int], pool: Pool) -> None:
  """Computes an operation with the threads of a pool.

  Args:
    operation: operation of the library.
    addresses: addresses of its arguments and results; see `pieces.Operation.run`.
    pool: thread pool of the calling thread.

  Raises:
    OneDnnError: if oneDNN fails.
  """
  api = operation.api
  with _memory(api, _idle_shared) as shared, _memory(api, _idle) as memory:
    places = operation.addresses(shared, addresses)
    for parts in operation.phases:
      if len(parts) == 1:  # without what it takes to share
        api.use_threads(operation.threads)
        parts[0].run(memory, places)
        continue
      phase = _Phase(operation, parts, places)
      try:
        pool.help(phase, min(len(parts), operation.at_once) - 1)
        phase.work(memory)
      finally:
        phase.wait()


class _Phase:
  """Pieces that are computed at once, by whoever is free."""

  def __init__(self, operation, parts, addresses):
    self._operation, self._addresses = operation, addresses
    self._waiting = list(reversed(parts))
    self._last = len(parts)
    self._done = itertools.count(1)  # next() is atomic in Python
    self._all_done = threading.Lock()
    self._all_done.acquire()
    self._error = None

  def help(self):
    """Computes pieces, if there are any, in a thread that was free."""
    if self._waiting:
      with _memory(self._operation.api, _idle) as memory:
        self.work(memory)

  def work(self, memory):
    """Computes pieces for as long as there are any that nobody has begun."""
    self._operation.api.use_threads(self._operation.threads)
    while self._waiting:
      self._take(lambda piece: piece.run(memory, self._addresses))

  def wait(self):
    """Waits for the pieces that others have begun; none is begun any more.

    Raises:
      OneDnnError: if a piece did not succeed.
    """
    while self._waiting:  # after an error
      self._take(lambda _: None)
    interruption = None
    while True:
      # Others write to the call's memory until they are done, whatever signal
      # may come.
      try:
        self._all_done.acquire()
        break
      except BaseException as e:  # noqa: BLE001 - raised below
        interruption = e
    error = interruption or self._error
    if error is not None:
      raise error

  def _take(self, function):
    """Does something with the next piece, and counts it as done."""
    try:
      piece = self._waiting.pop()
    except IndexError:  # another thread was quicker
      return
    try:
      function(piece)
    except BaseException as e:  # noqa: BLE001 - the caller raises it
      self._error = e
    if next(self._done) == self._last:
      self._all_done.release()


def prepare_thread() -> None:
  """Sets up the calling thread, which is one of XLA's, once.

  Python would make and remove its own record of it at every call, with a page
  mapped and unmapped each time (20 us): so one more use of it is counted here
  that never ends.
  """
  if not hasattr(_thread, 'is_known'):
    ctypes.pythonapi.PyGILState_Ensure()
    _thread.is_known = True


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _task(number):
  try:
    prepare_thread()
    _tasks[number].help()
  finally:
    del _tasks[number]


@atexit.register
def _finish_tasks():
  # A task that runs while Python ends would end the program with a fault.
  _ending.set()
  end = time.monotonic() + _EXIT_SECONDS
  while _tasks and time.monotonic() < end:
    time.sleep(1e-3)


# A child has none of the pool's threads.
os.register_at_fork(after_in_child=_tasks.clear)


@contextlib.contextmanager
def _memory(api, idle):
  """Scratch memory that no other call uses."""
  try:
    memory = idle.pop()
  except IndexError:
    memory = pieces.Scratch(api)
  try:
    yield memory
  finally:
    idle.append(memory)
