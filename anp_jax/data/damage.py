"""Examples that turn out to be unusable while a run goes on.

One is named in the log once; from then on another takes its place with weight
0, so that batches keep their shape and batch-norm groups their size.
"""

from collections.abc import Iterator
import threading

from absl import logging
import numpy as np

# Neighbours that are tried before a blank image is given: a file system that is
# gone must end the run by its rate of damaged examples, not by a search.
_TRIES = 64


class Registry:
  """The unusable examples of one source, as far as they are known."""

  def __init__(self, source):
    self._source = source
    self._known = set()
    self._lock = threading.Lock()

  def stand_ins(self, indices: np.ndarray) -> np.ndarray:
    """The indices to read instead: the same ones but for known damage.

    Args:
      indices: (n,) int64.

    Returns:
      (n,) int64.
    """
    if not self._known:
      return indices
    return np.array([next(self.candidates(i), i) for i in indices], np.int64)

  def candidates(self, index: int) -> Iterator[int]:
    """The example and those that may stand in for it, in order.

    The first that is whole is a pure function of the index and the data, so
    batches do not depend on when or by which process damage was found.
    """
    for offset in range(_TRIES):
      candidate = (int(index) + offset) % len(self._source)
      if candidate not in self._known:
        yield candidate

  def note(self, index: int, error: Exception) -> None:
    """Remembers that an example is unusable; names it in the log."""
    with self._lock:
      if index in self._known:
        return
      self._known.add(index)
      count = len(self._known)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    logging.warning(
      '%s cannot be used, another example takes its place with weight 0 '
      '(%d of %s so far): %s',
      self._source.where(index), count, self._source.name, lines[0],
    )  # fmt: skip
