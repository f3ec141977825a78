"""The limit on open files and connections of this process."""

import contextlib
import resource


def raise_limit() -> None:
  """Raises the soft limit on descriptors to the hard one."""
  _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.suppress(OSError, ValueError):  # some systems name a limit that they refuse
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
