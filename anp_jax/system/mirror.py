"""A run's workdir in an object store: its small files, kept in step.

Checkpoints go to the store by Orbax. All other files are written in a local
mirror, as those of any workdir, and uploaded whole: before the first step, with
each checkpoint and evaluation in the background, and when the command ends. A
command begins by fetching what is there. So the store is what counts; a process
that is killed loses the lines since its last upload, and no step.
"""

import atexit
from concurrent import futures
import errno
import os
import re
import shutil

from absl import logging

from anp_jax.config import urls
from anp_jax.system import error_lines, files, remote

_CHECKPOINTS = ('checkpoints', 'best')
# Written to the store by Orbax, or large and never read again.
_NOT_FETCHED = (*_CHECKPOINTS, 'damaged', 'profile')
_COMMITTED = 'commit_success.txt'  # Orbax's mark of a whole checkpoint
_SCORES = ('metrics', 'metrics')  # the file of a best checkpoint's metric
_DOWNLOADS = 16  # at a time: a small object takes a store 50 ms, in any number
_mirrors: dict[str, '_Mirror'] = {}  # by local folder


class UploadError(OSError):
  """Files that could not be uploaded; they are still in the mirror."""


def fetch(workdir: str, flag: str = '--workdir') -> str:
  """Makes the mirror of a workdir in a store equal to what is there.

  Of its checkpoints, the folders are made.

  Args:
    workdir: an address, or a local folder, for which nothing is done.
    flag: that names it, for error lines.

  Returns:
    The local folder that stands for it.

  Raises:
    ConfigError: if the address cannot be a workdir, or cannot be read.
  """
  urls.check_workdir(flag, workdir)
  if not urls.scheme(workdir):
    return workdir
  if not _mirrors:
    atexit.register(remove)
  folder = urls.mirror(workdir)
  _mirrors[folder] = _Mirror(urls.normal(workdir), folder)
  _mirrors[folder].fetch()
  return folder


def fetch_checkpoint(path: str) -> str:
  """Fetches the workdir of a checkpoint, or of a folder of checkpoints.

  Args:
    path: of the checkpoint, of its workdir or of a folder between the two.

  Returns:
    The local path that stands for it; and errors: see `fetch`.
  """
  if not urls.scheme(path):
    return path
  path = urls.normal(path)
  fetch(re.sub(r'/(checkpoints|best)(/\d+)?$', '', path), '--checkpoint')
  return urls.mirror(path)


def begin_upload(workdir: str) -> None:
  """Starts to upload what changed in a mirror; nothing for other folders.

  A failure is logged: the next upload tries again.
  """
  if workdir in _mirrors:
    _mirrors[workdir].begin_upload()


def upload(workdir: str) -> None:
  """Uploads what changed in a mirror; nothing for other folders.

  Raises:
    UploadError: if the store does not take it.
  """
  if workdir in _mirrors:
    _mirrors[workdir].upload()


def remove() -> None:
  """Removes the mirrors of this process, but for what was not uploaded."""
  if not _mirrors:
    return
  if not any(mirror.is_behind for mirror in _mirrors.values()):
    shutil.rmtree(urls.root(), ignore_errors=True)
  _mirrors.clear()


class _Mirror:
  """One workdir.

  Attributes:
    is_behind: whether the last upload failed.
  """

  def __init__(self, address, folder):
    self._address, self._folder = address, folder
    self._stored = {}  # path below the folder: its time and size when stored
    self._uploader = futures.ThreadPoolExecutor(1)
    self._pending = None
    self.is_behind = False

  def fetch(self):
    shutil.rmtree(self._folder, ignore_errors=True)
    objects = [name for name in remote.sizes(self._address) if name]
    names = [n for n in objects if n.partition('/')[0] not in _NOT_FETCHED]
    names += self._make_checkpoint_folders(objects)
    with futures.ThreadPoolExecutor(_DOWNLOADS) as pool:
      list(pool.map(self._download, names))
    self._stored = self._local_files()

  def begin_upload(self):
    if self._pending is None or self._pending.done():
      self._pending = self._uploader.submit(self._try_upload)

  def upload(self):
    if self._pending is not None:
      self._pending.result()
    self._upload()

  def _make_checkpoint_folders(self, objects):
    """Makes the folders of whole checkpoints; gives the files to fetch."""
    paths = [tuple(name.split('/')) for name in objects]
    committed = {p[:2] for p in paths if len(p) == 3 and p[2] == _COMMITTED}
    scores = []
    for path in paths:
      if path[0] in _CHECKPOINTS and path[:2] in committed:
        folder = os.path.join(self._folder, *path[:-1])
        os.makedirs(folder, exist_ok=True)
        if path[2:] == _SCORES:
          scores.append('/'.join(path))
    return scores

  def _download(self, name):
    address = remote.join(self._address, name)
    try:
      content = remote.file_system(address).cat_file(address)
    except Exception as e:  # noqa: BLE001 - each store has errors of its own
      raise remote.unreadable(address, e) from e
    path = os.path.join(self._folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files.write_atomic(path, content)

  def _try_upload(self):
    try:
      self._upload()
    except UploadError as e:
      logging.error('%s; trying again at the next checkpoint', e.strerror)

  def _upload(self):
    """Uploads files that are new or changed; removes those that are gone."""
    store = remote.file_system(self._address)
    present = self._local_files()
    self.is_behind = True
    try:
      for name, state in present.items():
        if self._stored.get(name) != state:
          with open(os.path.join(self._folder, name), 'rb') as file:
            store.pipe_file(remote.join(self._address, name), file.read())
          self._stored[name] = state
      for name in self._stored.keys() - present.keys():
        store.rm_file(remote.join(self._address, name))
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
    result = {}
    for folder, _, names in os.walk(self._folder):
      for name in names:
        if name.startswith('.'):  # a draft
          continue
        path = os.path.join(folder, name)
        try:
          status = os.stat(path)
        except FileNotFoundError:  # a draft of a library
          continue
        inside = os.path.relpath(path, self._folder)
        result[inside] = status.st_mtime_ns, status.st_size
    return result
