"""What the workers of a preparation do: they examine files and write shards."""

from collections.abc import Callable, Sequence
import hashlib
import os

from anp_jax import config as config_lib
from anp_jax.data.prepare import examine
from anp_jax.data.sources import image_folder, stored_images
from anp_jax.system import files as files_lib


def examine_files(
  begin_file: Callable[[int], None], listing: image_folder.Listing, max_megapixels: float
) -> list[examine.Finding]:
  """Returns the finding for each file.

  Args:
    begin_file: see `worker_pool.run`.
    listing: files to examine.
    max_megapixels: million pixels above which a file is large.
  """
  findings = []
  for i in range(len(listing.files)):
    begin_file(i)
    findings.append(_examine(listing, i, max_megapixels))
  return findings


def write_shard(
  begin_file: Callable[[int], None],
  listing: image_folder.Listing,
  digests: Sequence[bytes],
  edits: Sequence[Callable[[bytes], bytes] | None],
  path: str,
) -> None:
  """Writes the shard of some files, which appears under its name when it is whole.

  Args:
    begin_file: see `worker_pool.run`.
    listing: files of the shard.
    digests: SHA-256 of each file's bytes, by which a change is noticed.
    edits: what makes the stored bytes of each file; None: they are its own.
    path: file of the shard.

  Raises:
    ConfigError: if a file has changed.
  """
  from anp_jax.data.prepare import anp_folder  # tfds: slow to import

  def examples():
    for i, name in enumerate(listing.files):
      begin_file(i)
      data = listing.storage.read(i)
      if hashlib.sha256(data).digest() != digests[i]:
        text = 'has changed since it was examined: run the command again'
        raise config_lib.ConfigError(f'{listing.paths()[i]} {text}')
      edit = edits[i]
      yield edit(data) if edit else data, int(listing.labels[i]), name

  with files_lib.atomic_path(path) as draft:
    anp_folder.write_shard(draft, listing.vocabulary, examples())
    with open(draft, 'rb') as file:
      os.fsync(file)  # else a power loss may leave an empty file


def _examine(listing, index, max_megapixels):
  try:
    data = listing.storage.read(index)
  except stored_images.UnusableError as e:
    return examine.unusable(str(e))
  except OSError as e:
    if e.errno in files_lib.MISSING:
      return examine.unusable('no such file', 'missing')
    if e.errno in files_lib.UNREADABLE:
      return examine.unusable(e.strerror)
    raise
  finding = examine.examine(data, listing.files[index], max_megapixels)
  return finding._replace(size=len(data), digest=hashlib.sha256(data).digest())
