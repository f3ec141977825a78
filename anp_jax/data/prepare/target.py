"""The place of a prepared set, where it appears whole or not at all."""

from collections.abc import Callable
import json
import os
import shutil

from anp_jax import config as config_lib
from anp_jax.data.prepare import parts as parts_lib
from anp_jax.data.prepare import worker_pool

# Says in a finished set what it was made from.
_MARK = 'prepared.json'


class Target:
  """A set in the making.

  Args:
    final: its folder.
    work: the folder of its parts, on the same file system.
    digest: of all that the set depends on.
    share: of this process.
  """

  def __init__(
    self, final: str, work: str, digest: str, share: parts_lib.Share
  ):
    self.final = final
    self.work = work
    self._digest = digest
    self._share = share

  def is_finished(self) -> bool:
    """Whether the set is there, made from the same as this one."""
    try:
      with open(os.path.join(self.final, _MARK), encoding='utf-8') as f:
        return json.load(f)['digest'] == self._digest
    except (OSError, ValueError, KeyError, TypeError):
      return False

  def run(
    self, overwrite: bool, make: Callable[[worker_pool.Pool], list[str]]
  ) -> list[str]:
    """Makes the set unless it is there.

    Args:
      overwrite: whether a set that was made from something else may go.
      make: makes it, and calls `finish`; gives lines to print.

    Returns:
      Lines to print.

    Raises:
      ConfigError: if something else is in its place, or another process with
        the same number makes it, or `make` raises it.
    """
    if self.is_finished():
      return [
        f'{self.final} is made from the same files and options already; to '
        'make it again, delete it'
      ]
    if os.path.lexists(self.final) and not overwrite:
      raise config_lib.ConfigError(
        f'{self.final} was made from other files or options: give another '
        '--name, or --overwrite to replace it'
      )
    os.makedirs(self.work, exist_ok=True)
    try:
      with (
        parts_lib.lock(self.work, self._share),
        worker_pool.Pool(
          'anp_jax.data.prepare.worker', self._share.workers
        ) as pool,
      ):
        return make(pool)
    except parts_lib.Finished:
      # This process may have made the folder anew after process 0 removed it.
      shutil.rmtree(self.work, ignore_errors=True)
    except (config_lib.ConfigError, OSError):
      # Process 0 removes what this one may just be reading.
      if self._share.process_id == 0 or not self.is_finished():
        raise
    return [f'{self._share.prefix}{self.final} is finished']

  def make_all(
    self, title: str, parts: list[parts_lib.Part], pool: worker_pool.Pool
  ) -> None:
    """Makes parts; see `parts_lib.make_all`."""
    for folder in {os.path.dirname(part.out) for part in parts}:
      os.makedirs(folder, exist_ok=True)
    parts_lib.make_all(title, parts, self._share, pool, self.is_finished)

  def wait_unless_first(self, pool: worker_pool.Pool) -> None:
    """Process 0 goes on to `finish`; in others it raises Finished then."""
    if self._share.process_id:
      never = parts_lib.Part(os.path.join(self.work, 'end'), 0, dict)
      self.make_all('finishing', [never], pool)

  def finish(self, made: str) -> None:
    """Moves the folder `made` to the set's place, and removes the parts."""
    with open(os.path.join(made, _MARK), 'w', encoding='utf-8') as f:
      json.dump({'digest': self._digest}, f)
    os.makedirs(os.path.dirname(self.final), exist_ok=True)
    if os.path.lexists(self.final):  # overwrite
      old = os.path.join(self.work, 'replaced')
      shutil.rmtree(old, ignore_errors=True)
      os.rename(self.final, old)
    os.rename(made, self.final)
    shutil.rmtree(self.work, ignore_errors=True)
