"""Reads of a file by position that keep Python's lock for cached bytes.

os.pread releases the lock and has to get it back, which other threads delay: a
batch of small files from the page cache spent most of its time on that.
"""

import ctypes
import errno
import os

_FALL_BACK = {errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class _Vector(ctypes.Structure):
  """The struct iovec of preadv2."""

  _fields_ = (('base', ctypes.c_void_p), ('length', ctypes.c_size_t))


def _load():
  """The C library's preadv2, called with the lock held; None without it."""
  try:
    function = ctypes.PyDLL(None, use_errno=True).preadv2
  except (OSError, AttributeError):  # not Linux
    return None
  function.restype = ctypes.c_ssize_t
  function.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_int,
  )
  return function


_PREADV2 = _load()


def pread(handle: int, size: int, start: int) -> bytes:
  """Returns the bytes of a file from `start` on, like os.pread.

  Bytes in the page cache are copied with the lock held, in microseconds; for others
  os.pread waits without it.

  Args:
    handle: descriptor of the open file.
    size: number of bytes; fewer are returned at the end of the file.
    start: offset of the first byte.

  Raises:
    OSError: if they cannot be read.
  """
  if _PREADV2 is not None and size:
    buffer = bytearray(size)
    vector = _Vector(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), size)
    count = _PREADV2(handle, vector, 1, start, os.RWF_NOWAIT)
    if count == size:
      return bytes(buffer)
    if count < 0 and ctypes.get_errno() not in _FALL_BACK:
      raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
  return os.pread(handle, size, start)
