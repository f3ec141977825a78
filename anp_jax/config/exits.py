"""How a command ends: with a status, and an error in one line."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import sys

from anp_jax.config import errors, urls

_LONGEST = 4000


def error_line(error: Exception) -> str:
  """Returns the line of an error, with escapes for what a terminal would obey."""
  text = urls.remote_url(f'error: {error}').replace('\n', ' ')
  if len(text) > _LONGEST:  # a file was typed in the place of its name, say
    text = f'{text[:_LONGEST]}... ({len(text):,} letters)'
  return errors.printable(text)


@contextlib.contextmanager
def until_reader_goes() -> Iterator[None]:
  """Ends the context where the reader of the output (head, less) has gone."""
  try:
    yield
  except BrokenPipeError:
    # At exit Python flushes again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_status(interrupted: str = 'interrupted') -> Callable:
  """Returns a decorator by which a function ends like a command, without an exception.

  The function then returns its status, or 0 for None and where the reader of its
  output has gone; 2 for a ConfigError or an OSError, which is printed as one
  line; 130 for Ctrl-C.

  Args:
    interrupted: line printed after Ctrl-C.
  """

  def decorate(function):
    @functools.wraps(function)
    def run(arguments: list[str]) -> int:
      try:
        with until_reader_goes():
          return function(arguments) or 0
        return 0
      except (errors.ConfigError, OSError) as e:
        print(error_line(e), file=sys.stderr)
        return 2
      except KeyboardInterrupt:  # of a program that calls this one
        print(f'\n{interrupted}', file=sys.stderr)
        return 130

    return run

  return decorate
