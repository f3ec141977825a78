"""The format, the size and the faults of an image file, without decoding it.

Pillow forgives damage at which TensorFlow, the decoder of JPEG and PNG in
training, gives up: a JPEG without its end marker, a PNG without its last chunk.
Checksums and structure tell such files apart.
"""

import re
import struct
import zlib

# More scans than this only serve to keep a decoder busy for hours.
_MAX_SCANS = 500
_JPEG = b'\xff\xd8\xff'
_MAGIC = (
  (_JPEG, 'JPEG'),
  (b'\x89PNG\r\n\x1a\n', 'PNG'),
  (b'GIF87a', 'GIF'),
  (b'GIF89a', 'GIF'),
  (b'BM', 'BMP'),
  (b'II*\0', 'TIFF'),
  (b'MM\0*', 'TIFF'),
  (b'\0\0\0\x0cjP  \r\n\x87\n', 'JPEG2000'),
  (b'\xff\x4f\xff\x51', 'JPEG2000'),
  (b'P5', 'PPM'),
  (b'P6', 'PPM'),
)
# A marker in the compressed data of a scan, which stuffing and restarts do not
# end.
_MARKER = re.compile(rb'\xff[^\x00\xd0-\xd7\xff]')
# Baseline, extended and progressive, with Huffman codes.
_PROCESSES = (0xC0, 0xC1, 0xC2)
_TRAINING_FORMATS = ('JPEG', 'PNG', 'GIF', 'BMP')
_HEIF_BRANDS = (b'heic', b'heix', b'heim', b'heis', b'hevc', b'hevx', b'mif1', b'msf1')


class TooLargeError(ValueError):
  """An image of more pixels than may be decoded.

  Attributes:
    height: in pixels.
    width: in pixels.
  """

  def __init__(self, height: int, width: int, max_megapixels: float):
    super().__init__(f'large: {width} x {height} pixels, above max_megapixels={max_megapixels:g}')
    self.height, self.width = height, width


def sniff(data: bytes) -> str:
  """The format that a file's first bytes announce; '' for an unknown one."""
  if data[:4] == b'RIFF' and data[8:12] == b'WEBP':
    return 'WEBP'
  if data[4:8] == b'ftyp':
    # Where the first brand says only that it is an image, others tell more.
    brands = data[8 : int.from_bytes(data[:4], 'big')]
    if data[8:12] in (b'avif', b'avis') or (data[8:12] in (b'mif1', b'msf1') and b'avif' in brands):
      return 'AVIF'
    if data[8:12] in _HEIF_BRANDS:
      return 'HEIF'
  for magic, name in _MAGIC:
    if data.startswith(magic):
      return name
  return ''


def is_jpeg(data: bytes) -> bool:
  """Whether a file's first bytes announce a JPEG."""
  return data.startswith(_JPEG)


def check_pixels(height: int, width: int, max_megapixels: float) -> None:
  """Raises TooLargeError if an image has more pixels than may be decoded."""
  if height * width > max_megapixels * 1e6:
    raise TooLargeError(height, width, max_megapixels)


def size(data: bytes) -> tuple[int, int]:
  """Height and width that a JPEG, PNG or BMP announces, in pixels.

  Raises:
    ValueError: if it is none of these, ends before it says, or says nothing.
  """
  try:
    name = sniff(data)
    if name == 'JPEG':
      height, width = struct.unpack_from('>HH', data, _jpeg_frame(data)[1] + 3)
    elif name == 'PNG':
      width, height = struct.unpack_from('>II', data, 16)
    elif name == 'BMP':
      width, height = struct.unpack_from('<ii', data, 18)
    else:
      raise ValueError('not a JPEG, PNG or BMP image')
  except (struct.error, IndexError):
    raise ValueError('ends before the size of its picture') from None
  if height < 1 or width < 1:
    raise ValueError(f'a picture of {width} x {height} pixels')
  return height, width


def _jpeg_segments(data):
  """Yields the markers of a JPEG, each with the position after it, up to its end marker."""
  position = 2
  while True:
    # As libjpeg does: skips what is no marker, then fill bytes.
    position = data.find(b'\xff', position)
    while position >= 0 and data[position : position + 1] == b'\xff':
      position += 1
    if position < 0 or position >= len(data):
      return
    marker = data[position]
    position += 1
    if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD7:  # markers without a length
      continue
    yield marker, position
    if marker == 0xD9:
      return
    position += struct.unpack_from('>H', data, position)[0]
    if marker == 0xDA:
      match = _MARKER.search(data, position)
      position = match.start() if match else len(data)


def _is_frame(marker):
  return 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)


def _jpeg_frame(data):
  """The marker of a JPEG's frame, and the position after it."""
  for marker, position in _jpeg_segments(data):
    if _is_frame(marker):
      return marker, position
  raise IndexError


def check(data: bytes) -> tuple[str, str]:
  """Whether training takes a file that Pillow can decode.

  Args:
    data: a file whose format `sniff` knows.

  Returns:
    ('', '') if it does; else the kind of fault, which is 'corrupt', 'truncated'
    or 'format', and the reason.
  """
  name = sniff(data)
  if name not in _TRAINING_FORMATS:
    return 'format', f'{name} is not read in training'
  checker = {'JPEG': _jpeg, 'PNG': _png}.get(name)
  try:
    return checker(data) if checker else ('', '')  # of others Pillow notices damage
  except (IndexError, struct.error):
    return 'truncated', 'ends within a header'


def check_whole(data: bytes) -> None:
  """Raises ValueError for a truncated or corrupt file, as `check` tells it."""
  fault, reason = check(data)
  if fault in ('corrupt', 'truncated'):
    raise ValueError(f'{fault}: {reason}')


def is_read_as_pillow_reads(data: bytes) -> bool:
  """Whether TensorFlow and simplejpeg read a file as Pillow does, to the bit if it is whole.

  These are 8-bit JPEGs with Huffman codes, and PNGs of up to 8 bits. A GIF is
  none: TensorFlow decodes all its frames to use the first.

  Raises:
    ValueError: if the file is damaged in a way that would be costly to notice
      later.
  """
  name = sniff(data)
  if name == 'PNG' and len(data) > 24 and data[24] <= 8:
    check_whole(data)
    return True
  if name != 'JPEG':
    return False
  try:
    process, position = _jpeg_frame(data)
    precision, components = data[position + 2], data[position + 7]
  except (IndexError, struct.error):
    raise ValueError('ends before the size of its picture') from None
  if process == 0xC2:
    check_whole(data)  # hundreds of scans may follow
  return process in _PROCESSES and precision == 8 and components in (1, 3, 4)


def _jpeg(data):
  marker = frame = precision = scans = 0
  for marker, position in _jpeg_segments(data):
    if _is_frame(marker):
      frame, precision = marker, data[position + 2]
    scans += marker == 0xDA
  if marker != 0xD9:
    return 'truncated', 'no end marker'
  if scans > _MAX_SCANS:
    return 'corrupt', f'{scans} scans'
  if not frame or not scans:
    return 'truncated', 'ends before the picture'
  if frame not in _PROCESSES or precision != 8:
    return 'format', f'JPEG process {frame - 0xC0} of {precision} bits'
  return '', ''


def _png(data):
  position, depth = 8, data[24]
  while position < len(data):
    length, name = struct.unpack_from('>I4s', data, position)
    end = position + 8 + length
    (checksum,) = struct.unpack_from('>I', data, end)
    if zlib.crc32(memoryview(data)[position + 4 : end]) != checksum:
      return 'truncated', f'wrong checksum of chunk {name!r}'
    if name == b'IEND':
      if depth > 8:
        return 'format', f'PNG of {depth} bits'
      return '', ''
    position = end + 4
  return 'truncated', 'no end chunk'
