"""Data sets in object stores: copied to this machine when they are first used.

One way for all kinds of sources: none reads objects by itself. Every start asks
the store for its list: what is new or changed is copied, what is gone is
removed. So a copy that was interrupted goes on.
"""

from concurrent import futures
import contextlib
import os
import shutil
import time

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import urls
from anp_jax.system import files, remote

_FOLDER = 'remote'  # in the folder of data sets
_DOWNLOADS = 16  # at a time: a small object takes a store 50 ms, in any number
_REPORT = 30.0  # seconds between two lines


def path(name: str, address: str, config: ml_collections.ConfigDict) -> str:
  """The local path of data, after a copy if they lie in a store.

  Args:
    name: config key or flag, for error lines.
    address: address of a folder or a file in a store; or a local path, which is
      returned.
    config: the run's config; the copy lies in its folder of data sets.

  Raises:
    ConfigError: if there is nothing, or it cannot be copied.
  """
  urls.check(name, address)
  if not urls.scheme(address):
    return address
  address = urls.normalize(address)
  target = os.path.join(local_root(config), _FOLDER, *address.split('://', 1))
  parent, base = os.path.split(target)
  objects = remote.sizes(address)  # may take minutes: all processes at once
  if not objects:
    raise config_lib.ConfigError(f'{name}: there is nothing at {address}')
  try:
    os.makedirs(parent, exist_ok=True)
    with files.lock(os.path.join(parent, f'.{base}.lock')):
      _Copy(name, address, target).update(objects)
  except OSError as e:  # a full disk, say
    raise config_lib.ConfigError(
      f'{name}: the copy of {address} cannot be written to {target}: '
      f'{e.strerror or e}; expected $ANP_DATA to be another folder'
    ) from e
  return target


def prepared_path(directory: str, set_name: str, config: ml_collections.ConfigDict) -> str:
  """The local folder of data sets that has a prepared one.

  Args:
    directory: folder of data sets: an address, or a local path, which is returned.
    set_name: NAME or NAME/CONFIG, with or without :VERSION; the one set that is
      copied from a store.
    config: the run's config.

  Raises:
    ConfigError: as `path`.
  """
  if not urls.scheme(directory):
    return directory
  inside = set_name.replace(':', '/')
  folder = path('config.data.dir', f'{urls.normalize(directory)}/{inside}', config)
  return folder.removesuffix('/' + inside)


class _Copy:
  """The copy of one address."""

  def __init__(self, name, address, target):
    self._name, self._address, self._target = name, address, target
    folder, base = os.path.split(target)
    self._list_file = os.path.join(folder, f'.{base}.json')

  def update(self, objects):
    """Makes the copy equal to what the store has, as `remote.sizes`."""
    copied = files.read_json_object(self._list_file)
    missing = {
      name: size
      for name, (size, tag) in objects.items()
      if copied.get(name) != [size, tag] or self._size(name) != size
    }
    gone = [name for name in copied if name not in objects]
    if not missing and not gone:
      return
    for name in gone:
      with contextlib.suppress(FileNotFoundError):
        os.remove(self._path(name))
    try:
      if missing:
        self._download(missing)
    finally:
      files.write_json(
        self._list_file,
        {name: state for name, state in objects.items() if self._size(name) == state[0]},
      )

  def _download(self, sizes):
    total, done, start = sum(sizes.values()), 0, time.monotonic()
    self._check_room(total)
    print(
      f'copying {self._address} to {self._target}: {len(sizes):,} files, {total / 1e6:,.1f} MB',
      flush=True,
    )
    report = start + _REPORT
    with futures.ThreadPoolExecutor(_DOWNLOADS) as pool:
      jobs = [pool.submit(self._copy_file, *item) for item in sizes.items()]
      try:
        for job in futures.as_completed(jobs):
          done += job.result()
          if time.monotonic() > report:
            print(f'copied {done / max(total, 1):.0%}', flush=True)
            report += _REPORT
      finally:
        pool.shutdown(cancel_futures=True)
    print(f'copied in {time.monotonic() - start:.1f} s', flush=True)

  def _copy_file(self, name, size):
    """Copies an object; it appears whole or not at all. Returns its size."""
    address, target = remote.join(self._address, name), self._path(name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    store = remote.file_system(address)
    with files.atomic_path(target) as draft:
      try:
        store.get_file(address, draft)
      except Exception as e:  # noqa: BLE001 - each store has errors of its own
        raise remote.unreadable(address, e) from e
      copied = os.path.getsize(draft)
      if copied != size:
        raise config_lib.ConfigError(
          f'{address}: {copied:,} bytes were copied of {size:,}; start again'
        )
    return size

  def _check_room(self, total):
    folder = os.path.dirname(self._target)
    free = shutil.disk_usage(folder).free
    if free < total:
      raise config_lib.ConfigError(
        f'{self._name}: {self._address} takes {total / 1e9:.1f} GB, and '
        f'{free / 1e9:.1f} are free in {folder}; expected $ANP_DATA to be a '
        'folder with room'
      )

  def _path(self, name):
    return os.path.join(self._target, name) if name else self._target

  def _size(self, name):
    """Bytes of a file of the copy; -1 if there is none."""
    try:
      return os.path.getsize(self._path(name))
    except OSError:
      return -1


def local_root(config: ml_collections.ConfigDict) -> str:
  """The folder of data sets on this machine."""
  folders = config.data.dir, os.environ.get('ANP_DATA', '')
  folder = next((f for f in folders if f and not urls.scheme(f)), '')
  folder = folder or os.path.join(config_lib.cache_dir(), 'data')
  return os.path.abspath(os.path.expanduser(folder))
