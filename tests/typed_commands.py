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
_COMMAND = re.compile(r'(?P<python>(.*/)?python3?)|anp-(?P<name>[a-z]+)')
_MAIN = 'anp_jax.__main__'
_CHECKED = ('anp_jax', 'scripts.bench')
# What a reader is to fill in, or a loop of the shell.
_PLACEHOLDER = re.compile(r'\$|\{|\.\.\.|my_package')


class _Parsed(BaseException):
  """The parser of a command has taken its flags."""


def split(text: str) -> Iterator[tuple[str, list[str]]]:
  """Yields (module, arguments) of each Python command in a line of a shell."""
  text = text if text.count("'") % 2 == 0 else text.replace("'", '')  # one of several lines
  lexer = shlex.shlex(text, posix=True, punctuation_chars=';|&()<>')
  lexer.whitespace_split = True
  words = list(lexer)
  for i, word in enumerate(words):
    if ' ' in word and 'python' in word:  # of `bash -c`
      yield from split(word)
    command = _COMMAND.fullmatch(word)
    if not command:
      continue
    end = next((j for j in range(i, len(words)) if words[j][0] in ';|&()<>'), len(words))
    arguments = words[i + 1 : end]
    if command['name']:
      yield getattr(commands, command['name']).args[0], arguments
    elif arguments[:1] == ['-m'] and arguments[1:]:
      yield arguments[1], arguments[2:]
    elif arguments and arguments[0].endswith('.py'):
      assert (_ROOT / arguments[0]).exists(), f'{arguments[0]} is not in the repository'
      module = arguments[0].removesuffix('.py').replace('/', '.')
      yield (_MAIN if module == 'main' else module), arguments[1:]


def check(module: str, arguments: list[str]) -> None:
  """Parses a command's flags, and loads its config if it names one.

  Raises:
    ConfigError, SystemExit, AssertionError: for a flag, key, value or module that does not exist.
  """
  spec = importlib.util.find_spec(module)
  assert spec or not module.startswith(('anp_jax', 'scripts')), f'{module} is not in the repository'
  if not module.startswith(_CHECKED) or not arguments:
    return
  is_package = spec.submodule_search_locations is not None
  program = importlib.import_module(f'{module}.__main__' if is_package else module)
  typed = [re.sub(r'\{[a-z]\}', '1', word) for word in arguments if word != '...']
  overrides, rest = command_line.split_overrides(typed)
  _parse(program, rest)
  if 'data.path' in overrides:  # and the lists of a recipe: they are not here
    overrides['data.path'] = str(_ROOT)
    if 'anp' in ' '.join(rest) and 'data.source' not in overrides:
      overrides['data.lists'] = ''
  overrides = {key: value for key, value in overrides.items() if not _PLACEHOLDER.search(value)}
  for word in rest:
    file = word.removeprefix('--config=')
    if file != word and not _PLACEHOLDER.search(file):
      # Studies and planners set each strategy's keys where it has them.
      is_one = program.__name__ == _MAIN
      command_line.load(file, overrides if is_one else command_line.applying(file, overrides))


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
