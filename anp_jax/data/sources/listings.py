"""Sets whose images are listed with their classes: folder, list, tar and hf."""

from collections.abc import Sequence
import hashlib
import os
from typing import Any

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.sources import (
  hf_set,
  image_folder,
  image_table,
  source as source_lib,
  splits,
  tar_shards,
)

KINDS = ('list', 'tar', 'hf')


def kind(text: str) -> str:
  """The kind that a source such as 'tar:PATTERN' names; 'folder' without a kind."""
  name, colon, _ = text.partition(':')
  return name if colon and name in KINDS else 'folder'


def find(
  d: Any,
  split: str,
  other_split: str,
  data_dir: str,
  suffixes: tuple[str, ...] = image_folder.SUFFIXES,
) -> image_folder.Listing:
  """The images of a split.

  Args:
    d: namespace with source, path, lists and pairs, as config.data.
    split: name; '', or for a tree '.', for all of a set without splits.
    other_split: other split of the run, or ''; its classes count too.
    data_dir: data folder, for what is built once.
    suffixes: suffixes of the files to list, in a folder or in tar shards.

  Raises:
    ConfigError: naming the file, folder or key at fault.
  """
  name = kind(d.source)
  if name == 'tar':
    return tar_shards.find(d, split, other_split, data_dir, suffixes)
  if name == 'hf':
    return hf_set.find(d, split, other_split, data_dir)
  if name == 'list':
    return image_table.find(d, split)
  return image_folder.find(
    d.path, split, d.lists, tuple(filter(None, [other_split])), suffixes, pairs=d.pairs
  )


def has_splits(text: str, path: str) -> bool:
  """Whether a set has splits, rather than being divided.

  Args:
    text: config.data.source.
    path: config.data.path.

  Raises:
    ConfigError: if it is a list that cannot be read.
  """
  name, place = kind(text), text.partition(':')[2]
  if name == 'tar':
    return splits.SPLIT in place
  if name == 'hf':
    return hf_set.has_splits(hf_set.full_path(text, path))
  if name == 'list':
    return image_table.has_splits(place)
  return bool(image_folder.split_folders(path))


class StoredImages(source_lib.Source):
  """The images of a listing."""

  kind = 'encoded'

  def __init__(self, listing: image_folder.Listing):
    """Creates the source; nothing is read, and files that are left out are logged."""
    if listing.left_out:
      image_folder.warn_once(listing.left_out)
    self.name = listing.name
    self.vocabulary = listing.vocabulary
    self._listing = listing

  def __len__(self) -> int:
    return len(self._listing.labels)

  def read(self, indices: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    """Image files by index, and labels."""
    read = self._listing.storage.read
    return [read(i) for i in indices], self._listing.labels[indices]

  def labels(self) -> np.ndarray:
    """(n,) int32, of all images."""
    return self._listing.labels

  def example_name(self, index: int) -> str:
    """The path of an image, which may go on within a file."""
    return config_lib.printable(os.path.join(self._listing.root, self._listing.files[index]))

  def listing(self) -> Sequence[str]:
    """The paths of all images below the root."""
    return self._listing.files

  def identity(self) -> str:
    """SHA-256 of the paths, states and labels of all images."""
    listing = self._listing
    names = '\0'.join([os.path.abspath(listing.root), *listing.files])
    numbers = np.column_stack([listing.states(), listing.labels])
    return hashlib.sha256(os.fsencode(names) + numbers.tobytes()).hexdigest()
