"""What a person sees while files are named, and at the end."""

from collections.abc import Callable
from collections.abc import Iterable
import os
import threading
import time

_PAUSE = 0.2  # seconds between two drawings


class Progress:
  """Lines on a stream, the last of them live where it is a terminal.

  Attributes:
    named: files.
    unreadable: files.
  """

  def __init__(self, stream, clock: Callable[[], float] = time.monotonic):
    """Starts the clock."""
    self.named = self.unreadable = 0
    # A dumb terminal (an editor's, say) knows no escape codes.
    self._live = stream.isatty() and os.environ.get('TERM') != 'dumb'
    self._stream, self._clock = stream, clock
    self._start = self._drawn = clock()
    self._warm = None  # (clock, files) after the first batch, which compiled
    self._total = None

  def expect(self, found: Iterable) -> None:
    """Counts the files to come, in the background, for a terminal."""
    if self._live:
      threading.Thread(target=self._count, args=(found,), daemon=True).start()

  def note(self, text: str) -> None:
    """A line that stays."""
    # Names of files that are not UTF-8 must not end the program.
    encoding = self._stream.encoding or 'utf-8'
    text = text.encode(encoding, 'backslashreplace').decode(encoding)
    self._clear()
    print(text, file=self._stream, flush=True)

  def add(self, named: int, unreadable: list[tuple[str, str]]) -> None:
    """What a batch gave: how many were named, (file, reason) of others."""
    for file, reason in unreadable:
      self.note(f'unreadable: {file}: {reason}')
    self.named += named
    self.unreadable += len(unreadable)
    now = self._clock()
    if self._warm is None:
      self._warm = now, self.named
    if self._live and now - self._drawn >= _PAUSE:
      self._drawn = now
      self._stream.write('\r\x1b[K' + self._line(now))
      self._stream.flush()

  def end(self) -> None:
    """The last line: what was done, at which rate."""
    seconds = self._clock() - self._start
    text = f'{self.named:,} named in {duration(seconds)}'
    if self.named and seconds:
      text += f' ({self.named / seconds:.1f} a second, start included)'
    if self.unreadable:
      text += f', {self.unreadable:,} unreadable'
    self.note(text)

  def _line(self, now):
    done = self.named + self.unreadable
    text = f'{done:,}'
    if self._total:
      text += f' of {self._total:,}'
    text += ' files'
    begun, before = self._warm
    if now > begun and self.named > before:
      rate = (self.named - before) / (now - begun)
      text += f', {rate:.1f} a second'
      if self._total:
        text += f', {duration(max(self._total - done, 0) / rate)} left'
    return text

  def _count(self, found):
    self._total = sum(1 for _ in found)

  def _clear(self):
    if self._live:
      self._stream.write('\r\x1b[K')


def duration(seconds: float) -> str:
  """Such as '12.3 s', '4 min 05 s', '2 h 04 min'."""
  if seconds < 60:
    return f'{seconds:.1f} s'
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f'{minutes} min {rest:02} s'
  return f'{minutes // 60} h {minutes % 60:02} min'
