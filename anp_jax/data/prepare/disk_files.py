"""Files below a folder, as the storage that a preparation reads."""

import os
import stat

from anp_jax.data.sources import stored_images
from anp_jax.system import files as files_lib

# TensorFlow's readers count bytes in 32 bits.
_MAX_BYTES = 2**31 - 1


class DiskFiles(stored_images.Storage):
  """Files of a file system, among which anything may be."""

  def __init__(self, root: str, files):
    """Creates the storage of files by their paths below a root."""
    self._root, self._files = root, files

  def read(self, index):
    """Returns a file's bytes; refuses pipes, folders and huge files."""
    path = self._path(index)
    try:
      # A pipe would wait for a writer.
      handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as e:
      is_absent = e.errno in files_lib.MISSING | files_lib.UNREADABLE
      if not is_absent and os.path.exists(path) and not os.path.isfile(path):
        raise stored_images.UnusableError('no file') from e
      raise
    status = os.fstat(handle)
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file or status.st_size > _MAX_BYTES:
      os.close(handle)
      raise stored_images.UnusableError(
        f'{status.st_size} bytes' if is_file else 'no file'
      )
    with open(handle, 'rb') as file:
      return file.read()

  def state(self, index):
    """Returns a file's size and time; NO_FILE if it is none."""
    return files_lib.state(self._path(index))

  def select(self, indices):
    """Returns the files of these indices."""
    return DiskFiles(self._root, [self._files[i] for i in indices])

  def _path(self, index):
    return os.path.join(self._root, self._files[index])
