"""Finds and reads recipes: the files of configs/, or of an installed package.

A wheel holds configs/ as `anp_jax.recipes`. The name configs/NAME.py means the
shipped recipe wherever no file of that path is in the working directory.
"""

import importlib.util
import os
import pathlib
import sys

import ml_collections

from anp_jax.config import errors

_FOLDER = 'configs'
_RUN_FILE = 'config.json'  # in its workdir
_MODULE = 'anp_config'
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def shipped() -> pathlib.Path:
  """Returns the folder of the recipes that came with this package."""
  installed = _PACKAGE / 'recipes'
  return installed if installed.is_dir() else _PACKAGE.parent / _FOLDER


def find(path: str) -> str:
  """Returns the path of a recipe's file.

  Args:
    path: path as typed; an existing file takes precedence.

  Raises:
    ConfigError: if there is no such file, with the nearest file, or if it is not
      Python; for the config of a run, with what to type.
  """
  folder, name = os.path.split(os.path.normpath(path))
  workdir = (folder or '.') if name == _RUN_FILE else path
  if os.path.isfile(os.path.join(workdir, _RUN_FILE)):
    raise errors.ConfigError(
      f'--config={path} is the config of a run, expected a recipe (.py): '
      f'--workdir={workdir} --mode=evaluate evaluates the run; to resume it, '
      'type the command that it was started with'
    )
  if os.path.isfile(path):
    if not path.endswith('.py'):
      raise errors.ConfigError(
        f'--config={path} is not a recipe: expected a Python file (.py), as in {_FOLDER}/'
      )
    return path
  file = shipped() / name
  if folder == _FOLDER and file.is_file():
    return str(file)
  shipped_names = [f'{_FOLDER}/{recipe.name}' for recipe in shipped().glob('*.py')]
  names = [*_names(os.path.dirname(path)), *sorted(shipped_names)]
  raise errors.ConfigError(f'--config: no file {path!r}{errors.nearest(path, names)}')


def read(path: str, variant: str) -> ml_collections.ConfigDict:
  """Returns the config of a recipe's `get_config(variant)`, unresolved.

  The folder of the recipe is on Python's path meanwhile, so that the recipe may
  import helpers from it.

  Args:
    path: path of the file, from `find`.
    variant: name of a variant; '': the plain recipe.

  Raises:
    ConfigError: for a file without `get_config`, or any error in it.
  """
  spec = importlib.util.spec_from_file_location(_MODULE, path)
  assert spec is not None and spec.loader is not None  # the suffix is .py
  module = importlib.util.module_from_spec(spec)
  folder = os.path.dirname(os.path.abspath(path))
  sys.path.insert(0, folder)
  sys.modules[_MODULE] = module  # dataclasses look their module up there
  try:
    spec.loader.exec_module(module)
    if not callable(getattr(module, 'get_config', None)):
      raise errors.ConfigError(
        f'--config={path}: it has no get_config; expected a recipe, with '
        f"get_config(variant='') that returns a config; see {_FOLDER}/"
      )
    config = module.get_config(variant)
  except errors.ConfigError:
    raise
  except Exception as e:  # whatever the user's file raises
    text = str(e).splitlines()[0] if str(e) else ''
    raise errors.ConfigError(f'{path}: {type(e).__name__}: {text}') from e
  finally:
    sys.modules.pop(_MODULE, None)
    if folder in sys.path:
      sys.path.remove(folder)
  if not isinstance(config, ml_collections.ConfigDict):
    raise errors.ConfigError(f'{path}: get_config must return a ConfigDict')
  return config


def _names(folder):
  """The Python files of a folder, with its name before theirs."""
  if not os.path.isdir(folder or '.'):
    return []
  return [os.path.join(folder, f) for f in sorted(os.listdir(folder or '.')) if f.endswith('.py')]
