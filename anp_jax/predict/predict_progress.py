"""What a person reads while files are named, and at the end."""

from collections.abc import Callable
import time
from typing import TextIO

from anp_jax import config as config_lib
from anp_jax.system import progress


class NamingProgress(progress.Progress):
  """Progress of naming files, whose last line sums up."""

  def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic):
    """Starts the clock.

    Args:
      stream: where lines go.
      clock: returns seconds that never run backwards.
    """
    line = progress.LiveLine(stream, clock)
    super().__init__('naming', failed_word='unreadable', line=line)
    self._begin = clock()
    self._has_compiled = False

  @property
  def named(self) -> int:
    """Files that were named."""
    return self.done - self.failed

  def add_batch(self, named: int, unreadable: list[tuple[str, str]]) -> None:
    """Counts a batch: how many files were named, (file, reason) of the rest."""
    for file, reason in unreadable:
      text = f'unreadable: {file}: {reason}'
      self.line.log(config_lib.printable(text))
    self.add(named + len(unreadable), len(unreadable))
    if not self._has_compiled:  # the first batch is no part of the rate
      self._has_compiled = True
      self.start_timing()

  def finish(self) -> None:
    """Prints how many files were named, and at which rate."""
    self.close(keep=False)
    seconds = self.line.clock() - self._begin
    text = f'{self.named:,} named in {progress.duration(seconds)}'
    if self.named and seconds:
      text += f' ({self.named / seconds:.1f} a second, start included)'
    if self.failed:
      text += f', {self.failed:,} unreadable'
    self.line.log(text)
