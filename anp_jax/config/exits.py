"""How a command ends: with a status, and an error in one line."""

from collections.abc import Callable
import functools
import os
import sys

from anp_jax.config import errors, urls

_LONGEST = 4000


def error_line(error: Exception) -> str:
  """The line of an error for people, without what a terminal would obey."""
  text = urls.remote_url(f'error: {error}').replace('\n', ' ')
  if len(text) > _LONGEST:  # a file was typed in the place of its name, say
    text = f'{text[:_LONGEST]}... ({len(text):,} letters)'
  return ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def with_status(interrupted: str = 'interrupted') -> Callable:
  """Makes a function of arguments end like a command, without an exception.

  It then returns the status: its own, 0 for None and where the reader of its
  output has gone; 2 for a ConfigError or an OSError, which is printed as one
  line; 130 for Ctrl-C.

  Args:
    interrupted: what is printed after Ctrl-C.
  """

  def decorate(function):
    @functools.wraps(function)
    def run(arguments: list[str]) -> int:
      try:
        return function(arguments) or 0
      except BrokenPipeError:
        # The reader has seen enough (head, less); at exit Python flushes again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
      except (errors.ConfigError, OSError) as e:
        print(error_line(e), file=sys.stderr)
        return 2
      except KeyboardInterrupt:  # of a program that calls this one
        print(f'\n{interrupted}', file=sys.stderr)
        return 130

    return run

  return decorate
