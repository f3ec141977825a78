"""Tests of image_format.size: the size that a file announces."""

import io
import struct

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.image_files import image_format
from tests import builders, image_files


def _file(width, height, kind, **options):
  image = Image.new('RGB', (width, height))
  return builders.encode_image(image, kind, **options)


@pytest.mark.parametrize(
  'name', [n for n in image_files.WHOLE if n.startswith(('jpeg', 'png', 'bmp')) and '2000' not in n]
)
def test_size_of_a_whole_file(name):
  assert image_format.size(image_files.WHOLE[name]) == (image_files.HEIGHT, image_files.WIDTH)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'BMP'])
@pytest.mark.parametrize('width, height', [(1, 1), (255, 1025)])
def test_size(kind, width, height):
  assert image_format.size(_file(width, height, kind)) == (height, width)


def test_no_size_is_read_in_a_comment():
  data = _file(90, 70, 'JPEG', comment=b'\xff\xc0\0\x11\x08\0\x07\0\x09')
  assert image_format.size(data) == (70, 90)


def test_size_of_the_picture_and_not_of_its_thumbnail():
  thumbnail = _file(16, 12, 'JPEG')
  exif = b'Exif\0\0' + thumbnail
  segment = b'\xff\xe1' + struct.pack('>H', len(exif) + 2) + exif
  data = _file(90, 70, 'JPEG')
  assert image_format.size(data[:2] + segment + data[2:]) == (70, 90)


def test_fill_bytes_and_markers_without_a_length():
  data = _file(90, 70, 'JPEG')
  for extra in (b'\xff\xff\xff', b'\xff\x01', b'\xff\xd0\xff\xd7'):
    assert image_format.size(data[:2] + extra + data[2:]) == (70, 90)


@pytest.mark.parametrize('stray', [b'\0', b'\xff\0', b'AB', b'\0\xff\xff\0'])
def test_stray_bytes_before_a_marker(stray):
  """Decoders pass over them, and so must what is trained on."""
  data = _file(90, 70, 'JPEG')
  data = data[:20] + stray + data[20:]  # behind the first segment
  assert Image.open(io.BytesIO(data)).size == (90, 70)
  assert image_format.size(data) == (70, 90)


def test_any_bytes_have_a_size_or_are_refused():
  """No other error and no endless loop; a segment of length 0 is one."""
  rng = np.random.default_rng(0)
  files = [_file(40, 30, kind) for kind in ('JPEG', 'PNG', 'BMP')]
  files.append(b'\xff\xd8\xff\xe0' + b'\0\0\xff\xe0' * 20)
  for data in (b'', b'<html>', b'BM', b'\xff\xd8\xff\xe0\x00\x04ab no marker'):
    with pytest.raises(ValueError, match='not a|ends before'):
      image_format.size(data)
  refused = 0
  for i in range(4000):
    data = bytearray(files[i % len(files)])
    for place in rng.integers(0, min(len(data), 200), rng.integers(1, 5)):
      data[place] = rng.integers(256)
    del data[int(rng.integers(1, len(data) + 1)) :]
    try:
      height, width = image_format.size(bytes(data))
      assert height > 0 and width > 0
    except ValueError:
      refused += 1
  assert 400 < refused < 3600
