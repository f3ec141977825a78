"""The work of a preparation in parts: files that any process may have made.

Part i is made by process i % count, on one of its workers. What a part holds
does not depend on who makes it, so a run that was cut off goes on with any
number of processes and workers.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import sys
import time
import uuid

from anp_jax import config as config_lib
from anp_jax.data.prepare import worker_pool

_LOG_SECONDS = 10.0
_POLL_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Share:
  """Which part of the work is whose.

  Attributes:
    process_id: of this process, from 0 on.
    num_processes: that were started with the same command.
    workers: processes that each of them uses.
  """

  process_id: int
  num_processes: int
  workers: int

  @property
  def prefix(self) -> str:
    """What messages of this process begin with."""
    if self.num_processes == 1:
      return ''
    return f'process {self.process_id} of {self.num_processes}: '


@dataclasses.dataclass(frozen=True)
class Part:
  """One part.

  Attributes:
    out: the file that says, by being there, that the part is made.
    files: how many files it is the work on.
    make: gives the task for a worker.
  """

  out: str
  files: int
  make: Callable[[], dict]


class Finished(Exception):
  """The set is there: other processes did not need this one."""


class OtherFailed(config_lib.ConfigError):
  """Another process has failed, so that its parts will not come."""


class Failures:
  """Files failed-I, by which processes tell each other that they failed.

  What lies there from an earlier attempt says nothing about this one, and the
  clocks of hosts differ: what this process finds at its start it ignores.

  Args:
    folder: that the processes share.
    share: of this process.
  """

  def __init__(self, folder: str, share: Share):
    self._folder = folder
    self._own = os.path.join(folder, f'failed-{share.process_id}')
    self._share = share
    with contextlib.suppress(FileNotFoundError):
      os.remove(self._own)
    self._before = self._read()

  def tell(self, error: BaseException) -> None:
    """Tells the others why this process ends."""
    if self._share.num_processes == 1:
      return
    line = ' '.join((str(error) or type(error).__name__).split())
    if not isinstance(error, OtherFailed):
      line = f'process {self._share.process_id} failed: {line}'
    draft = f'{self._own}.draft'
    with contextlib.suppress(OSError):  # the folder may be gone, or full
      with open(draft, 'w') as f:
        json.dump([uuid.uuid4().hex, line], f)
      os.rename(draft, self._own)

  def check(self) -> None:
    """Raises OtherFailed if another process has failed since the start."""
    new = self._read() - self._before
    if new:
      raise OtherFailed(min(line for _, line in new))

  def _read(self):
    """{(attempt, line)}: a process that fails again has another attempt."""
    result = set()
    for i in range(self._share.num_processes):
      path = os.path.join(self._folder, f'failed-{i}')
      with contextlib.suppress(FileNotFoundError), open(path) as f:
        result.add(tuple(json.load(f)))
    return result


def verify(
  title: str, parts: list[Part], share: Share, pool: worker_pool.Pool
) -> None:
  """Does the tasks of all parts that are there, this process's first.

  Every process does, as none can know which parts another one has verified
  since it was started.

  Args:
    title: what progress lines call it.
    parts: all of them, in folders that exist.
    share: of this process.
    pool: that does the work.

  Raises:
    ConfigError: if a task fails.
  """
  there = sorted(
    set(range(len(parts))).difference(_missing(parts)),
    key=lambda i: (i - share.process_id) % share.num_processes,
  )
  if there:
    total = sum(parts[i].files for i in there)
    _do(share.prefix + title, parts, there, total, pool)


def make_all(
  title: str,
  parts: list[Part],
  share: Share,
  pool: worker_pool.Pool,
  finished: Callable[[], bool],
) -> None:
  """Makes this process's parts that are missing, waits for the others.

  Args:
    title: what progress lines call it.
    parts: all of them, in folders that exist.
    share: of this process.
    pool: that does the work.
    finished: whether the whole set is there; may raise ConfigError.

  Raises:
    ConfigError: if a part cannot be made, or `finished` raises it.
    Finished: if the set is there before all parts are.
  """
  missing = _missing(parts)
  mine = [i for i in missing if i % share.num_processes == share.process_id]
  if mine:
    own = range(share.process_id, len(parts), share.num_processes)
    total = sum(parts[i].files for i in own)
    _do(share.prefix + title, parts, mine, total, pool)
  said = -_LOG_SECONDS
  while share.num_processes > 1:
    try:
      missing = _missing(parts)
    except FileNotFoundError:
      missing = [0]  # the folder goes when the set is finished
    if not missing:
      return
    if finished():
      raise Finished
    if time.monotonic() - said >= _LOG_SECONDS:
      said = time.monotonic()
      who = sorted({i % share.num_processes for i in missing})
      say(
        f'{share.prefix}{title}: waiting for {len(missing)} of {len(parts)} '
        f'parts, of process {", ".join(map(str, who))}'
      )
    time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def lock(folder: str, share: Share):
  """Refuses a second process of the same number on this folder.

  Raises:
    ConfigError: if there is one.
  """
  path = os.path.join(folder, f'lock-{share.process_id}')
  with open(path, 'a') as file:
    try:
      # The kernel drops the lock with the process.
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      # Some file systems have no locks; then nothing is refused.
      if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
        raise config_lib.ConfigError(
          f'{folder} is being worked on by another process; several take '
          '--process_id and --num_processes'
        ) from e
    yield


class Progress:
  """Files done so far: a line that changes in a terminal, lines in a log.

  Args:
    title: of the line.
    total: files.
    done: files that were done before.
  """

  def __init__(self, title: str, total: int, done: int):
    self._title = title
    self._total = total
    self._before = self._done = done
    self._damaged = 0
    self._start = self._shown = time.monotonic()
    self._terminal = sys.stderr.isatty()
    self._width = 0

  def add(self, files: int, damaged: int) -> None:
    """Counts what a worker did."""
    self._done += files
    self._damaged += damaged

  def show(self) -> None:
    """Shows the state, if it is time."""
    now = time.monotonic()
    if now - self._shown < (0.2 if self._terminal else _LOG_SECONDS):
      return
    self._shown = now
    self._print(self._line(now))

  def close(self) -> None:
    """Shows the last state."""
    self._print(self._line(time.monotonic()))
    if self._terminal:
      say('')

  def _line(self, now):
    seconds = max(now - self._start, 1e-3)
    rate = (self._done - self._before) / seconds
    line = f'{self._title}: {self._done:,}/{self._total:,} files'
    line += f', {rate:,.0f}/s'
    if self._damaged:
      line += f', {self._damaged:,} damaged'
    left = self._total - self._done
    if left and rate:
      line += f', {_duration(left / rate)} left'
    return line

  def _print(self, line):
    if self._terminal:
      # Spaces over the rest of a longer line.
      print(f'\r{line:<{self._width}}', end='', file=sys.stderr, flush=True)
      self._width = len(line)
    else:
      say(line)


def say(line: str) -> None:
  """Prints a message for people, where results do not go."""
  print(line, file=sys.stderr, flush=True)


def _do(title, parts, chosen, total, pool):
  """Does the tasks of the chosen parts, the last ones of `total` files."""
  left = sum(parts[i].files for i in chosen)
  progress = Progress(title, total, total - left)
  try:
    for reply in pool.run(chosen, lambda i: parts[i].make()):
      if reply:
        progress.add(reply['files'], reply.get('damaged', 0))
      progress.show()
  finally:
    progress.close()


def _missing(parts):
  """Indices of parts that are not made; each folder is listed once."""
  folders = {os.path.dirname(part.out) for part in parts}
  have = {
    os.path.join(folder, name)
    for folder in folders
    for name in os.listdir(folder)
  }
  return [i for i, part in enumerate(parts) if part.out not in have]


def _duration(seconds):
  minutes, seconds = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours} h {minutes} min'
  return f'{minutes} min {seconds} s' if minutes else f'{seconds} s'
