"""Tests of files: atomic writes and torn lines of JSON."""

import json
import os
import stat
from unittest import mock

import pytest

from anp_jax.system import error_lines, files
from tests import builders


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
  path = tmp_path / 'a.txt'
  path.write_text('before')
  full = mock.Mock(side_effect=OSError(28, 'No space left on device'))
  monkeypatch.setattr(os, 'replace', full)
  with pytest.raises(OSError, match='No space'):
    files.write_atomic(str(path), 'after')
  assert path.read_text() == 'before'
  assert os.listdir(tmp_path) == ['a.txt']


def test_drafts_are_removed_once_nobody_can_be_writing_them(tmp_path):
  new, path = builders.leave_draft(tmp_path / 'b.txt', hours=0), tmp_path / 'a.txt'
  with pytest.raises(RuntimeError), files.atomic_path(str(path)) as draft:
    stale = builders.leave_draft(path)
    assert len(stale.name) == len(os.path.basename(draft))
    builders.write_tree(tmp_path, {'.a.txt.jsonl': b'', 'a.txt': b''})
    files.remove_drafts(str(tmp_path))
    assert os.path.exists(draft)
    raise RuntimeError
  assert {*os.listdir(tmp_path)} == {'a.txt', '.a.txt.jsonl', new.name}


def test_text_and_bytes_replace_a_file(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  mask = os.umask(0o022)
  try:
    files.write_atomic('a.txt', 'gr\u00fcn')
    files.write_atomic('a.txt', b'\x00\xff')
  finally:
    os.umask(mask)
  assert (tmp_path / 'a.txt').read_bytes() == b'\x00\xff'
  assert stat.S_IMODE(os.stat('a.txt').st_mode) == 0o644
  assert files.read_json('b.json', {}) == {}
  files.write_json('b.json', {'a': [1]})
  assert json.loads((tmp_path / 'b.json').read_text()) == files.read_json('b.json') == {'a': [1]}


def test_torn_lines_are_left_out_and_ended(tmp_path):
  path = tmp_path / 'lines.jsonl'
  assert files.read_json_lines(str(path)) == []
  path.write_bytes(b'{"step": 1}\n{"step": 2}\nnull\n{"st')
  files.append_json_line(str(path), {'step': 3})
  files.append_json_line(str(path), {'step': 4})
  assert [r['step'] for r in files.read_json_lines(str(path))] == [1, 2, 3, 4]
  assert path.read_bytes().endswith(b'{"st\n{"step": 3}\n{"step": 4}\n')


def test_an_error_in_one_line():
  assert error_lines.typed_line(ValueError('\none\ntwo')) == 'ValueError: one'
  assert error_lines.typed_line(KeyError()) == error_lines.first_line(KeyError()) == 'KeyError'


def test_state_tells_a_change_and_what_is_no_file(tmp_path):
  path = tmp_path / 'x'
  assert files.state(str(path)) == files.NO_FILE == files.state(str(tmp_path))
  path.write_bytes(b'abc')
  os.utime(path, ns=(5, 7))
  assert files.state(str(path)) == (3, 7)
  assert files.state(str(path / 'below')) == files.NO_FILE


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
  path = str(tmp_path / 'lock')
  with files.lock(path) as is_locked:
    assert is_locked
    with pytest.raises(BlockingIOError):
      with files.lock(path, wait=False):
        pass
  with files.lock(path) as is_locked:
    assert is_locked
