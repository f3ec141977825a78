"""Whether the disk has room for a set, asked before the set is made."""

from multiprocessing import pool
import pathlib

import numpy as np

from anp_jax.config import outputs
from anp_jax.data.sources import image_folder

_THREADS = 16


def states(listings: list[image_folder.Listing]) -> np.ndarray:
  """Returns (files, 2) int64: size in bytes and time in ns of every file."""
  with pool.ThreadPool(_THREADS) as threads:
    return np.array(
      [
        state
        for listing in listings
        for state in threads.map(listing.storage.state, range(len(listing.files)))
      ],
      np.int64,
    )


def listed_bytes(listings: list[image_folder.Listing], sizes: np.ndarray) -> int:
  """Returns the bytes of the files that a set stores as they are.

  Files of other formats are left out: they are converted, and may shrink.

  Args:
    listings: of the splits.
    sizes: (files,) int64, bytes of every file; negative if there is none.
  """
  is_stored = [file.lower().endswith(image_folder.SUFFIXES) for f in listings for file in f.files]
  return int(sizes[np.array(is_stored) & (sizes > 0)].sum())


def check(data_dir: str, work: str, size: int) -> None:
  """Refuses a set that its disk has no room for.

  Args:
    data_dir: folder of the sets.
    work: folder of what an earlier command has written of the set.
    size: bytes of the set.

  Raises:
    ConfigError: naming both sizes.
  """
  written = sum(path.lstat().st_size for path in pathlib.Path(work).rglob('*'))
  outputs.check_room('--data_dir', data_dir, max(size - written, 0))
