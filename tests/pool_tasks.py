"""Tasks of worker processes, in a module that each imports in a moment."""

import os
import signal


class Files(list):
  """Paths of files."""

  def paths(self):
    return self


class TwoArgumentsError(Exception):
  """An error that pickle cannot restore."""

  def __init__(self, text, number):
    super().__init__(f'{text} {number}')


def masked_signals(begin_file, files):
  """Tells which signals a worker blocks."""
  return signal.pthread_sigmask(signal.SIG_BLOCK, [])


def fail(begin_file, files):
  """Ends in the way that the second file is called."""
  begin_file(1)
  if files[1] == 'exit':
    os._exit(3)
  if files[1] == 'two':
    raise TwoArgumentsError('the text', 2)
  raise OSError('the text')
