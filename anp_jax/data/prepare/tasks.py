"""The two tasks of a preparation: to examine files, and to write a shard."""

from collections.abc import Sequence
import dataclasses
import hashlib
import os
from typing import NamedTuple

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.prepare import examine, worker_pool
from anp_jax.data.sources import image_folder, stored_images
from anp_jax.system import files as files_lib


class Row(NamedTuple):
  """The result of examining a file.

  Attributes:
    digest: SHA-256 of its bytes; b'' if it could not be read.
    size: bytes that were read.
    finding: what they hold.
  """

  digest: bytes
  size: int
  finding: examine.Finding


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Listed(worker_pool.Task):
  """Work on the files of a listing."""

  listing: image_folder.Listing

  def paths(self) -> list[str]:
    """Returns the path of every file."""
    return self.listing.paths()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examine(_Listed):
  """Examines files.

  Attributes:
    max_megapixels: million pixels above which a file is large.
  """

  max_megapixels: float

  def run(self, begin_file) -> list[Row]:
    """Returns a row for each file."""
    rows = []
    for i in range(len(self.listing.files)):
      begin_file(i)
      rows.append(self._row(i))
    return rows

  def _row(self, index):
    try:
      data = self.listing.storage.read(index)
    except stored_images.UnusableError as e:
      return Row(b'', 0, examine.unusable(str(e)))
    except OSError as e:
      if e.errno in files_lib.MISSING:
        return Row(b'', 0, examine.unusable('no such file', 'missing'))
      if e.errno in files_lib.UNREADABLE:
        return Row(b'', 0, examine.unusable(e.strerror))
      raise
    finding = examine.examine(data, self.listing.files[index], self.max_megapixels)
    return Row(hashlib.sha256(data).digest(), len(data), finding)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Write(_Listed):
  """Writes a shard, which appears under its name when it is whole.

  Attributes:
    digests: SHA-256 of each file's bytes, by which a change is noticed.
    converted: (n,) bool, files that are stored converted.
    out: path of the shard.
  """

  digests: Sequence[bytes]
  converted: np.ndarray
  out: str

  def run(self, begin_file) -> None:
    """Writes the shard."""
    from anp_jax.data.prepare import anp_folder  # tfds: slow to import

    with files_lib.atomic_path(self.out) as draft:
      anp_folder.write_shard(draft, self.listing.vocabulary, self._examples(begin_file))
      sync(draft)

  def _examples(self, begin_file):
    for i, name in enumerate(self.listing.files):
      begin_file(i)
      data = self._read(i)
      if self.converted[i]:
        data = examine.convert(data)
      yield data, int(self.listing.labels[i]), name

  def _read(self, index):
    try:
      data = self.listing.storage.read(index)
    except stored_images.UnusableError as e:
      raise config_lib.ConfigError(f'{self.paths()[index]}: {e}') from e
    if hashlib.sha256(data).digest() != self.digests[index]:
      raise config_lib.ConfigError(
        f'{self.paths()[index]} has changed since it was examined: run the command again'
      )
    return data


def sync(path: str) -> None:
  """Waits until a file is on the disk: a power loss may not leave it empty."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
