"""The parser of every command's flags, whose errors are one line."""

import argparse
from collections.abc import Iterable, Mapping
import os
import re
import sys
from typing import Any, NoReturn

import anp_jax
from anp_jax.config import errors, trust


def expanded(text: str) -> str:
  """Returns a path with ~ and $VARIABLE replaced.

  A shell leaves them in --workdir=~/runs and in single quotes. A path that exists
  as it was typed stays.
  """
  if '\0' in text or os.path.lexists(text):
    return text
  return os.path.expanduser(os.path.expandvars(text))


def _expanded(value):
  if isinstance(value, list):
    return [_expanded(v) for v in value]
  return expanded(value) if isinstance(value, str) else value


class Parser(argparse.ArgumentParser):
  """The parser of a command: a bad argument is one line, a ConfigError."""

  def __init__(self, prog: str, **arguments: Any):
    """Takes argparse's arguments; line breaks are kept, flags are not abbreviated.

    Where the command was started by its installed name, such as anp-show, all
    texts say this name.

    Args:
      prog: python main.py or python -m MODULE, and what follows.
      **arguments: further arguments of argparse, such as description and epilog.
    """
    texts = {'prog': prog} | arguments
    name = os.path.basename(sys.argv[0])
    if name.startswith('anp-'):
      typed = re.match(r'python (main\.py|-m [\w.]+)', prog)
      assert typed is not None
      for key in texts.keys() & {'prog', 'description', 'epilog'}:
        texts[key] = re.sub(rf'{re.escape(typed[0])}(?!\.?\w)', name, texts[key])
    super().__init__(
      formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **texts
    )
    self.add_argument(
      '--version',
      action='version',
      version=f'anp_jax {anp_jax.__version__}',
      help='package version',
    )

  def add_flags(self, flags: Mapping[str, tuple[Any, str, str]]) -> None:
    """Adds flags of the type of their default; one that is False takes no value.

    Args:
      flags: default, metavar and help by name.
    """
    for name, (default, metavar, text) in flags.items():
      if default is False:
        self.add_argument(f'--{name}', action='store_true', help=text)
        continue
      if default:
        text += ' (default: %(default)s)'
      kind = type(default)
      self.add_argument(f'--{name}', type=kind, default=default, metavar=metavar, help=text)

  def parse(self, arguments: list[str], keys: Iterable[str] = ()) -> argparse.Namespace:
    """Returns the flags; ConfigError for an unknown one, with the nearest.

    Obeys `--trust`, see `trust.add_flag`.

    Args:
      arguments: command line.
      keys: config keys that an unknown flag may mean.
    """
    options = [option for a in self._actions for option in a.option_strings]
    try:
      flags, unknown = self.parse_known_args(arguments)
    except errors.ConfigError:
      # A flag that is required may be missing because it was mistyped.
      unknown = [
        a for a in arguments if a.startswith('--') and a.partition('=')[0] not in (*options, '--')
      ]
      if not unknown:
        raise
    if unknown:
      name = unknown[0].partition('=')[0]
      # Typed without its group or dashes, with nothing but it, or with another group.
      typed = name.lstrip('-')
      options += [
        f'--config.{key}'
        for key in keys
        if {key, key.rpartition('.')[2]} & {typed, typed.partition('.')[2]}
      ]
      raise errors.ConfigError(f'unknown argument {unknown[0]!r}{errors.nearest(name, options)}')
    for name, value in vars(flags).items():
      setattr(flags, name, _expanded(value))
    if getattr(flags, 'trust', False):
      trust.allow_all()
    return flags

  def error(self, message: str) -> NoReturn:
    """Raises ConfigError, where argparse would print two lines and exit."""
    raise errors.ConfigError(message)
