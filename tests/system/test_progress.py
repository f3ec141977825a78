"""progress: a live line in a terminal, plain lines in a pipe or a log."""

import io
import os
import pty

import pytest

from anp_jax.system import progress
from tests import builders

_ERASE = '\r\x1b[2K'


@pytest.fixture(autouse=True)
def terminal_kind(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '80')


def test_a_live_line_is_rewritten_and_notes_stay_above_it():
  stream = builders.Terminal()
  line = progress.LiveLine(stream)
  line.show('one of [two]')
  line.log('saved')
  line.show('two')
  line.close()
  line.close()
  text = f'{_ERASE}one of [two]{_ERASE}saved\none of [two]{_ERASE}two\n'
  assert stream.getvalue() == text
  line.show('three')
  line.close(keep=False)
  assert stream.getvalue() == f'{text}{_ERASE}three{_ERASE}'


@pytest.mark.parametrize('columns', [1, 20])
def test_a_live_line_is_cut_and_a_note_is_not(monkeypatch, columns):
  monkeypatch.setenv('COLUMNS', str(columns))
  stream = builders.Terminal()
  line = progress.LiveLine(stream)
  line.show('x' * 100)
  assert stream.getvalue() == _ERASE + 'x' * (columns - 1)
  line.log('y' * 100)
  assert f'{_ERASE}{"y" * 100}\n' in stream.getvalue()


@pytest.mark.parametrize('stream, kind', [(io.StringIO(), 'xterm'), (builders.Terminal(), 'dumb')])
def test_a_pipe_or_dumb_terminal_gets_the_notes_and_no_codes(monkeypatch, stream, kind):
  monkeypatch.setenv('TERM', kind)
  line = progress.LiveLine(stream)
  line.show('one')
  line.log('saved')
  line.close()
  assert not line.is_live and stream.getvalue() == 'saved\n'


def test_a_name_that_is_not_utf8_is_escaped():
  for stream in (builders.Terminal(), io.TextIOWrapper(io.BytesIO(), 'ascii')):
    line = progress.LiveLine(stream)
    line.log('a\udcff.jpg')
    stream.seek(0)
    assert stream.read().endswith('a\\udcff.jpg\n')


def test_a_lost_reader_ends_nothing():
  read, write = os.pipe()
  os.close(read)
  with open(write, 'wb', buffering=0) as raw:
    line = progress.LiveLine(io.TextIOWrapper(raw, write_through=True))
    line.log('one')
    line.log('two')
    line.close()
  leader, follower = pty.openpty()
  with open(follower, 'wb', buffering=0) as raw:
    line = progress.LiveLine(io.TextIOWrapper(raw, write_through=True))
    line.show('one')
    assert line.is_live
    os.close(leader)
    line.show('two')
    line.log('three')
    line.close()
  progress.LiveLine(None).log('nowhere')


def test_progress_in_a_terminal():
  clock, stream = builders.Clock(0.0), builders.Terminal()
  naming = progress.Progress('naming', line=progress.LiveLine(stream, clock))
  naming._set_total(range(100))
  clock.now = 10.0
  naming.add(10)
  naming.start_timing()  # the first batch compiled: no part of the rate
  clock.now = 10.1
  naming.add(1)
  assert '11/100' not in stream.getvalue()  # too soon to draw again
  clock.now = 15.0
  naming.add(20, 1)
  last = stream.getvalue().rpartition(_ERASE)[2]
  assert last == 'naming: 31/100 files, 4/s, 1 damaged, 16.4 s left'
  naming.close()
  assert stream.getvalue().endswith(f'{_ERASE}{last}\n')


def test_progress_in_a_log():
  clock, stream = builders.Clock(0.0), io.StringIO()
  line = progress.LiveLine(stream, clock)
  counting = progress.Progress('a', 2000, 1000, 'unreadable', 10, line)
  for now in (1, 9, 10, 11, 20):
    clock.now = now
    counting.add(10, now == 9)
  counting.close()
  assert stream.getvalue().splitlines() == [
    'a: 1,030/2,000 files, 3/s, 1 unreadable, 5 min 23 s left',
    'a: 1,050/2,000 files, 2/s, 1 unreadable, 6 min 20 s left',
    'a: 1,050/2,000 files, 2/s, 1 unreadable, 6 min 20 s left',
  ]


def test_progress_without_log_lines_is_silent():
  clock, stream = builders.Clock(0.0), io.StringIO()
  counting = progress.Progress('a', line=progress.LiveLine(stream, clock))
  clock.now = 99
  counting.add(10)
  counting.close()
  assert stream.getvalue() == ''


def test_durations():
  seconds = (1.25, 59.97, 65, 3725)
  assert [progress.duration(s) for s in seconds] == [
    '1.2 s',
    '1 min 00 s',
    '1 min 05 s',
    '1 h 02 min',
  ]
