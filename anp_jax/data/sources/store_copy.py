"""Data sets in object stores: copied to this machine when they are first used.

One way for all kinds of sources: none reads objects by itself. Every start asks
the store for its list: what is new or changed is copied, what is gone is
removed. So a copy that was interrupted goes on.
"""

from concurrent import futures
import contextlib
import os

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import outputs, urls
from anp_jax.system import files, progress as progress_lib, remote

_FOLDER = 'remote'  # in the folder of data sets
_DOWNLOADS = 16  # at a time: a small object takes a store 50 ms, in any number
_LOG_SECONDS = 30.0


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
      _update(address, target, objects)
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


def _update(address, target, objects):
  """Makes the copy of an address equal to what the store has, as `remote.sizes`."""
  folder, base = os.path.split(target)
  list_file = os.path.join(folder, f'.{base}.json')
  copied = files.read_json_object(list_file)
  missing = {
    name: size
    for name, (size, tag) in objects.items()
    if copied.get(name) != [size, tag] or _size(remote.join(target, name)) != size
  }
  gone = [name for name in copied if name not in objects]
  if not missing and not gone:
    return
  for name in gone:
    with contextlib.suppress(FileNotFoundError):
      os.remove(remote.join(target, name))
  arrived: set[str] = set()
  try:
    _download(address, target, missing, arrived)
  finally:
    # A file that did not arrive may be an older one of the same size.
    stale = missing.keys() - arrived
    files.write_json(list_file, {n: state for n, state in objects.items() if n not in stale})


def _download(address, target, sizes, arrived):
  """Copies objects of these sizes by name, several at a time; adds those that arrive."""
  total = sum(sizes.values())
  outputs.check_room('$ANP_DATA', os.path.dirname(target), total)
  progress = progress_lib.Progress(
    f'copying {address} to {target}, {total / 1e6:,.1f} MB', len(sizes), log_seconds=_LOG_SECONDS
  )

  def copy(name, size):
    _copy_file(address, target, name, size)
    arrived.add(name)

  with futures.ThreadPoolExecutor(_DOWNLOADS) as pool:
    jobs = [pool.submit(copy, *item) for item in sizes.items()]
    try:
      for job in futures.as_completed(jobs):
        job.result()
        progress.add(1)
    finally:
      pool.shutdown(cancel_futures=True)
      progress.close()


def _copy_file(address, target, name, size):
  """Copies an object; it appears whole or not at all."""
  address, target = remote.join(address, name), remote.join(target, name)
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


def _size(path):
  """Bytes of a file; -1 if there is none."""
  try:
    return os.path.getsize(path)
  except OSError:
    return -1


def local_root(config: ml_collections.ConfigDict) -> str:
  """The folder of data sets on this machine."""
  folders = config.data.dir, os.environ.get('ANP_DATA', '')
  folder = next((f for f in folders if f and not urls.scheme(f)), '')
  folder = folder or os.path.join(config_lib.cache_dir(), 'data')
  return os.path.abspath(os.path.expanduser(folder))
