"""The bytes of image files by index, on disk or within other files."""

from collections.abc import Callable, Sequence
import functools
import os
import resource
import stat
from typing import Protocol, TypeVar

import numpy as np

from anp_jax import config as config_lib
from anp_jax.system import files as files_lib

# TensorFlow's readers count bytes in 32 bits.
_MAX_BYTES = 2**31 - 1
# Most files that one source keeps open, and its share of the descriptors: there are
# two sources in a run, and much else needs some.
_MOST_OPEN, _OPEN_SHARE = 256, 1 / 4

File = TypeVar('File')


class UnusableError(Exception):
  """What is in an image's place cannot be an image file."""


def read_file(path: str, root: str = '') -> bytes:
  """The bytes of an image file, which may be a link to one.

  Args:
    path: path of the file.
    root: folder that the file must lie in, links followed, for a path that
      a data set gives; '': anywhere.

  Raises:
    UnusableError: for a pipe, a device or a folder, a file of 2 GiB or more,
      or one outside of the root.
    OSError: if it cannot be read.
  """
  try:
    # A pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
  except OSError as e:
    is_absent = e.errno in files_lib.MISSING | files_lib.UNREADABLE
    if not is_absent and os.path.exists(path) and not os.path.isfile(path):
      raise UnusableError('no file') from e
    raise
  try:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
      raise UnusableError('no file')
    if status.st_size > _MAX_BYTES:
      raise UnusableError(f'{status.st_size} bytes')
    if root and not _is_below(_opened_path(handle, path), _real_path(root)):
      raise UnusableError(f'it lies outside of {root}')
    with open(handle, 'rb', closefd=False) as file:
      return file.read()
  finally:
    os.close(handle)


def is_inside(path: str, root: str) -> bool:
  """Whether a path below a root leads into that folder, by its text alone."""
  if '..' not in path and not os.path.isabs(path):
    return True  # at once, for lists of millions
  return _is_below(os.path.abspath(os.path.join(root, path)), root)


def check_root(root: str, paths: Sequence[str], place: Callable[[int], str]) -> None:
  """Refuses paths of a list that leave a root, and a root where their files are not.

  Args:
    root: folder that the paths start from.
    paths: paths of the images.
    place: name of an image's row in messages, by its index.

  Raises:
    ConfigError: naming the row.
  """
  for i, path in enumerate(paths):
    if not is_inside(path, root):
      raise config_lib.ConfigError(
        f'{place(i)}: {path!r} lies outside of {root}; config.data.path '
        'names a folder that all paths lie in'
      )
  # A million look-ups would take minutes on a shared file system: three tell a
  # wrong root, and the reader names a single file that is gone.
  some = {0, len(paths) // 2, len(paths) - 1} if paths else set()
  if some and not any(os.path.exists(os.path.join(root, paths[i])) for i in some):
    raise config_lib.ConfigError(
      f'{place(0)}: no file {os.path.join(root, paths[0])!r}; is {root} the '
      'folder that the paths start from (config.data.path)?'
    )


def _is_below(path, root):
  root = os.path.abspath(root)
  return os.path.commonpath([path, root]) == root


@functools.lru_cache(64)
def _real_path(root):
  return os.path.realpath(root)


def _opened_path(handle, path):
  """The path of an opened file, links followed."""
  try:
    # What was opened, rather than what a link says now; and no look-ups.
    return os.readlink(f'/proc/self/fd/{handle}')
  except OSError:  # not Linux
    return os.path.realpath(path)


class Storage(Protocol):
  """The bytes of image files, by index; it can be pickled for a process."""

  def read(self, index: int) -> bytes:
    """The bytes of a file, from any thread.

    Raises:
      UnusableError: if they are not those of a file.
      OSError: if they cannot be read.
    """

  def state(self, index: int) -> tuple[int, int]:
    """Size in bytes and time in ns, by which a change is noticed."""

  def select(self, indices: np.ndarray) -> 'Storage':
    """The files of these indices, in their order."""


def keep_open(open_file: Callable[[int], File]) -> Callable[[int], File]:
  """A function from a file's number to the open file, for any thread.

  Files stay open between reads, never more than the process may hold: the one that
  was used longest ago is dropped first.

  Args:
    open_file: opens the file of a number. The file is closed when its last
      reference goes, so no thread reads from a closed file.
  """
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = _MOST_OPEN
  if limit != resource.RLIM_INFINITY:
    most = max(1, min(most, int(limit * _OPEN_SHARE)))
  return functools.lru_cache(most)(open_file)


class FileRanges:
  """Images within other files, such as the members of tar files."""

  def __init__(
    self, paths: Sequence[str], places: np.ndarray, states: Sequence[tuple[int, int]] = ()
  ):
    """Creates the storage; nothing is opened.

    Args:
      paths: paths of the files.
      places: (n, 3) int64: number of the file, first byte and size of each image.
      states: size and time of each file.
    """
    self._paths, self._places, self._states = paths, places, states
    self._file = keep_open(self._open)

  def __reduce__(self):
    return FileRanges, (self._paths, self._places, self._states)

  def read(self, index: int) -> bytes:
    """The bytes of an image, from any thread."""
    number, start, size = self._places[index].tolist()
    file = self._file(number)  # held: another thread may make it leave the files that stay open
    data = os.pread(file.fileno(), size, start)
    if len(data) < size:
      raise UnusableError(f'{self._paths[number]} ends before byte {start + size:,}')
    return data

  def state(self, index: int) -> tuple[int, int]:
    """The size of an image and the time of its file."""
    number, _, size = self._places[index].tolist()
    return size, self._states[number][1]

  def select(self, indices: np.ndarray) -> 'FileRanges':
    """The images of these indices."""
    return FileRanges(self._paths, self._places[indices], self._states)

  def _open(self, number):
    return open(self._paths[number], 'rb', buffering=0)


class DiskFiles:
  """Files of a file system, among which anything may be."""

  def __init__(self, root: str, files: Sequence[str], confined_to: str = ''):
    """Creates the storage of files by their paths below a root.

    Args:
      root: folder that the paths start from.
      files: their paths.
      confined_to: folder that a file must lie in, links followed, where a list
        gives the paths; '': links of a tree lead anywhere.
    """
    self._root, self._files = root, files
    self._confined_to = confined_to

  def read(self, index: int) -> bytes:
    """The bytes of a file; refuses pipes, folders and huge files."""
    return read_file(self._path(index), self._confined_to)

  def state(self, index: int) -> tuple[int, int]:
    """Size and time of a file; NO_FILE if it is none."""
    return files_lib.state(self._path(index))

  def select(self, indices: np.ndarray) -> 'DiskFiles':
    """The files of these indices."""
    return DiskFiles(self._root, [self._files[i] for i in indices], self._confined_to)

  def _path(self, index):
    return os.path.join(self._root, self._files[index])
