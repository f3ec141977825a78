"""Event files: what TensorBoard shows of a run.

Such a file consists of TFRecords, each an Event of TensorFlow's event.proto. The
few fields of a scalar are encoded here: the packages that write event files take a
third of a second to import, and seconds where torch is installed.
"""

import contextlib
import os
import socket
import struct
import time

import numpy as np

_VERSION = 'brain.Event:2'
# Numbers of fields, and how they are encoded: Event.
_WALL_TIME, _STEP, _FILE_VERSION, _SUMMARY, _SESSION_LOG = b'\x09', b'\x10', 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE = 1, 1, b'\x15'  # Summary and Summary.Value
_START = b'\x08\x01'  # SessionLog.status
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed


class EventFile:
  """A file of events, which TensorBoard shows with those before it."""

  def __init__(self, folder: str, start_step: int):
    """Opens the file; events after start_step in older files are purged.

    Args:
      folder: folder of the files; one process writes to it at a time.
      start_step: steps that were made before.

    Raises:
      OSError: if it cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    # Files are read in the order of their names.
    now = time.time_ns()
    name = f'events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}.{os.getpid()}'
    self._file = open(os.path.join(folder, name), 'xb')
    self._append(0, _message(_FILE_VERSION, _VERSION.encode()))
    self._append(start_step + 1 if start_step else 0, _message(_SESSION_LOG, _START))

  def write(
    self, kind: str, step: int, values: dict[str, float], when: float | None = None
  ) -> None:
    """Adds values of a step, measured at a time; None: now."""
    summary = b''.join(
      _message(_VALUE, _message(_TAG, f'{kind}/{name}'.encode()) + _SIMPLE_VALUE + _float(value))
      for name, value in values.items()
    )
    self._append(step, _message(_SUMMARY, summary), when)

  def close(self) -> None:
    """Closes the file."""
    with contextlib.suppress(OSError):  # a full disk
      self._file.close()

  def _append(self, step, field, when=None):
    """Appends an event: its time, its step and one more field."""
    seconds = struct.pack('<d', time.time() if when is None else when)
    event = _WALL_TIME + seconds + _STEP + _varint(step) + field
    size = struct.pack('<Q', len(event))
    # On a full disk the metrics are lost, not the run. What a flush could not
    # write, the next one writes first.
    with contextlib.suppress(OSError):
      self._file.write(size + _checksum(size) + event + _checksum(event))
      self._file.flush()


def _message(number, content):
  """A field of Protocol Buffers that holds text or a message."""
  return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value):
  """A number of Protocol Buffers: 7 bits a byte, the low ones first."""
  groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
  return bytes([*(g | 128 for g in groups[:-1]), groups[-1]])


def _checksum(data):
  """The checksum of a TFRecord: CRC-32C, rotated by 15 bits, plus a constant."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
  crc ^= 0xFFFFFFFF
  return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _remainder(byte):
  """The CRC-32C of one byte, without the inversions."""
  for _ in range(8):
    byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
  return byte


_TABLE = [_remainder(byte) for byte in range(256)]


def _float(value):
  """Four bytes; a number that is too large for them is infinite."""
  with np.errstate(over='ignore'):
    return np.array(value).astype('<f4').tobytes()
