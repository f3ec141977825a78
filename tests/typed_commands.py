"""Checks typed commands by the parsers of what they name, without running them."""

import argparse
from collections.abc import Iterator
import importlib
import inspect
import pathlib
import re
import shlex
import sys
from unittest import mock

from anp_jax import commands
from anp_jax.config import command_line

_ROOT = pathlib.Path(__file__).parents[1]
_PYTHON = re.compile(r'(.*/)?python3?')
_MAIN = 'anp_jax.__main__'


class _Parsed(BaseException):
  """The parser of a command has taken its flags."""


def split(text: str) -> Iterator[tuple[str, list[str]]]:
  """Yields (module, arguments) of each Python command in a line of a shell."""
  lexer = shlex.shlex(text, posix=True, punctuation_chars=';|&()<>')
  lexer.whitespace_split = True
  words = list(lexer)
  for i, word in enumerate(words):
    if ' ' in word and 'python' in word:  # of `bash -c`
      yield from split(word)
    is_python = _PYTHON.fullmatch(word)
    if not (is_python or word.startswith('anp-')):
      continue
    end = next((j for j in range(i, len(words)) if words[j][0] in ';|&()<>'), len(words))
    arguments = words[i + 1 : end]
    if not is_python:
      yield getattr(commands, word.removeprefix('anp-')).args[0], arguments
    elif arguments[:1] == ['-m']:
      yield arguments[1], arguments[2:]
    elif arguments and arguments[0].endswith('.py'):
      assert (_ROOT / arguments[0]).exists(), f'{arguments[0]} is not in the repository'
      module = arguments[0].removesuffix('.py').replace('/', '.')
      yield (_MAIN if module == 'main' else module), arguments[1:]


def check(module: str, arguments: list[str]) -> None:
  """Parses a command's flags, and loads its config if it names one.

  Raises:
    ConfigError, SystemExit: for a flag, key or value that does not exist.
  """
  name = module if importlib.util.find_spec(module).submodule_search_locations is None else ''
  program = importlib.import_module(name or f'{module}.__main__')
  overrides, rest = command_line.split_overrides([a for a in arguments if a != '...'])
  _parse(program, rest)
  config = [a.removeprefix('--config=') for a in rest if a.startswith('--config=')]
  for spec in config:
    # Studies and planners set each strategy's keys where it has them.
    is_one = program.__name__ == _MAIN
    command_line.load(spec, overrides if is_one else command_line.applying(spec, overrides))


def _parse(program, arguments):
  real = argparse.ArgumentParser.parse_known_args

  def parse_known_args(self, typed=None, namespace=None):
    flags, rest = real(self, typed, namespace)
    if rest:
      self.error(f'unknown: {rest}')
    raise _Parsed

  takes = list(inspect.signature(program.main).parameters)[:1]
  typed = {'argv': ([program.__name__, *arguments],), 'arguments': (arguments,)}
  with (
    mock.patch.object(argparse.ArgumentParser, 'parse_known_args', parse_known_args),
    mock.patch.object(sys, 'argv', [program.__name__, *arguments]),
  ):
    try:
      status = program.main(*typed[takes[0]] if takes else ())
    except _Parsed:
      return
  raise AssertionError(f'{program.__name__} {arguments}: status {status}')
