"""The place of a prepared set, where it appears whole or not at all."""

from collections.abc import Callable
import json
import os
import shutil

from anp_jax import config as config_lib
from anp_jax.data.prepare import parts as parts_lib
from anp_jax.data.prepare import worker_pool
from anp_jax.system import interrupts

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
    self._outdated = None  # mark of a set that is to be replaced
    self._failures = None
    self._own = self._before = ()

  def is_finished(self) -> bool:
    """Whether the set is there, made from the same as this one."""
    mark = self._mark()
    return mark is not None and mark != self._outdated

  def run(
    self,
    overwrite: bool,
    make: Callable[[worker_pool.Pool], list[str]],
    changed: Callable[[], str | None] = lambda: None,
  ) -> list[str]:
    """Makes the set unless it is there.

    Args:
      overwrite: whether a set that was made from something else may go.
      make: makes it, and calls `finish`; gives lines to print.
      changed: the first of its files that has changed since the set that is
        there was made; it may take long.

    Returns:
      Lines to print.

    Raises:
      ConfigError: if something else is in its place, or another process with
        the same number makes it, or `make` raises it.
    """
    mark = self._mark()
    file = changed() if mark else None
    if file:
      if not overwrite:
        raise config_lib.ConfigError(
          f'{self.final} was made before some of its files changed (first '
          f'{file}): --overwrite makes it again'
        )
      self._outdated = mark
    elif mark:
      return [
        f'{self.final} is made from the same files and options already; to '
        'make it again, delete it'
      ]
    if os.path.lexists(self.final) and not overwrite:
      raise config_lib.ConfigError(
        f'{self.final} was made from other files or options, or by an '
        'earlier version: give another --name, or --overwrite to replace it'
      )
    os.makedirs(self.work, exist_ok=True)
    try:
      with parts_lib.lock(self.work, self._share):
        return self._run(make)
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
    parts_lib.make_all(title, parts, self._share, pool, self._look)

  def verify(
    self, title: str, parts: list[parts_lib.Part], pool: worker_pool.Pool
  ) -> None:
    """Does the tasks of the parts that are there; see `parts_lib.verify`."""
    for folder in {os.path.dirname(part.out) for part in parts}:
      os.makedirs(folder, exist_ok=True)
    parts_lib.verify(title, parts, self._share, pool)

  def agree(self, found: str) -> str:
    """The folder of what depends on what was found in the files.

    A process that found something else has another, by which each notices.

    Args:
      found: digest of it.
    """
    self._own = f'{self._digest[:16]}-{found[:16]}'
    os.makedirs(os.path.join(self.work, self._own), exist_ok=True)
    if self._share.process_id == 0:
      for name in self._others() & self._before:
        shutil.rmtree(os.path.join(self.work, name), ignore_errors=True)
    return os.path.join(self.work, self._own)

  def wait_unless_first(self, pool: worker_pool.Pool) -> None:
    """Process 0 goes on to `finish`; in others it raises Finished then."""
    if self._share.process_id:
      never = parts_lib.Part(os.path.join(self.work, 'end'), 0, dict)
      self.make_all('finishing', [never], pool)

  def finish(self, made: str, files_state: str = '') -> None:
    """Moves the folder `made` to the set's place, and removes the parts.

    Args:
      made: folder.
      files_state: digest of what tells that files change; by it a set that was
        made again differs from the one before.
    """
    mark = {'digest': self._digest}
    if files_state:
      mark['files_state'] = files_state
    with open(os.path.join(made, _MARK), 'w', encoding='utf-8') as f:
      json.dump(mark, f)
    os.makedirs(os.path.dirname(self.final), exist_ok=True)
    if os.path.lexists(self.final):  # overwrite
      old = os.path.join(self.work, 'replaced')
      shutil.rmtree(old, ignore_errors=True)
      os.rename(self.final, old)
    os.rename(made, self.final)
    shutil.rmtree(self.work, ignore_errors=True)

  def _run(self, make):
    self._before = set(os.listdir(self.work))
    self._failures = parts_lib.Failures(self.work, self._share)
    interrupts.before_leaving(self._tell_of_interrupt)
    try:
      with worker_pool.Pool(
        'anp_jax.data.prepare.worker', self._share.workers
      ) as pool:
        return make(pool)
    except parts_lib.Finished:
      raise
    except BaseException as e:  # of whatever it dies, the others wait for it
      if not self.is_finished():
        self._failures.tell(e)
      raise

  def _tell_of_interrupt(self):
    if not self.is_finished():
      self._failures.tell(KeyboardInterrupt())

  def _mark(self):
    """The mark of a set that is there with this digest, else None."""
    try:
      with open(os.path.join(self.final, _MARK), encoding='utf-8') as f:
        mark = json.load(f)
      return mark if mark['digest'] == self._digest else None
    except (OSError, ValueError, KeyError, TypeError):
      return None

  def _look(self):
    """Whether the set is there; raises ConfigError where it cannot come."""
    if self.is_finished():
      return True
    self._failures.check()
    if self._own and self._others() - self._before:
      raise config_lib.ConfigError(
        'files changed while they were examined: start all processes again'
      )
    return False

  def _others(self):
    """Folders of `agree` for the same set with other findings."""
    try:
      names = os.listdir(self.work)
    except FileNotFoundError:
      return set()  # it goes when the set is finished
    start = f'{self._digest[:16]}-'
    return {n for n in names if n.startswith(start) and n != self._own}
