"""Whether the disk has room for a set, asked before the set is made."""

from concurrent import futures
import os

import numpy as np

from anp_jax.config import outputs
from anp_jax.data.sources import image_folder

_CHUNK = 256  # files that a thread looks at in one go
_THREADS = 16


def states(listings: list[image_folder.Listing]) -> np.ndarray:
  """Returns (files, 2) int64: size in bytes and time in ns of every file."""
  chunks = [
    (listing.storage, range(i, min(i + _CHUNK, len(listing.files))))
    for listing in listings
    for i in range(0, len(listing.files), _CHUNK)
  ]
  with futures.ThreadPoolExecutor(_THREADS) as threads:
    return np.concatenate([*threads.map(_states, chunks)])


def listed_bytes(listings: list[image_folder.Listing]) -> int:
  """Returns the bytes of the files that a set stores as they are.

  Files of other formats are left out: they are converted, and may shrink.
  """
  sizes = states(listings)[:, 0]
  is_stored = [
    file.lower().endswith(image_folder.SUFFIXES) for listing in listings for file in listing.files
  ]
  return int(sizes[np.array(is_stored) & (sizes > 0)].sum())


def check(data_dir: str, work: str, size: int) -> None:
  """Refuses a set that its disk has no room for.

  Args:
    data_dir: folder of the sets.
    work: folder of the set's parts, whose folder 'set' may hold what an earlier
      command has written.
    size: bytes of the set.

  Raises:
    ConfigError: naming both sizes.
  """
  written = sum(
    os.lstat(os.path.join(folder, name)).st_size
    for folder, _, names in os.walk(work)
    for name in names
    if os.path.basename(folder) == 'set'
  )
  outputs.check_room('--data_dir', data_dir, max(size - written, 0))


def _states(chunk):
  storage, indices = chunk
  return np.array([*map(storage.state, indices)], np.int64)
