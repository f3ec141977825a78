"""The place of a prepared set, which appears there finished or not at all."""

from collections.abc import Callable
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import outputs
from anp_jax.data.prepare import anp_folder_files as set_files, tasks as tasks_lib, worker_pool
from anp_jax.system import files as files_lib

# Files of a finished set: the digest of what it was made from; and (n, 2) int64,
# the state of every file before it was read.
_MARK, _STATES = 'prepared.json', 'prepared.npy'


class Target:
  """A set in the making.

  Args:
    data_dir: folder of the sets.
    name: name of the set.
    content: everything that the set depends on except the files' bytes, for JSON.
    paths: source files.
    states: (n, 2) int64, sizes and times of the source files, which tell a change.
  """

  def __init__(self, data_dir: str, name: str, content: Any, paths: list[str], states: np.ndarray):
    folder = os.path.join(data_dir, set_files.NAME)
    self.final = os.path.join(folder, name, set_files.VERSION)
    self.work = os.path.join(folder, f'.{name}')
    self._data_dir, self._paths, self._states = data_dir, paths, states
    self._digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

  def run(self, overwrite: bool, make: Callable[[], list[str]]) -> list[str]:
    """Makes the set unless it is there.

    Args:
      overwrite: whether a set that was made from something else may be replaced.
      make: makes the set, calls `finish` and returns lines to print.

    Returns:
      Lines to print.

    Raises:
      ConfigError: if another set is in its place, if another process makes it,
        or from `make`.
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
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(files_lib.lock(os.path.join(self.work, 'lock'), wait=False))
      except BlockingIOError as e:
        raise config_lib.ConfigError(f'{self.work} is being worked on by another process') from e
      return make()

  def check_room(self, size: int) -> None:
    """Raises ConfigError if the disk has no room for a set of this many bytes."""
    # An earlier command may have written some of it.
    written = sum(path.lstat().st_size for path in pathlib.Path(self.work).rglob('*'))
    outputs.check_room('--data_dir', self._data_dir, max(size - written, 0))

  def write_shards(self, shards: dict[str, tuple], workers: int, findings: str) -> str:
    """Writes the shards that an earlier command has not finished.

    Args:
      shards: arguments of `tasks.write_shard` by file name; the path follows them.
      workers: processes.
      findings: digest of the files' bytes and of the actions on them.

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
      (*arguments, os.path.join(folder, file))
      for file, arguments in shards.items()
      if file not in finished
    ]
    worker_pool.run('writing', tasks_lib.write_shard, tasks, workers)
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
