"""TensorBoard's event files, read as TensorBoard reads them."""

import struct


def read(folder):
  """The events of all files in the order of their names, checksums checked."""
  # Here, because it takes half as long as all other imports of all tests.
  from tensorflow.core.util import event_pb2

  events = []
  paths = (p for p in folder.iterdir() if p.is_file())
  for path in sorted(paths):
    with open(path, 'rb') as f:
      data = f.read()
    while data:
      size, check = struct.unpack('<QI', data[:12])
      body, (end,) = (data[12 : 12 + size], struct.unpack_from('<I', data, 12 + size))
      assert (_crc32c(data[:8]), _crc32c(body)) == (check, end)
      events.append(event_pb2.Event.FromString(body))
      data = data[16 + size :]
  return events


def points(folder):
  """(tag, step) to all values that are shown.

  A restart takes back all steps from its own on.
  """
  points = {}
  for event in read(folder):
    if event.HasField('session_log'):
      points = {k: v for k, v in points.items() if k[1] < event.step}
    for value in event.summary.value:
      points.setdefault((value.tag, event.step), []).append(value.simple_value)
  return points


def _crc32c(data):
  """CRC-32C bit by bit, with the mask of TFRecord files."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
