"""Checks of the files and folders that a command writes, before heavy imports."""

from collections.abc import Sequence
import os
import shutil
import tempfile

import ml_collections

from anp_jax.config import errors, urls


def check_folder(flag: str, path: str) -> None:
  """Refuses an output folder that cannot be created or written to.

  Args:
    flag: flag that names the folder, with its dashes.
    path: path of the folder, which need not exist.

  Raises:
    ConfigError: naming the flag, and the file or folder at fault.
  """
  urls.check(flag, path, ())
  place = _existing(path)
  if not os.path.isdir(place):
    where = '' if place == path else f': {place}'
    raise errors.ConfigError(f'{flag}={path!r}{where} is a file, expected a folder')
  _probe(flag, path, place, 'folder')


def check_apart(
  flag: str, path: str, config: ml_collections.ConfigDict, around: bool = False
) -> None:
  """Refuses an output folder inside the data folder, where it would be a class.

  Args:
    flag: flag that names the output folder, with its dashes.
    path: path of the output folder.
    config: config, whose data are checked if they are a folder of images.
    around: whether the output may not lie around the data either.

  Raises:
    ConfigError: naming the flag and both folders.
  """
  if config.data.source != 'folder':
    return
  output, data = urls.remote_url(path), urls.normalize(config.data.path)
  if bool(urls.scheme(output)) != bool(urls.scheme(data)):
    return
  paths = [p.replace('://', '/') for p in (output, data)]
  if not urls.scheme(output):
    paths = [os.path.realpath(p) for p in paths]
  common = os.path.commonpath(paths)
  if common == paths[1] or around and common == paths[0]:
    how = 'inside' if common == paths[1] else 'around'
    raise errors.ConfigError(
      f'{flag}={output} is {how} config.data.path={config.data.path}, '
      'where each folder counts as a class; expected a folder outside it'
    )


def check_file(flag: str, path: str, suffixes: Sequence[str] = ()) -> None:
  """Refuses an output file that cannot be written or has an unknown suffix.

  Args:
    flag: flag that names the file, with its dashes.
    path: path of the file; an existing file will be replaced.
    suffixes: suffixes of the known formats, such as '.png'; (): any.

  Raises:
    ConfigError: naming the flag, and the file or folder at fault.
  """
  urls.check(flag, path, ())
  folder = os.path.dirname(path) or '.'
  if os.path.isdir(path) or not os.path.isdir(folder):
    what = 'a folder' if os.path.isdir(path) else f'{folder} is no folder'
    raise errors.ConfigError(f'{flag}={path!r}: {what}, expected a file to write')
  suffix = os.path.splitext(path)[1].lower()
  if suffixes and suffix not in suffixes:
    # A format is not guessed: the file would lie under a name of another one.
    raise errors.ConfigError(
      f'{flag}={path!r}: expected a name that ends in '
      f'{" or ".join(suffixes)}{errors.nearest(suffix, suffixes)}'
    )
  if os.path.exists(path) and not os.access(path, os.W_OK):
    _refuse(flag, path, path, 'place')
  if not os.path.exists(path) or os.path.isfile(path):  # and no device, no pipe
    _probe(flag, path, folder, 'place')


def check_room(flag: str, path: str, size: int) -> None:
  """Refuses a path whose disk has too little free space.

  Args:
    flag: flag that names the path, with its dashes.
    path: path of the file or folder, which need not exist.
    size: bytes to write.

  Raises:
    ConfigError: naming the flag, the free space and the size.
  """
  free = shutil.disk_usage(_existing(path)).free
  if size > free:
    raise errors.ConfigError(
      f'{flag}={path!r}: {size / 1e6:,.1f} MB are to be written, and its disk '
      f'has {free / 1e6:,.1f} MB of room; choose another place'
    )


def _existing(path):
  """The path, or the nearest existing folder above it."""
  while not os.path.lexists(path):
    path = os.path.dirname(os.path.abspath(path))
  return path


def _probe(flag, path, folder, what):
  """Writes a file without a name in a folder: permissions do not tell everything."""
  try:
    if not os.access(folder, os.W_OK | os.X_OK):
      _refuse(flag, path, folder, what)
    with tempfile.TemporaryFile(dir=folder) as file:
      file.write(b'\0')
  except OSError as e:
    _refuse(flag, path, folder, what, f': {e.strerror}')


def _refuse(flag, path, place, what, reason=''):
  raise errors.ConfigError(
    f'{flag}={path!r}: {place} cannot be written to{reason}; choose another {what}'
  )
