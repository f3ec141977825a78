"""Which code a command may import by name: what was typed, not what was read.

A config may name classes of a user's, as package.module:Class, and the working
directory is importable. A config that lies in the folder of a run was written
by whoever made the run, so what it names is imported only if the person who
looks at the run types it again, or types --trust.
"""

import argparse
from collections.abc import Callable, Iterator
import importlib
import re

from anp_jax.config import errors

FLAG = '--trust'
# The keys whose values may be names of classes.
_KEYS = ('model.name', 'strategy.name')
# Texts of what differs in the models of a ring.
_MODELS = 'strategy.models'
_IN_TEXT = re.compile(r'(model\.name|strategy\.name)\s*=\s*([^;]+)')
# Compiled programs are machine code, and they are run as they are read.
_PROGRAMS = 'compile_cache.dir'

_allowed: set[str] = set()
_read: set[str] = set()  # from files
_is_all_allowed = False


def add_flag(parser: argparse.ArgumentParser) -> None:
  """Adds --trust to the flags of a command that reads a run."""
  parser.add_argument(
    FLAG,
    action='store_true',
    help="import the classes that the run's files name, as "
    'package.module:Class: it runs their code',
  )


def allow(values: dict) -> None:
  """Allows the classes that a command line, its recipe or a caller names.

  Args:
    values: by dotted key.
  """
  _allowed.update(name for _, name in _named(values))


def allow_all() -> None:
  """Allows whatever is named: --trust was typed."""
  global _is_all_allowed
  _is_all_allowed = True


def note_read(saved: dict) -> None:
  """Marks the classes of a config that comes from a file.

  Every config from a file passes here, so that nothing imports what it names,
  even where `from_file` was forgotten.

  Args:
    saved: flat, after JSON.
  """
  _read.update(name for _, name in _named(saved))


def is_refused(name: str) -> bool:
  """Whether a name was read from a file, and not allowed."""
  return name in _read and not _is_allowed(name)


def is_class_name(name) -> bool:
  """Whether a text has the form package.module:Class."""
  if not isinstance(name, str) or name.count(':') != 1:
    return False
  return all(part.isidentifier() for half in name.split(':') for part in half.split('.'))


def check(key: str, name: str) -> None:
  """Refuses what would be imported and was not typed.

  Raises:
    ConfigError: naming the class and what to type.
  """
  if is_refused(name):
    raise errors.ConfigError(_refusal(f'config.{key}={name!r}', key, name))


def made(key: str, name: str, kind: type, arguments: Callable = lambda _: {}):
  """Imports a class of the user's, and makes an object of it.

  Args:
    key: of the config, which names it.
    name: package.module:Class.
    kind: that the class has to inherit from; nothing else is called.
    arguments: gives the keyword arguments for the class.

  Raises:
    ConfigError: if there is no such class, it is of another kind, it cannot be
      made, or it may not be imported.
  """
  check(key, name)
  place = f'config.{key}={name!r}'
  if not is_class_name(name):
    raise errors.ConfigError(f'{place}: expected package.module:Class')
  path, _, attribute = name.partition(':')
  try:
    module = importlib.import_module(path)
  except Exception as e:  # whatever the user's file raises
    raise errors.ConfigError(f'{place}: {_line(e)}') from e
  result = getattr(module, attribute, None)
  if result is None:
    classes = [n for n, v in vars(module).items() if isinstance(v, type)]
    raise errors.ConfigError(
      f'{place}: {path} has no {attribute!r}{errors.nearest(attribute, classes)}'
    )
  # Not issubclass: of a protocol's it asks for methods, of some it refuses.
  if not isinstance(result, type) or kind not in result.__mro__:
    raise errors.ConfigError(
      f'{place}: expected a class that inherits from {kind.__module__}.{kind.__qualname__}'
    )
  keywords = arguments(result)
  try:
    made_object = result(**keywords)
  except Exception as e:
    raise errors.ConfigError(f'{place}: {_line(e)}') from e
  _allowed.add(name)  # its code has run: a program that uses it may read it
  return made_object


def from_file(saved: dict, file: str) -> dict:
  """Returns the config of a run's file, without what would run its code.

  Args:
    saved: flat, after JSON.
    file: where it was read.

  Raises:
    ConfigError: naming the class, the file and what to type.
  """
  for key, name in _named(saved):
    if not _is_allowed(name):
      raise errors.ConfigError(_refusal(f'{file}: {key}={name!r}', key, name))
  if _is_all_allowed or not saved.get(_PROGRAMS):
    return saved
  return saved | {_PROGRAMS: 'auto'}


def _is_allowed(name):
  """Whether it may be imported; names without a colon are the package's."""
  return ':' not in name or _is_all_allowed or name in _allowed


def _line(error):
  return f'{type(error).__name__}: {error}'.splitlines()[0]


def _named(values) -> Iterator[tuple[str, str]]:
  """The keys and names of all classes in a flat config."""
  yield from ((key, str(values[key])) for key in _KEYS if key in values)
  models = values.get(_MODELS, ())
  texts = [models] if isinstance(models, str) else models
  for text in texts if isinstance(texts, tuple | list) else ():
    for key, name in _IN_TEXT.findall(str(text)):
      yield key, name.strip('\'"),( ')


def _refusal(place: str, key: str, name: str) -> str:
  module = name.partition(':')[0]
  return (
    f'{place} would import {module!r} and run its code; expected {FLAG}, or '
    f'--config.{key}={name} where a config is typed'
  )


def forget() -> None:
  """Allows nothing, as when a process starts."""
  global _is_all_allowed
  _is_all_allowed = False
  _allowed.clear()
  _read.clear()
