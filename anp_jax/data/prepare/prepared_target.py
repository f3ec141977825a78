"""The place of a prepared set, which appears there finished or not at all."""

from collections.abc import Callable, Collection
import contextlib
import errno
import fcntl
import os
import shutil

from anp_jax import config as config_lib
from anp_jax.system import files as files_lib

# A file of a finished set: the digest of the files and options behind it.
_MARK = 'prepared.json'


class Target:
  """A set in the making.

  Args:
    final: its folder.
    work: the folder of its parts, on the same file system.
    digest: of all that the set depends on.
  """

  def __init__(self, final: str, work: str, digest: str):
    self.final = final
    self.work = work
    self._digest = digest

  def run(
    self,
    overwrite: bool,
    make: Callable[[], list[str]],
    changed: Callable[[], str | None] = lambda: None,
  ) -> list[str]:
    """Makes the set unless it is there.

    Args:
      overwrite: whether a set that was made from something else may go.
      make: makes it, and calls `finish`; gives lines to print.
      changed: returns the first file that has changed since the set that is
        there was made.

    Returns:
      Lines to print.

    Raises:
      ConfigError: if something else is in its place, or another process makes
        it, or `make` raises it.
    """
    mark = files_lib.read_json_object(os.path.join(self.final, _MARK))
    reason = (
      'from other files or options, or by another version: give another --name, or '
      '--overwrite to replace it'
    )
    if mark.get('digest') == self._digest:
      file = changed()
      if not file:
        return [
          f'{self.final} is made from the same files and options already; to make it again, '
          'delete it'
        ]
      reason = f'before some of its files changed (first {file}): --overwrite makes it again'
    if os.path.lexists(self.final) and not overwrite:
      raise config_lib.ConfigError(f'{self.final} was made {reason}')
    with self._lock():
      return make()

  def folder(self, findings: str, shards: Collection[str]) -> str:
    """Makes the folder of the set's files, and removes what does not belong there.

    Shards that an earlier command has finished stay.

    Args:
      findings: digest of what was found in the files.
      shards: names of their files.
    """
    folder = f'{self._digest[:16]}-{findings[:16]}'
    for name in os.listdir(self.work):
      if name != folder:
        shutil.rmtree(os.path.join(self.work, name), ignore_errors=True)  # folders only
    path = os.path.join(self.work, folder)
    os.makedirs(path, exist_ok=True)
    for name in set(os.listdir(path)) - set(shards):
      os.remove(os.path.join(path, name))
    return path

  def finish(self, folder: str) -> None:
    """Moves a folder to the set's place, and removes the parts."""
    files_lib.write_json(os.path.join(folder, _MARK), {'digest': self._digest})
    os.makedirs(os.path.dirname(self.final), exist_ok=True)
    if os.path.lexists(self.final):  # overwrite
      replaced = os.path.join(self.work, 'replaced')
      shutil.rmtree(replaced, ignore_errors=True)
      os.rename(self.final, replaced)
    os.rename(folder, self.final)
    shutil.rmtree(self.work, ignore_errors=True)

  @contextlib.contextmanager
  def _lock(self):
    """Refuses a second process that makes the set; ConfigError."""
    os.makedirs(self.work, exist_ok=True)
    with open(os.path.join(self.work, 'lock'), 'a') as file:
      try:
        # The kernel drops the lock with the process.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as e:
        # Some file systems have no locks; then nothing is refused.
        if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
          raise config_lib.ConfigError(f'{self.work} is being worked on by another process') from e
      yield
