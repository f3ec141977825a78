"""Files below a folder, as the storage that a preparation reads."""

import os

from anp_jax.data.sources import stored_images
from anp_jax.system import files as files_lib


class DiskFiles(stored_images.Storage):
  """Files of a file system, among which anything may be."""

  def __init__(self, root: str, files, confined_to: str = ''):
    """Creates the storage of files by their paths below a root.

    Args:
      root: of the paths.
      files: their paths.
      confined_to: as `image_folder.Listing.confined_to`.
    """
    self._root, self._files = root, files
    self._confined_to = confined_to

  def read(self, index):
    """Returns a file's bytes; refuses pipes, folders and huge files."""
    return stored_images.read_file(self._path(index), self._confined_to)

  def state(self, index):
    """Returns a file's size and time; NO_FILE if it is none."""
    return files_lib.state(self._path(index))

  def select(self, indices):
    """Returns the files of these indices."""
    files = [self._files[i] for i in indices]
    return DiskFiles(self._root, files, self._confined_to)

  def _path(self, index):
    return os.path.join(self._root, self._files[index])
