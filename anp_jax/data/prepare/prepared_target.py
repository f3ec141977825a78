"""The place of a prepared set, which appears there finished or not at all."""

from collections.abc import Callable
import contextlib
import errno
import fcntl
import json
import os
import shutil

from anp_jax import config as config_lib
from anp_jax.data.prepare import worker_pool
from anp_jax.system import files as files_lib

# A file of a finished set: digests of the files and options behind it.
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
    workers: int,
    make: Callable[[worker_pool.Pool], list[str]],
    changed: Callable[[], str | None] = lambda: None,
  ) -> list[str]:
    """Makes the set unless it is there.

    Args:
      overwrite: whether a set that was made from something else may go.
      workers: processes.
      make: makes it, and calls `finish`; gives lines to print.
      changed: the first of its files that has changed since the set that is
        there was made; it may take long.

    Returns:
      Lines to print.

    Raises:
      ConfigError: if something else is in its place, or another process makes
        it, or `make` raises it.
    """
    is_finished = self._is_finished()
    file = changed() if is_finished else None
    if is_finished and not file:
      return [
        f'{self.final} is made from the same files and options already; to make it again, delete it'
      ]
    if file and not overwrite:
      raise config_lib.ConfigError(
        f'{self.final} was made before some of its files changed (first '
        f'{file}): --overwrite makes it again'
      )
    if os.path.lexists(self.final) and not overwrite:
      raise config_lib.ConfigError(
        f'{self.final} was made from other files or options, or by another '
        'version: give another --name, or --overwrite to replace it'
      )
    os.makedirs(self.work, exist_ok=True)
    with _lock(self.work), worker_pool.Pool(workers) as pool:
      return make(pool)

  def choose_folder(self, findings: str) -> str:
    """Makes the folder of all that depends on the findings in the files.

    Those that earlier commands made of other findings are removed.

    Args:
      findings: digest of them.
    """
    prefix = f'{self._digest[:16]}-'
    folder = f'{prefix}{findings[:16]}'
    for name in os.listdir(self.work):
      if name.startswith(prefix) and name != folder:
        shutil.rmtree(os.path.join(self.work, name), ignore_errors=True)
    path = os.path.join(self.work, folder)
    os.makedirs(path, exist_ok=True)
    return path

  def finish(self, folder: str, files_state: str = '') -> None:
    """Moves a folder to the set's place, and removes the parts.

    Args:
      folder: that holds the set.
      files_state: digest of the state of all files, which tells of changes.
    """
    mark = {'digest': self._digest}
    if files_state:
      mark['files_state'] = files_state
    files_lib.write_atomic(os.path.join(folder, _MARK), json.dumps(mark))
    os.makedirs(os.path.dirname(self.final), exist_ok=True)
    if os.path.lexists(self.final):  # overwrite
      replaced = os.path.join(self.work, 'replaced')
      shutil.rmtree(replaced, ignore_errors=True)
      os.rename(self.final, replaced)
    os.rename(folder, self.final)
    shutil.rmtree(self.work, ignore_errors=True)

  def _is_finished(self):
    """Whether the set is there, made from the same as this one."""
    try:
      with open(os.path.join(self.final, _MARK), encoding='utf-8') as file:
        return json.load(file)['digest'] == self._digest
    except (OSError, ValueError, KeyError, TypeError):
      return False


@contextlib.contextmanager
def _lock(folder):
  """Refuses a second process that works on a folder; ConfigError."""
  with open(os.path.join(folder, 'lock'), 'a') as file:
    try:
      # The kernel drops the lock with the process.
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
      # Some file systems have no locks; then nothing is refused.
      if e.errno in (errno.EWOULDBLOCK, errno.EACCES):
        raise config_lib.ConfigError(f'{folder} is being worked on by another process') from e
    yield
