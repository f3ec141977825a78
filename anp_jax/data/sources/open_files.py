"""Files that stay open between reads, never more than the process may hold."""

from collections.abc import Callable
import functools
import resource
from typing import TypeVar

_MOST = 256
# Share of the descriptors that one source may hold: there are two in a run, and
# much else needs some.
_SHARE = 1 / 4

Key = TypeVar('Key')
File = TypeVar('File')


def keep_open(open_file: Callable[[Key], File]) -> Callable[[Key], File]:
  """A function from a key to its open file, for any thread.

  The file that was used longest ago is dropped first.

  Args:
    open_file: opens the file of a key. The file is closed when its last
      reference goes, so no thread reads from a closed file.
  """
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  most = _MOST
  if limit != resource.RLIM_INFINITY:
    most = max(1, min(most, int(limit * _SHARE)))
  return functools.lru_cache(most)(open_file)
