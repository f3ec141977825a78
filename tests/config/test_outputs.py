"""Tests of outputs: what can be written, places before anything heavy."""

import collections
import errno
import os
import shutil
import tempfile
from unittest import mock

import pytest

from anp_jax.config import outputs
from tests import builders

_Usage = collections.namedtuple('_Usage', 'total used free')


@pytest.mark.parametrize('check', [outputs.check_file, outputs.check_folder])
@pytest.mark.parametrize('code', [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_permissions_do_not_say_all(check, code, tmp_path, monkeypatch):
  """A quota and a full disk let a process look, and not write."""
  path = str(tmp_path / 'new')
  check('--x', path)
  assert not os.listdir(tmp_path)
  refused = OSError(code, os.strerror(code))
  monkeypatch.setattr(tempfile, 'TemporaryFile', mock.Mock(side_effect=refused))
  line = builders.refusal(check, '--x', path)
  assert line.startswith(
    f'--x={path!r}: {tmp_path} cannot be written to: {os.strerror(code)}; choose another '
  )


def test_what_is_there_is_left_as_it_is(tmp_path):
  file = tmp_path / 'page.html'
  file.write_text('old')
  time = file.stat().st_mtime_ns
  outputs.check_file('--x', str(file), ('.html',))
  assert (file.read_text(), file.stat().st_mtime_ns) == ('old', time)
  assert os.listdir(tmp_path) == ['page.html']


def test_a_file_that_is_no_file_can_be_written_to():
  outputs.check_file('--output', '/dev/null')


@pytest.mark.parametrize('suffix', ['.png', '.PNG'])
def test_case_of_a_suffix_does_not_matter(suffix, tmp_path):
  outputs.check_file('--x', str(tmp_path / f'a{suffix}'), ('.png',))


@pytest.mark.parametrize('size, fits', [(0, 1), (999, 1), (1000, 1), (1001, 0)])
def test_room(size, fits, tmp_path, monkeypatch):
  places = []

  def usage(path):
    places.append(str(path))
    return _Usage(5000, 4000, 1000)

  monkeypatch.setattr(shutil, 'disk_usage', usage)
  path = str(tmp_path / 'new' / 'deeper')
  if fits:
    outputs.check_room('--x', path, size)
  else:
    builders.assert_refused('of room; choose', outputs.check_room, '--x', path, size)
  assert places == [str(tmp_path)]  # the nearest folder that is there
