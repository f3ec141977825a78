"""One live line of progress in a terminal, plain lines everywhere else."""

from collections.abc import Callable, Iterable
import os
import shutil
import sys
import threading
import time
from typing import TextIO

_REDRAW_SECONDS = 0.2
_ERASE = '\r\x1b[2K'  # back to the start of the line, and erase it


class LiveLine:
  """A line that changes in place; lines that stay are printed above it.

  A stream that is no terminal gets the lines that stay and nothing else: no
  escape code, no line that changes. Where the stream has lost its reader (a
  closed terminal, a broken pipe) nothing is written and nothing fails.
  """

  def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic):
    """Finds out whether the stream is a terminal.

    Args:
      stream: output stream; None writes nothing.
      clock: monotonic clock in seconds.
    """
    self.clock = clock
    self._stream = stream
    self._has_codes = (
      stream is not None and stream.isatty() and os.environ.get('TERM') not in ('dumb', 'unknown')
    )
    self._text = ''

  @property
  def is_live(self) -> bool:
    """Whether the stream is a terminal that can rewrite a line."""
    return self._has_codes and self._stream is not None

  @property
  def width(self) -> int:
    """Columns of the live line; a text in a terminal's last one may wrap."""
    return shutil.get_terminal_size().columns - 1

  def show(self, text: str) -> None:
    """Rewrites the live line, cut to the terminal's width."""
    self._text = text
    if self.is_live:
      self._write(_ERASE + text[: self.width])

  def log(self, text: str) -> None:
    """Prints a permanent line above the live line."""
    if self.is_live:
      self._write(f'{_ERASE}{text}\n{self._text[: self.width]}')
    else:
      self._write(text + '\n')

  def close(self, keep: bool = True) -> None:
    """Ends the live line; a second call does nothing.

    Args:
      keep: whether its last text stays in the terminal.
    """
    if self.is_live and self._text:
      self._write('\n' if keep else _ERASE)
    self._text = ''

  def _write(self, text):
    """Writes and flushes a text, with names of files that are not UTF-8 in escapes."""
    if self._stream is None:
      return
    encoding = self._stream.encoding or 'utf-8'
    try:
      self._stream.write(text.encode(encoding, 'backslashreplace').decode(encoding))
      self._stream.flush()
    except (OSError, ValueError):
      self._stream = None


class Progress:
  """Progress over files and its rate, as a live line or as lines in a log.

  Attributes:
    done: number of processed files, including `failed`.
    failed: number of files that could not be used.
  """

  def __init__(
    self,
    title: str,
    total: int | None = None,
    done: int = 0,
    failed_word: str = 'damaged',
    log_seconds: float | None = None,
    line: LiveLine | None = None,
  ):
    """Starts the clock.

    Args:
      title: name of the work.
      total: number of files; None where it is unknown (yet).
      done: number of files processed before, which count in no rate.
      failed_word: participle for failed files.
      log_seconds: seconds between two log lines; None: no log lines.
      line: live line; None: one on standard error.
    """
    self.done, self.failed = done, 0
    self.line = line or LiveLine(sys.stderr)
    self._title, self._total = title, total
    self._failed_word, self._log_seconds = failed_word, log_seconds
    self._last_shown = self.line.clock()
    self.start_timing()

  def start_timing(self) -> None:
    """Restarts the clock of the rate."""
    self._start, self._done_before = self.line.clock(), self.done

  def count_total(self, files: Iterable) -> None:
    """Counts the files to come, in the background, for a terminal."""
    if self.line.is_live:
      threading.Thread(target=self._set_total, args=(files,), daemon=True).start()

  def add(self, done: int, failed: int = 0) -> None:
    """Counts processed files, and shows the state if due.

    Args:
      done: number of files, including failed ones.
      failed: number of failed files.
    """
    self.done += done
    self.failed += failed
    is_live = self.line.is_live
    interval = _REDRAW_SECONDS if is_live else self._log_seconds
    now = self.line.clock()
    if interval is not None and now - self._last_shown >= interval:
      self._last_shown = now
      self._show()

  def close(self, keep: bool = True) -> None:
    """Shows the last state.

    Args:
      keep: whether it stays in a terminal.
    """
    if keep and (self.line.is_live or self._log_seconds is not None):
      self._show()
    self.line.close(keep)

  def text(self) -> str:
    """Returns the state, such as 'naming: 31/100 files, 4/s, 17.2 s left'."""
    total = '' if self._total is None else f'/{self._total:,}'
    text = f'{self._title}: {self.done:,}{total} files'
    seconds = max(self.line.clock() - self._start, 1e-3)
    rate = (self.done - self._done_before) / seconds
    text += f', {rate:,.0f}/s'
    if self.failed:
      text += f', {self.failed:,} {self._failed_word}'
    left = (self._total or 0) - self.done
    if left > 0 and rate:
      text += f', {duration(left / rate)} left'
    return text

  def _show(self):
    show = self.line.show if self.line.is_live else self.line.log
    show(self.text())

  def _set_total(self, files):
    self._total = sum(1 for _ in files)


def duration(seconds: float) -> str:
  """Returns a time such as '12.3 s', '4 min 05 s' or '2 h 04 min'."""
  if seconds < 59.95:
    return f'{seconds:.1f} s'
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f'{minutes} min {rest:02} s'
  return f'{minutes // 60} h {minutes % 60:02} min'
