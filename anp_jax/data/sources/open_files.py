"""Files that stay open between reads, never more than the process may hold."""

import collections
from collections.abc import Callable
import resource
import threading

_MOST = 256
# Share of the descriptors that one source may hold: there are two in a run, and
# much else needs some.
_SHARE = 1 / 4


class OpenFiles:
  """Open files by key; the one that was used longest ago is closed first."""

  def __init__(self, open_file: Callable):
    """Creates the collection; nothing is opened.

    Args:
      open_file: opens the file of a key. What it returns is closed when its
        last reference goes, so no thread reads from a closed file.
    """
    self._open_file = open_file
    self._files = collections.OrderedDict()
    self._lock = threading.Lock()

  def __call__(self, key):
    """The open file of a key, from any thread; raises what `open_file` does."""
    with self._lock:
      if key in self._files:
        self._files.move_to_end(key)
        return self._files[key]
    # Two threads may open the same; either will do.
    file = self._open_file(key)
    with self._lock:
      self._files[key] = file
      while len(self._files) > _most():
        self._files.popitem(last=False)
    return file


def _most():
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if limit == resource.RLIM_INFINITY:
    return _MOST
  return max(1, min(_MOST, int(limit * _SHARE)))
