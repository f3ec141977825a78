"""Files in object stores: Google Cloud Storage and S3, through fsspec."""

import os
import shutil
from typing import TYPE_CHECKING, Any

from anp_jax import config as config_lib
from anp_jax.config import urls
from anp_jax.system import error_lines

if TYPE_CHECKING:
  from etils import epath

_PACKAGES = {'gs': 'gcsfs', 's3': 's3fs'}


def file_system(address: str) -> Any:
  """Returns the fsspec file system of an address.

  Raises:
    ConfigError: if its package is not installed.
  """
  import fsspec

  # What another process, or Orbax past fsspec, has written must be seen.
  for protocol in ('gs', 'gcs', 's3'):
    fsspec.config.conf.setdefault(protocol, {}).setdefault('use_listings_cache', False)
  kind = urls.scheme(address)
  try:
    return fsspec.filesystem(kind)
  except ImportError as e:
    raise config_lib.ConfigError(
      f'{address}: needs the package {_PACKAGES[kind]}, which is not installed:'
      f" pip install '.[{kind}]'"
    ) from e


def path(name: str) -> 'epath.Path':
  """Returns a path, local or in a store, with the methods of pathlib.

  Args:
    name: path, address, or path in a mirror, which stands for its address.

  Raises:
    ConfigError: if a package is missing; see `file_system`.
  """
  name = urls.remote_url(name)
  if urls.scheme(name):
    file_system(name)
  from etils import epath  # takes half a second

  return epath.Path(name)


def sizes(address: str) -> dict[str, tuple[int, str]]:
  """Returns the objects below an address, or the object at it.

  Returns:
    Path below the address ('' for one object) to (bytes, version tag).

  Raises:
    ConfigError: naming the address, if it cannot be read, or an object whose name leads
      out of a folder that it is copied to.
  """
  store = file_system(address)
  try:
    objects = store.find(address, detail=True)
  except Exception as e:  # noqa: BLE001 - each store has errors of its own
    raise unreadable(address, e) from e
  prefix = store._strip_protocol(address).rstrip('/')
  result = {
    name.removeprefix(prefix).lstrip('/'): (info['size'], _tag(info))
    for name, info in objects.items()
    if info['type'] == 'file' and not name.endswith('/')
  }
  for name in result:
    if '..' in name.split('/'):
      raise config_lib.ConfigError(f"{address} has the object {name!r}: expected no '..' in it")
  return result


def join(address: str, name: str) -> str:
  """Returns the address of an object that `sizes` names."""
  return f'{address.rstrip("/")}/{name}' if name else address


def unreadable(address: str, error: Exception) -> config_lib.ConfigError:
  """Returns the one-line error of an address that cannot be read."""
  return config_lib.ConfigError(f'{address} cannot be read: {error_lines.typed_line(error)}')


def move(folder: str, target: str) -> None:
  """Moves a folder to a new path within one store or disk."""
  if urls.scheme(folder):
    file_system(folder).mv(folder, target, recursive=True)
  else:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.move(folder, target)


def _tag(info):
  """A tag that changes with an object's content, as far as its store has one."""
  names = ('etag', 'ETag', 'md5Hash', 'mtime', 'created')
  return str(next((info[n] for n in names if info.get(n)), ''))
