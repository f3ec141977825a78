"""Addresses in object stores, and the local mirrors of their files.

An object store has no append and no rename, and most code that writes into a workdir
needs files. So a process has a mirror of a workdir in a store: a local folder whose
path implies the address. Code that prints paths, or passes them to Orbax, calls
`remote_url`; all other code sees a folder.
"""

from collections.abc import Collection
import functools
import os
import tempfile

from anp_jax.config import errors

# Else Orbax, which goes through etils, would import TensorFlow for a store, as
# no run on arrays may. etils looks once, so it is set before all else.
os.environ.setdefault('EPATH_USE_TF', 'false')

_ROOT = 'ANP_MIRRORS'  # folder of a process's mirrors, for its next program
_EXAMPLES = {'gs': 'gs://BUCKET/FOLDER', 's3': 's3://BUCKET/FOLDER'}


def scheme(path: str) -> str:
  """Returns the scheme of an address, as 'gs'; '' for a path of a machine."""
  head, mark, _ = path.partition('://')
  return head if mark else ''


def check(name: str, path: str, schemes: Collection[str] = ('gs', 's3')) -> None:
  """Refuses an address of another store or without a bucket.

  Args:
    name: name of the flag or key, for the error line.
    path: address, or path of this machine, which is valid.
    schemes: schemes of the valid stores.

  Raises:
    ConfigError: naming the flag, the path and what was expected.
  """
  kind = scheme(path)
  if not kind:
    return
  if kind not in schemes:
    expected = ' or '.join(_EXAMPLES[s] for s in schemes)
    raise errors.ConfigError(
      f'{name}={path!r}: expected a path of this machine'
      + (f' or {expected}' if expected else '')
      + errors.nearest(kind, schemes)
    )
  if not path.partition('://')[2].strip('/'):
    raise errors.ConfigError(f'{name}={path!r}: expected {_EXAMPLES[kind]}')


def check_workdir(flag: str, path: str) -> None:
  """Refuses a workdir that checkpoints cannot be written to; see `check`."""
  if scheme(path) == 's3':
    raise errors.ConfigError(
      f'{flag}={path!r}: Orbax, which writes checkpoints, renames a folder '
      'when one is whole, and s3 cannot; expected a path of this machine or '
      f'{_EXAMPLES["gs"]} (data may be on s3: config.data.path)'
    )
  check(flag, path, ('gs',))


def normalize(path: str) -> str:
  """Returns a path without `~`, '..' and a last slash; an address likewise."""
  kind = scheme(path)
  if kind:
    return f'{kind}://{_inside(path)}'
  return os.path.normpath(os.path.expanduser(path))


def mirror(path: str) -> str:
  """Returns the local folder of an address in this process."""
  kind = scheme(path)
  if not kind:
    return path
  return os.path.join(root(), kind, _inside(path))


def remote_url(text: str) -> str:
  """Returns a path or text with addresses in place of mirrored paths."""
  if root.cache_info().currsize:  # else there is no mirror
    for kind in _EXAMPLES:
      text = text.replace(os.path.join(root(), kind, ''), f'{kind}://')
  return text


def is_mirror(path: str) -> bool:
  """Returns whether a local path lies in a mirror."""
  return remote_url(path) != path


def _inside(address):
  """BUCKET/FOLDER of an address."""
  return os.path.normpath(address.partition('://')[2].strip('/'))


@functools.cache
def root() -> str:
  """Returns the folder of this process's mirrors.

  Other processes have others: one that evaluates a run which still trains must not
  remove its files.
  """
  return os.environ.pop(_ROOT, '') or tempfile.mkdtemp(prefix='anp_jax-')


def inherited() -> dict[str, str]:
  """Returns the environment in which this process's next program has the same mirrors."""
  return {_ROOT: root()} if root.cache_info().currsize else {}
