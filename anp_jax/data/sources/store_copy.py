"""Data sets in object stores: copied to this machine when they are first used.

One way for all kinds of sources: none reads objects by itself. Every start asks
the store for its list: what is new or changed is copied, what is gone is
removed. So a copy that was interrupted or killed goes on.
"""

from concurrent import futures
import contextlib
import os
import threading

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
  list_file = os.path.join(folder, f'.{base}.jsonl')
  copied = {record['name']: record['state'] for record in files.read_json_lines(list_file)}
  paths = {os.path.normpath(remote.join(target, name)) for name in objects}
  files.remove_drafts(folder)
  for place, _, names in os.walk(target):
    files.remove_drafts(place)
    # Hidden are drafts, and the records of copies of folders in this one.
    copies = {os.path.join(place, name) for name in names if not name.startswith('.')}
    for path in copies - paths:
      with contextlib.suppress(FileNotFoundError):
        os.remove(path)
  missing = {
    name: state
    for name, state in objects.items()
    if copied.get(name) != [*state] or files.state(remote.join(target, name))[0] != state[0]
  }
  if missing:
    _download(address, target, missing, list_file)


def _download(address, target, objects, list_file):
  """Copies objects, several at a time; records each at once, as the process may be killed."""
  total = sum(size for size, _ in objects.values())
  outputs.check_room('$ANP_DATA', os.path.dirname(target), total)
  progress = progress_lib.Progress(
    f'copying {address} to {target}, {total / 1e6:,.1f} MB', len(objects), log_seconds=_LOG_SECONDS
  )
  lock = threading.Lock()

  def copy(name):
    _copy_file(address, target, name, objects[name][0])
    with lock:
      files.append_json_line(list_file, {'name': name, 'state': objects[name]})

  with contextlib.closing(progress), futures.ThreadPoolExecutor(_DOWNLOADS) as pool:
    try:
      for job in futures.as_completed([pool.submit(copy, name) for name in objects]):
        job.result()
        progress.add(1)
    finally:
      pool.shutdown(cancel_futures=True)


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


def local_root(config: ml_collections.ConfigDict) -> str:
  """The folder of data sets on this machine."""
  folders = config.data.dir, os.environ.get('ANP_DATA', '')
  folder = next((f for f in folders if f and not urls.scheme(f)), '')
  folder = folder or os.path.join(config_lib.cache_dir(), 'data')
  return os.path.abspath(os.path.expanduser(folder))
