"""The image files that paths lead to, one after another, and their pixels.

Nothing here holds more than a few batches, however many files there are.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import dataclasses
import itertools
import os

import numpy as np

from anp_jax.data.sources import features, folder_names, image_folder, skipped_files, stored_images

STDIN = '-'


@dataclasses.dataclass(frozen=True)
class Batch:
  """Files in the order of their paths.

  Attributes:
    files: paths of readable files, at most the batch's size.
    images: (size, side, side, 3) uint8, one per file, then black ones; or vectors (size,
      1, 1, width) float32.
    unreadable: (file, reason) of the files between and after them.
  """

  files: list[str]
  images: np.ndarray
  unreadable: list[tuple[str, str]]


def find(
  paths: Iterable[str],
  lines: Iterable[bytes] = (),
  skipped: skipped_files.SkippedFiles | None = None,
) -> Iterator[tuple[str, str]]:
  """Yields files, in the order of the paths.

  A folder stands for the image files in it and below, in the order of their
  names, by suffix; hidden ones and links to folders are left out. A path that
  stands there twice comes twice.

  Args:
    paths: files, folders, and '-' for the paths in `lines`.
    lines: one path each, in the system's encoding; empty ones do not count.
    skipped: counter of the files of folders that are left out by suffix.

  Yields:
    (path, fault): what a folder cannot be searched for; '' for a file, which
    may yet turn out to be none.
  """
  if skipped is None:
    skipped = skipped_files.SkippedFiles()
  for path in paths:
    if path != STDIN:
      yield from _expand(path, skipped)
      continue
    for line in lines:
      path = os.fsdecode(line.rstrip(b'\r\n'))
      if path:
        yield from _expand(path, skipped)


def batches(
  files: Iterable[tuple[str, str]],
  read: Callable[[bytes], np.ndarray],
  size: int,
  side: int,
  threads: int,
) -> Iterator[Batch]:
  """Reads and decodes files in background threads, ahead of the consumer.

  Args:
    files: files of `find`, taken as far ahead as they are read.
    read: decodes a file to (side, side, 3) uint8; ValueError if it is no image.
    size: files per batch.
    side: pixels.
    threads: threads that read.

  Yields:
    Batches; only the last may have fewer files than `size`.
  """
  files = iter(files)
  most = 2 * size + threads  # files that are read or wait
  waiting: collections.deque[tuple[str, futures.Future]] = collections.deque()
  pool = futures.ThreadPoolExecutor(threads, 'read')
  try:
    batch = _empty(size, side)
    while True:
      for path, fault in itertools.islice(files, most - len(waiting)):
        waiting.append((path, pool.submit(_read, path, fault, read)))
      if not waiting:
        break
      path, future = waiting.popleft()
      pixels, fault = future.result()
      if fault:
        batch.unreadable.append((path, fault))
        continue
      batch.images[len(batch.files)] = pixels
      batch.files.append(path)
      if len(batch.files) == size:
        yield batch
        batch = _empty(size, side)
    if batch.files or batch.unreadable:
      yield batch
  finally:
    pool.shutdown(wait=False, cancel_futures=True)


def of_features(texts: Iterable[str], size: int, widths: Sequence[int]) -> Iterator[Batch]:
  """Yields batches of vectors, in the order of the files that hold them.

  Args:
    texts: files of features, each as in `features.read_all`.
    size: vectors per batch.
    widths: numbers per vector in each of its files.

  Raises:
    ConfigError: if a file cannot be read, or has another width.
  """
  for text in texts:
    names, arrays = features.read_all(text, '')
    features.check_widths(text, arrays, widths)
    vectors = np.concatenate(arrays, 1)
    for start in range(0, len(names), size):
      rows = vectors[start : start + size]
      images = np.zeros((size, 1, 1, vectors.shape[1]), np.float32)
      images[: len(rows), 0, 0] = rows
      yield Batch(list(names[start : start + size]), images, [])


def _empty(size, side):
  return Batch([], np.zeros((size, side, side, 3), np.uint8), [])


def _expand(path, skipped):
  if not os.path.isdir(path):
    yield path, ''
    return
  is_empty = True
  for item in _walk(path, skipped):
    is_empty = False
    yield item
  if is_empty:
    yield path, 'a folder without image files'


def _walk(folder, skipped):
  faults = []
  suffixes = image_folder.SUFFIXES + image_folder.convertible()
  for place, folders, names in os.walk(folder, onerror=faults.append):
    folders[:] = sorted(name for name in folders if not folder_names.is_foreign(name))
    for name in sorted(names):
      # macOS leaves a hidden ._NAME.jpg, no image, next to each file it copies.
      if name.startswith('.'):
        continue
      path = os.path.join(place, name)
      if name.lower().endswith(suffixes):
        yield path, ''
      else:
        skipped.add(path)
  for error in faults:
    yield error.filename, _reason(error)


def _read(path, fault, read):
  """Pixels, or None and why there are none."""
  if fault:
    return None, fault
  try:
    return read(stored_images.read_file(path)), ''
  except stored_images.UnusableError as e:
    text = str(e)
    return None, 'neither a file nor a folder' if text == 'no file' else text
  except (OSError, ValueError, MemoryError) as e:
    return None, _reason(e)


def _reason(error):
  return getattr(error, 'strerror', '') or str(error) or type(error).__name__
