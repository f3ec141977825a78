"""Tests of cached_reads: the bytes of os.pread, in the cache or not."""

import ctypes
import errno
import os

import pytest

from anp_jax.system import cached_reads


@pytest.fixture
def handle(tmp_path):
  path = tmp_path / 'x'
  path.write_bytes(bytes(range(256)) * 400)
  number = os.open(path, os.O_RDONLY)
  yield number
  os.close(number)


@pytest.mark.parametrize(
  'start, size', [(10, 5000), (102_399, 1), (102_000, 1000), (200_000, 3), (5, 0)]
)
def test_bytes_are_those_of_pread(handle, start, size):
  want = os.pread(handle, size, start)
  assert cached_reads.pread(handle, size, start) == want
  # Not in the cache, where the file system obeys.
  os.fsync(handle)
  os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
  assert cached_reads.pread(handle, size, start) == want


@pytest.mark.parametrize('code', [errno.EAGAIN, errno.EOPNOTSUPP])
def test_what_is_not_cached_is_waited_for(handle, monkeypatch, code):
  def refuse(*unused):
    ctypes.set_errno(code)
    return -1

  monkeypatch.setattr(cached_reads, '_PREADV2', refuse)
  assert cached_reads.pread(handle, 4, 3) == b'\3\4\5\6'
  monkeypatch.setattr(cached_reads, '_PREADV2', None)
  assert cached_reads.pread(handle, 4, 3) == b'\3\4\5\6'


def test_an_error_is_raised(handle):
  number = os.dup(handle)
  os.close(number)
  with pytest.raises(OSError) as e:
    cached_reads.pread(number, 4, 0)
  assert e.value.errno == errno.EBADF
