"""Image files that are stored within other files, by their index."""

from typing import Protocol

import numpy as np

from anp_jax.data.sources import source as source_lib


class UnusableError(Exception):
  """What is in an image's place cannot be an image file."""


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


class StoredImages(source_lib.Source):
  """The images of a listing that has a storage."""

  kind = 'encoded'

  def __init__(self, listing):
    """Creates the source of an `image_folder.Listing`; nothing is read."""
    self.name = listing.name
    self.vocabulary = listing.vocabulary
    self._listing = listing
    self._read = listing.storage.read

  def __len__(self):
    return len(self._listing.labels)

  def read(self, indices):
    """Returns the bytes of image files by index, and labels."""
    files = [self._read(i) for i in indices]
    return files, self._listing.labels[indices]

  def labels(self):
    """Returns (n,) int32, of all images."""
    return self._listing.labels

  def example_name(self, index):
    """Returns the path of the image, which goes on within a file."""
    return f'{self._listing.root}/{self._listing.files[index]}'

  def listing(self):
    """Returns the names within the files, if these are in memory."""
    files = self._listing.files
    return files if isinstance(files, list | tuple) else None
