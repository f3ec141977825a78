"""Files that are written atomically, locks, and lines of JSON that may be torn."""

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import stat
import time
from typing import Any

from absl import logging

# Errors of one entry, not of the disk or of this process.
MISSING = {errno.ENOENT, errno.ENOTDIR}
UNREADABLE = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
LFS_POINTER = b'version https://git-lfs.github.com/spec/'
NO_FILE = (-1, -1)  # the state of what is no file
_STALE_SECONDS = 3600.0


def write_atomic(path: str, content: str | bytes) -> None:
  """Writes a file atomically: neither a reader nor a crash sees it half written.

  Args:
    path: path of the file; an existing file is replaced.
    content: bytes, or text, which is written as UTF-8 with escapes for file names
      that are not UTF-8.

  Raises:
    OSError: if the file cannot be written; an existing file stays.
  """
  if isinstance(content, str):
    content = content.encode('utf-8', 'backslashreplace')
  with atomic_path(path) as draft, open(draft, 'wb') as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())  # else a power loss may leave an empty file


@contextlib.contextmanager
def atomic_path(path: str) -> Iterator[str]:
  """Yields the path of an empty draft, which becomes the file at the end.

  It serves files that a library writes, or that are written in parts. An
  unfinished draft is removed.
  """
  folder, name = os.path.split(path)
  # Two processes may write the same path: each has a draft of its own.
  draft = os.path.join(folder, f'.{name}.{secrets.token_hex(8)}')
  # Not by tempfile: its files are for their owner alone, and the umask can be
  # read only by setting it, for all threads.
  os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
  try:
    yield draft
    os.replace(draft, path)
  except BaseException:
    os.unlink(draft)
    raise


def unlink_links(*paths: str) -> None:
  """Removes those of the paths that are links: a stranger's run may lead out of its folder."""
  for path in filter(os.path.islink, paths):
    logging.warning(
      '%s is no longer a link to %s: a run is written in its folder', path, os.readlink(path)
    )
    os.unlink(path)


def remove_drafts(folder: str) -> None:
  """Removes what killed processes have left of `atomic_path` in a folder, after an hour.

  Newer drafts may be another host's: some file systems have locks of each host only.
  """
  for draft in glob.glob(os.path.join(glob.escape(folder), '.*.' + '[0-9a-f]' * 16)):
    with contextlib.suppress(FileNotFoundError):
      if time.time() - os.path.getmtime(draft) > _STALE_SECONDS:
        os.unlink(draft)


def state(path: str) -> tuple[int, int]:
  """Returns a file's size in bytes and time in ns; NO_FILE if it is not a file."""
  try:
    status = os.stat(path)
  except OSError as e:
    if e.errno in MISSING | UNREADABLE:
      return NO_FILE
    raise
  if not stat.S_ISREG(status.st_mode):
    return NO_FILE
  return status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def lock(path: str, wait: bool = True) -> Iterator[bool]:
  """Waits for a lock that other processes of this host hold, then holds it.

  Args:
    path: path of the lock file, which is created if missing, and stays.
    wait: whether to wait for another process.

  Yields:
    Whether the lock is held; False where the file system has no locks.

  Raises:
    BlockingIOError: if another process holds it, and this one does not wait.
  """
  # The kernel drops the lock with the process, so a killed one blocks nobody.
  with open(path, 'a') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
      raise
    except OSError as error:
      logging.warning('Cannot lock %s: %s', path, error)
      yield False
    else:
      yield True


def is_lfs_pointer(path: str) -> bool:
  """Returns whether a file is a pointer of Git LFS."""
  try:
    with open(path, 'rb') as file:
      return file.read(len(LFS_POINTER)) == LFS_POINTER
  except OSError:
    return False


def write_json(path: str, value: Any) -> None:
  """Writes a value as indented JSON; see `write_atomic`."""
  write_atomic(path, json.dumps(value, indent=1) + '\n')


def read_json(path: str, default: Any = None) -> Any:
  """Returns the value in a JSON file; the default if there is no such file."""
  try:
    with open(path, encoding='utf-8') as file:
      return loads(file.read())
  except FileNotFoundError:
    return default


def loads(text: str | bytes) -> Any:
  """Returns the value of a JSON text.

  Raises:
    ValueError: if the text is not JSON, or nested too deeply.
  """
  try:
    return json.loads(text)
  except RecursionError:
    raise ValueError('it is nested too deeply') from None


def read_json_object(path: str) -> dict:
  """Returns the JSON object in a file; {} if it cannot be read."""
  try:
    value = read_json(path)
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}


def append_json_line(path: str, record: dict) -> None:
  """Appends a record as one line of JSON.

  An unfinished line of a killed process is ended first.
  """
  with open(path, 'ab+') as file:
    if file.tell():
      file.seek(-1, os.SEEK_END)
      if file.read(1) != b'\n':
        file.write(b'\n')
    file.write(json.dumps(record).encode() + b'\n')


def read_json_lines(path: str) -> list[dict]:
  """Returns the records of a file of JSON lines, in order, without torn lines.

  Args:
    path: path of the file; a missing file has no records.
  """
  try:
    with open(path, 'rb') as file:
      lines = file.read().split(b'\n')
  except FileNotFoundError:
    return []
  records = []
  for line in lines:
    try:
      record = loads(line)
    except ValueError:
      continue
    if isinstance(record, dict):
      records.append(record)
  return records
