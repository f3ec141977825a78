"""Where the recipes are: the files of configs/, or of an installed package.

A wheel holds configs/ as `anp_jax.recipes`. The name configs/NAME.py means the
shipped recipe wherever no file of that path is in the working directory.
"""

import os
import pathlib

from anp_jax.config import errors

_FOLDER = 'configs'
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def shipped() -> pathlib.Path:
  """Returns the folder of the recipes that this package came with."""
  installed = _PACKAGE / 'recipes'
  return installed if installed.is_dir() else _PACKAGE.parent / _FOLDER


def find(path: str) -> str:
  """Returns the path of a recipe's file.

  Args:
    path: as typed; a file there is taken first.

  Raises:
    ConfigError: if there is no such file, with the nearest that there is.
  """
  if os.path.isfile(path):
    return path
  folder, name = os.path.split(os.path.normpath(path))
  file = shipped() / name
  if folder == _FOLDER and file.is_file():
    return str(file)
  nearby = _names(os.path.dirname(path))
  names = nearby + [n for n in _shipped_names() if n not in nearby]
  raise errors.ConfigError(
    f'--config: no file {path!r}{errors.nearest(path, names)}'
  )


def _shipped_names():
  """The names of the shipped recipes, as they are typed."""
  return sorted(f'{_FOLDER}/{file.name}' for file in shipped().glob('*.py'))


def _names(folder):
  """The Python files of a folder, with its name before theirs."""
  if not os.path.isdir(folder or '.'):
    return []
  return [
    os.path.join(folder, f)
    for f in sorted(os.listdir(folder or '.'))
    if f.endswith('.py')
  ]
