"""The folders of a tree that may be classes, and those that programs leave."""

import os

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib

# In lower case: of macOS, Synology, QNAP, Windows, disks and Python.
_FOREIGN = (
  '__macosx',
  '@eadir',
  '#recycle',
  '@recycle',
  '$recycle.bin',
  'system volume information',
  'lost+found',
  '__pycache__',
)


def is_foreign(name: str) -> bool:
  """Whether a folder is hidden, or some program's rather than the user's."""
  return name.startswith('.') or name.lower() in _FOREIGN


def training_first(names: list[str]) -> list[str]:
  """The names that a hint may propose to train on, the likeliest first."""
  lower = {name: name.lower() for name in names}
  train = [name for name in names if 'train' in lower[name]]
  evaluation = ('test', 'val', 'eval')
  return train or [name for name in names if not any(w in lower[name] for w in evaluation)]


def class_folders(folder: str) -> list[str]:
  """Names of the folders in a folder that may be classes, sorted.

  Raises:
    ConfigError: if it cannot be read, or a name has a control character.
  """
  names = sorted(e.name for e in entries(folder) if is_folder(e) and not is_foreign(e.name))
  for name in names:
    if vocabulary_lib.has_control(name):
      raise config_lib.ConfigError(
        f'{folder}: the name of the folder {name!r} has a control character'
      )
  return names


def is_folder(entry: os.DirEntry) -> bool:
  """Returns whether an entry is a folder; a link that leads nowhere is none."""
  try:
    return entry.is_dir()
  except OSError:  # a link to itself
    return False


def entries(folder: str) -> list[os.DirEntry]:
  """What a folder holds; ConfigError if it cannot be read."""
  try:
    return list(os.scandir(folder))
  except OSError as e:
    raise config_lib.ConfigError(f'{folder}: {e.strerror}') from e
