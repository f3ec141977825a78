"""A file in the workdir that names the process that trains there.

Process 0 of a run creates it and gives a sign of life every few seconds by
rewriting a number within it. No clocks of two hosts are compared, and no locks
of a file system are needed: an observer on another host watches the number.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import secrets
import socket
import threading
import time
from typing import IO

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env, generation as generation_lib, termination
from anp_jax.config import urls

NAME = 'in_use.json'
_PERIOD = 5.0  # seconds between two signs of life
# Seconds without a sign of life after which a process of another host counts as
# gone: more than a busy host, or the cache of an NFS client, delays one.
_STALE_AFTER = 60.0
_POLL = 0.5  # seconds


@contextlib.contextmanager
def held(
  workdir: str,
  env: cluster_env.ClusterEnv,
  generation: generation_lib.Generation = generation_lib.FIRST,
  grace: float = 0.0,
  environment: Mapping[str, str] = os.environ,
) -> Iterator[None]:
  """A context in which no other run trains in a workdir.

  Only process 0 holds the lock; in the others nothing is done. A workdir in an
  object store has no lock: stores cannot create an object atomically through
  fsspec.

  Args:
    workdir: folder of the run; made if it is missing.
    env: place of this process.
    generation: generation of the run; a later one takes the lock over from the process
      of the one before.
    grace: seconds from the loss of the lock to the end of this process, which may
      restart before that.
    environment: variables, for the job's number.

  Raises:
    ConfigError: if another run trains there, naming its process, or if the
      folder cannot be written to.
  """
  if env.index or urls.is_mirror(workdir):
    yield
    return
  try:
    os.makedirs(workdir, exist_ok=True)
    holder = {**_this_process(environment), 'run': generation.started_at}
    lock = WorkdirLock(workdir, holder, grace=grace)
    if generation.number:
      lock.take_over()
    lock.acquire()
  except OSError as e:
    raise config_lib.ConfigError(
      f'--workdir={workdir!r} cannot be written to: {e.strerror}; choose another folder'
    ) from e
  try:
    yield
  finally:
    lock.release()


class WorkdirLock:
  """The lock of one workdir, for one process."""

  def __init__(
    self,
    workdir: str,
    holder: dict,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    grace: float = 0.0,
  ):
    """Creates the lock; `acquire` creates its file.

    Args:
      workdir: folder that exists.
      holder: JSON values that describe this process, see `_this_process`.
      clock: returns seconds that never run backwards.
      sleep: waits for seconds of that clock.
      grace: seconds from the loss of the lock to the end of this process.
    """
    self._workdir, self._holder, self._grace = workdir, holder, grace
    self._path = os.path.join(workdir, NAME)
    self._clock, self._sleep = clock, sleep
    self._file: IO[str] | None = None
    self._beats = 0
    self._released = threading.Event()
    self._thread = threading.Thread(
      target=self._beat_until_released, name='workdir lock', daemon=True
    )

  def take_over(self) -> None:
    """Removes the file of another process of the same run."""
    text = self._read()
    if text is not None and _record(text).get('run') == self._holder['run']:
      self._remove_stale(text)

  def acquire(self) -> None:
    """Creates the file, or replaces one whose process is gone.

    Raises:
      ConfigError: if its process lives.
      OSError: if the folder cannot be written to.
    """
    while not self._create():
      text = self._read()
      if text is not None:  # else it has just been removed
        self._await_stale(text)
        self._remove_stale(text)
    self._thread.start()

  def release(self) -> None:
    """Removes the file, if it is still this process's."""
    self._released.set()
    self._thread.join(_PERIOD)
    with contextlib.suppress(OSError):
      if self._is_ours():
        os.unlink(self._path)
    assert self._file is not None
    self._file.close()

  def _create(self):
    """Creates the file; False if there is one."""
    try:
      self._file = open(self._path, 'x+')
    except FileExistsError:
      return False
    try:
      self._beat()
    except OSError:  # a full disk
      os.unlink(self._path)
      raise
    return True

  def _beat(self):
    """Gives a sign of life in the file that this process has created.

    Where another process has taken the lock over, the path names a file that
    this process does not write to.
    """
    self._beats += 1
    assert self._file is not None
    # Of one length, so that it is written in place.
    record = {**self._holder, 'beat': f'{self._beats:012d}'}
    self._file.seek(0)
    self._file.write(json.dumps(record))
    self._file.flush()
    os.fsync(self._file.fileno())  # over NFS, this is when others see it

  def _beat_until_released(self):
    while not self._released.wait(_PERIOD):
      # A full disk, say: it ends the run elsewhere, if at all.
      with contextlib.suppress(OSError):
        self._beat()
      is_lost = False
      with contextlib.suppress(OSError):  # somebody has removed it by hand, say
        is_lost = not self._is_ours()
      if is_lost and not self._released.wait(self._grace):
        termination.end_process(
          termination.BAD_INPUT,
          f'--workdir={self._workdir}: this process has given no sign of life '
          f'for so long that {_name(_record(self._read()))} has taken over; '
          'ending, the last checkpoint stands',
        )

  def _is_ours(self):
    assert self._file is not None
    return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))

  def _read(self):
    """The text of the file at the path; None if there is none."""
    try:
      with open(self._path) as file:
        return file.read()
    except FileNotFoundError:
      return None

  def _await_stale(self, text):
    """Returns once the process of the lock is gone; refuses one that lives."""
    record, begin = _record(text), self._clock()
    is_gone = _is_gone(record, self._holder)
    if is_gone is None:
      print(
        f'--workdir={self._workdir}: waiting up to {_STALE_AFTER:g} s for a '
        f'sign of life of {_name(record)}',
        flush=True,
      )
    while is_gone is None:
      self._sleep(_POLL)
      now = self._read()
      if now != text:
        is_gone, record = now is None, _record(now)
      elif self._clock() - begin >= _STALE_AFTER:
        is_gone = True
    if not is_gone:
      raise config_lib.ConfigError(
        f'--workdir={self._workdir}: in use by {_name(record)}; wait for its '
        'end, or choose another --workdir'
      )

  def _remove_stale(self, text):
    """Removes the file of a process that is gone, if it is still there."""
    aside = f'{self._path}.{secrets.token_hex(8)}'
    try:
      os.rename(self._path, aside)
    except FileNotFoundError:
      return
    with open(aside) as file:
      is_same = _record(file.read()).get('launch') == _record(text).get('launch')
    if not is_same:  # another process has taken over meanwhile: put it back
      with contextlib.suppress(FileExistsError):
        os.link(aside, self._path)
    os.unlink(aside)


def _this_process(environment):
  """Describes this process for the lock, in JSON values."""
  return {
    'host': socket.gethostname(),
    'process': os.getpid(),
    'started': _start_time(os.getpid()),
    'machine': _machine(),
    'job': environment.get('SLURM_JOB_ID', ''),
    'restart': environment.get('SLURM_RESTART_COUNT', '0'),
    'launch': secrets.token_hex(8),
  }


def _is_gone(record, holder):
  """Whether a lock's process is gone; None: its signs of life must tell."""
  if record.get('job') and record['job'] == holder['job']:
    # Slurm starts a job again only once its processes have ended.
    if _number(record.get('restart')) < _number(holder['restart']):
      return True
  if record.get('machine') and record['machine'] == holder['machine']:
    return _start_time(record.get('process')) != record.get('started')
  return None


def _machine():
  """Identifies the kernel and the process namespace; '' where unknown.

  Two containers may share a host name, or a kernel and process numbers.
  """
  try:
    with open('/proc/sys/kernel/random/boot_id') as file:
      return f'{file.read().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _start_time(process):
  """When a process of this machine started, in ticks; '' if it has ended.

  Numbers of processes are used again; together with this they are not.
  """
  try:
    with open(f'/proc/{process}/stat') as file:
      # The second field is a name, which may have spaces and parentheses.
      fields = file.read().rpartition(')')[2].split()
  except OSError:
    return ''
  return '' if fields[0] in 'ZX' else fields[19]


def _record(text):
  """The values in a lock's file; {} if it is not written yet."""
  try:
    record = json.loads(text or '')
  except ValueError:
    return {}
  return record if isinstance(record, dict) else {}


def _number(text):
  return int(text) if str(text).isdecimal() else 0


def _name(record):
  """'process 123 on node1 (job 5)'."""
  job = f' (job {record["job"]})' if record.get('job') else ''
  process, host = record.get('process', '?'), record.get('host', '?')
  return f'process {process} on {host}{job}'
