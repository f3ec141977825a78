"""The place of a prepared set, which appears there finished or not at all."""

from collections.abc import Callable
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil

import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import outputs
from anp_jax.data.prepare import worker_pool
from anp_jax.system import files as files_lib

# Files of a finished set: the digest of what it was made from; and (n, 2) int64,
# the state of every file before it was read.
_MARK, _STATES = 'prepared.json', 'prepared.npy'


class Target:
  """A set in the making.

  Args:
    data_dir: folder of the sets.
    final: folder of this set, in `data_dir`.
    work: folder of its parts, likewise.
    content: all that the set depends on but for the files' bytes, for JSON.
    paths: of the files.
    states: (n, 2) int64, by which a change of a file is noticed.
  """

  def __init__(
    self, data_dir: str, final: str, work: str, content, paths: list[str], states: np.ndarray
  ):
    self._data_dir, self.final, self.work = data_dir, final, work
    self._digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    self._paths, self._states = paths, states

  def run(self, overwrite: bool, make: Callable[[], list[str]]) -> list[str]:
    """Makes the set unless it is there.

    Args:
      overwrite: whether a set that was made from something else may go.
      make: makes it, and calls `finish`; gives lines to print.

    Returns:
      Lines to print.

    Raises:
      ConfigError: if something else is in its place, or another process makes
        it, or `make` raises it.
    """
    mark = files_lib.read_json_object(os.path.join(self.final, _MARK))
    text = 'from other files or options, or by another version: give another --name or --overwrite'
    if mark.get('digest') == self._digest:
      changed = np.flatnonzero((self._states != np.load(f'{self.final}/{_STATES}')).any(1))
      if not len(changed):
        text = 'made from the same files and options already; to make it again, delete it'
        return [f'{self.final} is {text}']
      file = self._paths[changed[0]]
      text = f'before some of its files changed (first {file}): --overwrite makes it again'
    if os.path.lexists(self.final) and not overwrite:
      raise config_lib.ConfigError(f'{self.final} was made {text}')
    os.makedirs(self.work, exist_ok=True)
    with _lock(self.work):
      return make()

  def check_room(self, size: int) -> None:
    """Refuses a set of this many bytes if its disk has no room; ConfigError."""
    # Less what an earlier command has written.
    written = sum(path.lstat().st_size for path in pathlib.Path(self.work).rglob('*'))
    outputs.check_room('--data_dir', self._data_dir, max(size - written, 0))

  def write_shards(
    self, function: Callable, shards: dict[str, tuple], workers: int, findings: str = ''
  ) -> str:
    """Writes the shards that an earlier command has not finished.

    Args:
      function: writes one; called with `begin_file`, files, a path and what follows.
      shards: by the names of their files, what they are made from, as for
        `worker_pool.run`, and further arguments of the function.
      workers: processes.
      findings: digest of what was found in the files.

    Returns:
      The folder of the shards, which has no other files.
    """
    name = f'{self._digest[:16]}-{findings[:16]}'
    for other in {*os.listdir(self.work)} - {name}:
      shutil.rmtree(os.path.join(self.work, other), ignore_errors=True)  # not the lock, a file
    folder = os.path.join(self.work, name)
    os.makedirs(folder, exist_ok=True)
    finished = {*os.listdir(folder)}
    for file in finished - {*shards}:  # of a command that died
      os.remove(os.path.join(folder, file))
    tasks = [
      (files, os.path.join(folder, file), function, *arguments)
      for file, (files, *arguments) in shards.items()
      if file not in finished
    ]
    worker_pool.run('writing', _write, tasks, workers)
    return folder

  def finish(self, folder: str) -> None:
    """Moves a folder to the set's place, and removes the parts."""
    np.save(os.path.join(folder, _STATES), self._states)
    files_lib.write_json(os.path.join(folder, _MARK), {'digest': self._digest})
    os.makedirs(os.path.dirname(self.final), exist_ok=True)
    if os.path.lexists(self.final):  # overwrite
      os.rename(self.final, os.path.join(self.work, 'replaced'))
    os.rename(folder, self.final)
    shutil.rmtree(self.work, ignore_errors=True)


def _write(begin_file, files, out, function, *arguments):
  """Writes a shard, which appears under its name when it is whole."""
  with files_lib.atomic_path(out) as draft:
    function(begin_file, files, draft, *arguments)
    with open(draft, 'rb') as file:
      os.fsync(file)  # else a power loss may leave an empty file


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
