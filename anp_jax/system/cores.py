"""How many CPU cores there are to work with."""

import os


def count() -> int:
  """Cores that this process may use; all, where a system does not tell."""
  if hasattr(os, 'sched_getaffinity'):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
