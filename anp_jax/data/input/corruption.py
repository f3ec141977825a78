"""Corrupt examples, which a run meets while it reads.

The log names each once; from then on another example replaces it with weight 0,
so that batches keep their shape and batch-norm groups their size.
"""

from collections.abc import Iterator
import errno
import os
import threading

from absl import logging
import numpy as np

from anp_jax.data import sources
from anp_jax.system import error_lines, files

# Beyond these a file system is gone rather than a file damaged; the rate of
# damaged examples ends the run.
_MOST_NAMED = 1000
# Errors of one file; others are of the file system.
_OF_THE_FILE = files.MISSING | files.UNREADABLE | {errno.EISDIR}
# Errors of the machine. Libraries tell them as texts, in errors of no particular kind.
_MACHINE_ERRORS = 'EMFILE ENFILE ENOMEM EINTR EAGAIN EIO ESTALE ETIMEDOUT EREMOTEIO ENOTCONN'
_OF_THE_MACHINE = [os.strerror(getattr(errno, name)) for name in _MACHINE_ERRORS.split()]


def is_transient(error: Exception) -> bool:
  """Whether an error may be that of the machine or the network, not a file's.

  Decoders raise OSError too, but without an errno.
  """
  if isinstance(error, OSError) and error.errno is not None:
    return error.errno not in _OF_THE_FILE
  text = str(error)
  return isinstance(error, MemoryError) or any(reason in text for reason in _OF_THE_MACHINE)


class Registry:
  """The damaged examples of one source that readers have met so far."""

  def __init__(self, source: sources.Source):
    """Creates a registry without damage."""
    self._source = source
    self._damaged: set[int] = set()
    self._replacements: dict[int, int] = {}  # by damaged index
    self._lock = threading.Lock()

  def replacements(self, indices: np.ndarray) -> np.ndarray:
    """The indices to read: the same, but another for each damaged example.

    Args:
      indices: (n,) int64.

    Returns:
      (n,) int64.
    """
    if not self._damaged:
      return indices
    return np.array([self._replacement(int(i)) for i in indices], np.int64)

  def candidates(self, index: int) -> Iterator[int]:
    """The example and those that may replace it, in order.

    The first of them that can be decoded is a pure function of the index and
    the data, so batches do not depend on which process meets damage, or when.
    """
    size = len(self._source)
    for offset in range(size):
      candidate = (int(index) + offset) % size
      if candidate not in self._damaged:
        yield candidate

  def _replacement(self, index):
    if index not in self._damaged:
      return index
    replacements = self._replacements  # which another thread may clear
    if index not in replacements:
      # Cached: a folder that is gone is a long way round.
      replacements[index] = next(self.candidates(index), index)
    return replacements[index]

  def mark_damaged(self, index: int, error: Exception) -> None:
    """Excludes an example from now on; names it in the log."""
    with self._lock:
      if index in self._damaged:
        return
      self._damaged.add(index)
      self._replacements = {}
      count = len(self._damaged)
    if count > _MOST_NAMED:
      return
    logging.warning(
      '%s cannot be used, another example takes its place with weight 0 (%d of %s so far%s): %s',
      self._source.example_name(index),
      count,
      self._source.name,
      '; further ones are not named' if count == _MOST_NAMED else '',
      error_lines.first_line(error),
    )

  def log_transient(self, index: int, error: Exception) -> None:
    """Logs that an example could not be read now; later batches try again."""
    logging.log_every_n_seconds(
      logging.WARNING,
      '%s: example %d cannot be read now and has weight 0: %s',
      10,
      self._source.name,
      index,
      error_lines.first_line(error),
    )
