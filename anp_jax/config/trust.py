"""Which code a command may import by name: names that were typed, not names from files.

A config may name a user's classes and functions, as package.module:Class, and the
working directory is importable. The config in a run's folder was written by whoever
made the run, so its names are imported only if the person at the command line types
them again, or types --trust.
"""

import argparse
from collections.abc import Callable, Collection
import importlib
import inspect
import os
import re
import sys
from typing import Any

from anp_jax.config import errors

FLAG = '--trust'
# The keys whose values may be names of classes.
_KEYS = (
  'data.source',
  'model.head',
  'model.name',
  'optimizer.name',
  'schedule.name',
  'strategy.name',
)
# A source such as tfds:NAME or tar:PATTERN has no dot before its colon.
SOURCE = r'\w+(\.\w+)+:\w+'
# Texts of what differs in the models of a ring.
_MODELS = 'strategy.models'
_IN_TEXT = re.compile(rf'({"|".join(map(re.escape, _KEYS))})\s*=\s*([^;]+)')
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
    help="permission to import the classes named in the run's files as "
    'package.module:Class, which runs their code',
  )


def allow(values: dict) -> None:
  """Allows the classes that a command line, its recipe or a caller names.

  Args:
    values: config values by dotted key.
  """
  _allowed.update(name for _, name in _named(values))


def allow_all() -> None:
  """Allows all names, as --trust does."""
  global _is_all_allowed
  _is_all_allowed = True


def note_read(saved: dict) -> None:
  """Marks the classes of a config that comes from a file.

  Every config from a file passes here, so that nothing imports its names, even
  where `from_file` was forgotten.

  Args:
    saved: flat config, after JSON.
  """
  _read.update(name for _, name in _named(saved))


def is_refused(name: str) -> bool:
  """Returns whether a name was read from a file and not allowed."""
  return name in _read and not _is_allowed(name)


def is_class_name(name: object) -> bool:
  """Returns whether a value has the form package.module:Class."""
  if not isinstance(name, str) or name.count(':') != 1:
    return False
  return all(part.isidentifier() for half in name.split(':') for part in half.split('.'))


def is_source_class(name: str) -> bool:
  """Returns whether config.data.source names a user's class."""
  return bool(re.fullmatch(SOURCE, name))


def imported(key: str, name: str) -> Callable:
  """Imports the package.module:attribute that a key names.

  Args:
    key: config key that names it.
    name: package.module:attribute.

  Raises:
    ConfigError: if there is no such attribute, or it may not be imported.
  """
  place = f'config.{key}={name!r}'
  if is_refused(name):
    raise errors.ConfigError(_refusal(place, key, name))
  if not is_class_name(name):
    raise errors.ConfigError(f'{place}: expected package.module:Class')
  path, _, attribute = name.partition(':')
  try:
    # A command such as anp-train has its own folder in place of the working directory.
    sys.path += {os.getcwd()}.difference(map(os.path.abspath, sys.path))
    module = importlib.import_module(path)
  except Exception as e:  # whatever the user's file raises
    raise errors.ConfigError(f'{place}: {_line(e)}') from e
  result = getattr(module, attribute, None)
  if not callable(result):
    names = [n for n, v in vars(module).items() if callable(v)]
    raise errors.ConfigError(
      f'{place}: {path} has no {attribute!r}{errors.nearest(attribute, names)}'
    )
  _allowed.add(name)  # its code has run: a program that uses it may read it
  return result


def made(
  key: str, name: str, kind: type, arguments: dict, required: str = '', more: dict | None = None
) -> Any:
  """Creates an object of a user's class with those arguments that the class takes.

  For errors see `imported` and `called`.

  Args:
    key: config key that names it.
    name: package.module:Class.
    kind: required base class.
    arguments: keyword arguments.
    required: one of them that the class must take; '': none.
    more: keyword arguments that the class must take.
  """
  cls = imported(key, name)
  # Not issubclass: of a protocol's it asks for methods, of some it refuses.
  is_kind = isinstance(cls, type) and kind in cls.__mro__
  words = f'a class that inherits from {kind.__module__}.{kind.__qualname__}'
  errors.check(is_kind, key, name, words)
  takes_required = not required or accepted(cls, {required: None})
  errors.check(takes_required, key, name, f'a class with an argument {required!r}')
  return called(key, name, cls, **accepted(cls, arguments), **(more or {}))


def called(key: str, name: str, function: Callable, /, *arguments: Any, **keywords: Any) -> Any:
  """Calls a user's class or function.

  Args:
    key: config key that names it.
    name: package.module:attribute.
    function: imported attribute.
    *arguments: positional arguments of the call.
    **keywords: keyword arguments of the call.

  Raises:
    ConfigError: naming the key, for any error of the call.
  """
  try:
    return function(*arguments, **keywords)
  except Exception as e:
    raise errors.ConfigError(f'config.{key}={name!r}: {_line(e)}') from e


def check_own(key: str, pairs: tuple, arguments: Collection[str]) -> None:
  """Refuses (name, value) pairs of arguments that the run gives itself."""
  words = f'none of {", ".join(arguments)}, which the run gives'
  errors.check(not dict(pairs).keys() & set(arguments), key, pairs, words)


def accepted(function: Callable, arguments: dict) -> dict:
  """Returns those keyword arguments that a class or function has."""
  parameters = inspect.signature(function).parameters
  return {name: value for name, value in arguments.items() if name in parameters}


def from_file(saved: dict, file: str, needed: Collection[str] = _KEYS) -> dict:
  """Returns the config of a run's file, without values that would run its code.

  Args:
    saved: flat config, after JSON.
    file: path of the file, for error lines.
    needed: keys whose classes will be imported; another's are refused where they are.

  Raises:
    ConfigError: naming the class, the file and what to type.
  """
  for key, name in _named(saved):
    if key in needed and not _is_allowed(name):
      raise errors.ConfigError(_refusal(f'{file}: {key}={name!r}', key, name))
  if _is_all_allowed or not saved.get(_PROGRAMS):
    return saved
  return saved | {_PROGRAMS: 'auto'}


def _is_allowed(name):
  """Whether a name may be imported; names without a colon are the package's."""
  return ':' not in name or _is_all_allowed or name in _allowed


def _line(error):
  return f'{type(error).__name__}: {error}'.splitlines()[0]


def _named(values) -> list[tuple[str, str]]:
  """The keys and names of all classes in a flat config."""
  pairs = [(key, str(values.get(key, ''))) for key in _KEYS]
  models = values.get(_MODELS, ())
  texts = [models] if isinstance(models, str) else models
  for text in texts if isinstance(texts, tuple | list) else ():
    pairs += [(key, name.strip('\'"),( ')) for key, name in _IN_TEXT.findall(str(text))]
  return [(key, name) for key, name in pairs if key != 'data.source' or is_source_class(name)]


def _refusal(place: str, key: str, name: str) -> str:
  module = name.partition(':')[0]
  return (
    f'{place} would import {module!r} and run its code; expected {FLAG}, or '
    f'--config.{key}={name} where a config is typed'
  )
