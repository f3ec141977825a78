"""A run's workdir in an object store: its small files, uploaded at each save.

Checkpoints go to the store by Orbax. All other files are written to a local
mirror, as those of any workdir, and uploaded whole: before the first step, with
each checkpoint in the background, and when the command ends. A command begins
by fetching what is there. So the store is what counts; a process that is killed
loses the lines since its last save, and no step.
"""

import atexit
from concurrent import futures
import contextlib
import errno
import os
import pathlib
import re
import shutil

from absl import logging

from anp_jax.config import urls
from anp_jax.system import error_lines, remote

# Written to the store by Orbax, or large and never read again.
_NOT_FETCHED = ('checkpoints', 'best', 'damaged', 'profile')
# Orbax's mark of a whole checkpoint.
_COMMITTED = re.compile(r'((?:checkpoints|best)/\d+)/commit_success\.txt')
_mirrors: dict[str, '_Mirror'] = {}  # by local folder


class UploadError(OSError):
  """Files that could not be uploaded; they are still in the mirror."""


def fetch(workdir: str, flag: str = '--workdir') -> str:
  """Makes the mirror of a workdir in a store equal to the store.

  Checkpoints stay in the store; the mirror has empty folders named like them.

  Args:
    workdir: address, or local folder, for which nothing is done.
    flag: flag that names the workdir, for error lines.

  Returns:
    Local folder that stands for the workdir.

  Raises:
    ConfigError: if the address cannot be a workdir, or cannot be read.
  """
  urls.check_workdir(flag, workdir)
  if not urls.scheme(workdir):
    return workdir
  if not _mirrors:
    atexit.register(remove)
  folder = urls.mirror(workdir)
  _mirrors[folder] = _Mirror(urls.normalize(workdir), folder)
  return folder


def fetch_checkpoint(path: str) -> str:
  """Fetches the workdir of a checkpoint, or of a folder of checkpoints.

  Args:
    path: path of the checkpoint, of its workdir or of a folder between the two.

  Returns:
    Local path that stands for `path`. For errors see `fetch`.
  """
  if urls.scheme(path):
    path = urls.normalize(path)
    fetch(re.sub(r'/(checkpoints|best)(/\d+)?$', '', path), '--checkpoint')
  return urls.mirror(path)


def begin_upload(workdir: str) -> None:
  """Starts to upload changed files of a mirror; does nothing for other folders.

  A failure is logged: the next upload tries again.
  """
  if workdir in _mirrors:
    _mirrors[workdir].begin_upload()


def upload(workdir: str) -> None:
  """Uploads changed files of a mirror; does nothing for other folders.

  Raises:
    UploadError: if the store refuses a file.
  """
  if workdir in _mirrors:
    _mirrors[workdir].upload()


def remove() -> None:
  """Removes the mirrors of this process, unless files were not uploaded."""
  if _mirrors and not any(mirror.is_behind for mirror in _mirrors.values()):
    shutil.rmtree(urls.root(), ignore_errors=True)
  _mirrors.clear()


class _Mirror:
  """The mirror of one workdir.

  Attributes:
    is_behind: whether the last upload failed.
  """

  def __init__(self, address, folder):
    self._address, self._folder = address, pathlib.Path(folder)
    self._fetch()
    self._stored = self._local_files()
    self._executor = futures.ThreadPoolExecutor(1)
    self._pending = self._executor.submit(lambda: None)
    self.is_behind = False

  def begin_upload(self):
    if self._pending.done():
      self._pending = self._executor.submit(self._try_upload)

  def upload(self):
    futures.wait([self._pending])
    self._upload()

  def _fetch(self):
    shutil.rmtree(self._folder, ignore_errors=True)
    objects = remote.sizes(self._address)
    names = [n for n in objects if n and n.partition('/')[0] not in _NOT_FETCHED]
    for mark in filter(None, map(_COMMITTED.fullmatch, objects)):
      (self._folder / mark[1] / 'state').mkdir(parents=True)
      score = f'{mark[1]}/metrics/metrics'  # only a best checkpoint has one
      names += [score] if score in objects else []
    paths = [str(self._folder / name) for name in names]
    try:
      remote.file_system(self._address).get([f'{self._address}/{n}' for n in names], paths)
    except Exception as e:  # noqa: BLE001 - each store has errors of its own
      raise remote.unreadable(self._address, e) from e

  def _try_upload(self):
    try:
      self._upload()
    except UploadError as e:
      logging.error('%s; trying again at the next checkpoint', e.strerror)

  def _upload(self):
    """Uploads files that are new or changed; removes those that are gone."""
    store, present = remote.file_system(self._address), self._local_files()
    self.is_behind = True
    try:
      for name, version in present.items():
        if self._stored.get(name) != version:
          store.pipe_file(f'{self._address}/{name}', (self._folder / name).read_bytes())
          self._stored[name] = version
      for name in self._stored.keys() - present.keys():
        store.rm_file(f'{self._address}/{name}')
        del self._stored[name]
    except Exception as e:  # noqa: BLE001 - each store has errors of its own
      raise UploadError(
        errno.EIO,
        f'{self._address}: {name} could not be uploaded: '
        f'{error_lines.typed_line(e)}; it is in {self._folder}',
      ) from e
    self.is_behind = False

  def _local_files(self):
    """Path below the folder to (time, size), of files that are whole."""
    versions = {}
    for folder, _, names in os.walk(self._folder):
      for name in names:
        path = os.path.join(folder, name)
        # A draft begins with a dot, or is gone by now.
        with contextlib.suppress(FileNotFoundError):
          if not name.startswith('.'):
            status = os.stat(path)
            versions[os.path.relpath(path, self._folder)] = status.st_mtime_ns, status.st_size
    return versions
