"""Tests of examine: a file for each kind of fault, and thousands of mutants."""

import io
import random
import struct
import time
from unittest import mock
import warnings
import zlib

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.input import decode_pillow, tensorflow_cpu
from anp_jax.data.prepare import actions, examine
from tests import builders, image_files, image_sources

_encode = builders.encode_image
_exif = builders.exif


def _examine(data, name):
  return examine.examine(data, name, max_megapixels=178.9)


def _kinds(data, name='x'):
  return _examine(data, name).kinds


def _pixels(data):
  return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def _trained_on(data):
  """What training makes of a file: an array, or None."""
  tf = tensorflow_cpu.load()
  try:
    data = decode_pillow.for_tensorflow(data, 178.9)
    if data[:3] == b'\xff\xd8\xff':
      height, width = tf.image.extract_jpeg_shape(data).numpy()[:2]
      return tf.image.decode_and_crop_jpeg(
        data, [0, 0, height, width], channels=3, dct_method='INTEGER_ACCURATE'
      ).numpy()
    return tf.image.decode_image(data, channels=3, expand_animations=False).numpy()
  except (ValueError, tf.errors.OpError):
    return None


_IMAGE = image_sources.picture(24, 31)
_JPEG = _encode(_IMAGE, 'JPEG')
_PNG = _encode(_IMAGE, 'PNG')

# Kinds of the whole files of the usual formats that are of some; all of other formats are of one.
_KINDS = {
  'jpeg cmyk': ('cmyk',),
  'jpeg turned': ('rotated',),
  **dict.fromkeys(('jpeg grey', 'png 1', 'png L', 'bmp grey'), ('grey',)),
  **dict.fromkeys(('png RGBA', 'png transparent palette', 'png transparent colour'), ('alpha',)),
  'gif transparent': ('alpha',),
  'png LA': ('alpha', 'grey'),
  'webp transparent': ('format', 'alpha'),
  'png 16 bits': ('format', 'grey'),  # of 16 bits the upper 8 are kept
  'tiff of inks': ('format', 'cmyk'),
}
_UNUSUAL = ('webp', 'tiff', 'ppm', 'avif', 'jpeg 2000')
_CORRUPT = (
  'a page',
  'empty',
  'icon',
  'jpeg of 12 bits',
  'pgm of 16 bits',
  'postscript',
  'svg',
  'tiff cut',
  'tiff of floats',
  'webp cut',
)


# One kind at a time.


@pytest.mark.parametrize('name', image_files.WHOLE)
def test_a_whole_file_is_of_its_kinds_and_has_the_pixels_of_training(name):
  data = image_files.WHOLE[name]
  kinds = _KINDS.get(name, ('format',) if name.startswith(_UNUSUAL) else ())
  finding = _examine(data, 'x.jp2' if name == 'jpeg 2000' else f'x.{name.split()[0]}')
  assert finding.kinds == kinds and bool(finding.reason) == ('format' in kinds)
  trained_on = _trained_on(data).astype(int)
  border = (6, 8) if name == 'gif with a small frame' else (0, 0)  # of its canvas
  size = image_files.HEIGHT + border[0], image_files.WIDTH + border[1]
  assert (finding.height, finding.width) == size and trained_on.shape == (*size, 3)
  converted = examine.convert(data)
  assert _kinds(converted) == ()
  if kinds and name not in ('jpeg cmyk', 'jpeg turned'):  # see below
    limit = 12 if name in ('jpeg grey', 'webp', 'avif') else 0  # compressed twice, once with 95
    assert bool(limit) == converted.startswith(image_files.JPEG[:3])
    assert np.abs(_pixels(converted) - trained_on).max() <= limit


@pytest.mark.parametrize(
  'data',
  [
    *(image_files.DAMAGED[name] for name in _CORRUPT),
    b'\0' * 5000,
    b'\xff\xd8\xff',
    b'BM',
    b'GIF89a',
    b'\x89PNG\r\n\x1a\n',
    _JPEG[:20],
    _PNG[:20],
  ],
)
def test_what_cannot_be_decoded_is_corrupt(data):
  finding = _examine(data, 'a.jpg')
  assert finding.kinds == ('corrupt',)
  assert (finding.height, finding.width) == (0, 0)
  assert finding.reason and '\n' not in finding.reason and '0x' not in finding.reason
  with pytest.raises(ValueError):
    examine.convert(data)


def _png_chunk(name, data):
  crc = struct.pack('>I', zlib.crc32(name + data))
  return struct.pack('>I', len(data)) + name + data + crc


def test_an_opaque_image_is_not_transparent():
  image = _IMAGE.convert('RGBA')
  assert _kinds(_encode(image, 'PNG')) == ()


def test_endless_scans_are_corrupt_and_never_decoded(monkeypatch):
  progressive = _encode(_IMAGE, 'JPEG', progressive=True)
  first = progressive.index(b'\xff\xda')
  second = progressive.index(b'\xff\xc4', first)
  bomb = progressive[:first]
  bomb += progressive[first:second] * 600 + progressive[first:]
  # It would be at work for hours.
  monkeypatch.setattr(Image, 'open', lambda *_, **__: pytest.fail('decoded'))
  finding = _examine(bomb, 'a.jpg')
  assert finding.kinds == ('corrupt',) and finding.reason.endswith(' scans')


@pytest.mark.parametrize('name', [n for n in image_files.DAMAGED if n not in _CORRUPT])
def test_what_is_decoded_in_part_is_truncated(name):
  finding = _examine(image_files.DAMAGED[name], 'x')
  assert finding.kinds == ('truncated',)
  assert finding.reason and '\n' not in finding.reason
  assert (finding.height, finding.width) == (image_files.HEIGHT, image_files.WIDTH)
  converted = _examine(examine.convert(image_files.DAMAGED[name]), 'x')
  assert converted.kinds == ()
  assert (converted.height, converted.width) == (finding.height, finding.width)


def test_others_still_refuse_what_is_truncated():
  data = _encode(image_sources.picture(200, 300), 'JPEG')[:-500]
  _examine(data, 'x')
  with pytest.raises(OSError):
    Image.open(io.BytesIO(data)).load()


def test_what_was_whole_of_a_truncated_file_is_kept():
  image = image_sources.picture(200, 300)
  data = _encode(image, 'JPEG', quality=95, subsampling=0)
  got = _pixels(examine.convert(data[: len(data) * 3 // 4]))
  off = np.abs(got - np.asarray(image).astype(int))[:64].mean()
  assert off < 3  # twice compressed with quality 95


@pytest.mark.parametrize(
  'size, bytes_, is_one',
  [
    ((500, 374), 2051, True),
    ((500, 374), 2052, False),
    ((200, 200), 2051, True),
    ((500, 199), 2051, False),
    ((75, 75), 2051, False),  # Flickr's own small squares may be as short
    ((32, 32), 900, False),
  ],
)
def test_limits_of_a_placeholder(size, bytes_, is_one):
  data = _encode(Image.new('RGB', size, (240, 240, 240)), 'PNG')
  fill = _png_chunk(b'tEXt', b'k\0' + b'x' * (bytes_ - len(data) - 14))
  data = data[:33] + fill + data[33:]
  assert len(data) == bytes_
  assert _kinds(data) == (('placeholder',) if is_one else ())


def test_four_inks_are_cmyk_and_kinds_come_in_order():
  data = _encode(_IMAGE.convert('CMYK'), 'JPEG', exif=_exif(3))
  assert _kinds(data, 'a.png') == ('rotated', 'cmyk', 'suffix')
  assert _kinds(data[:-2]) == ('truncated', 'rotated', 'cmyk')
  data = _encode(_IMAGE.convert('CMYK'), 'JPEG', quality=95)
  assert _kinds(data) == ('cmyk',)
  converted = examine.convert(data)
  assert _kinds(converted, 'a.jpg') == ()
  off = np.abs(_pixels(converted) - _trained_on(data).astype(int))
  assert off.mean() < 2  # of one more compression


def test_a_suffix_of_another_format_is_noticed():
  assert _kinds(_PNG, 'photo.jpg') == ('suffix',)
  assert _kinds(_JPEG, 'photo.PNG') == ('suffix',)
  for name in ('photo.jpeg', 'photo.JPG', 'photo', 'photo.txt', '.png'):
    assert _kinds(_JPEG, name) == ()


@pytest.mark.parametrize('orientation', range(2, 9))
@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_what_exif_turns_is_rotated(orientation, kind):
  # A bright corner tells where the top left went (EXIF 2.3, figure 5).
  image = np.zeros((16, 32, 3), np.uint8)
  image[:8, :8] = 255
  corner = {2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}[
    orientation
  ]
  data = _encode(Image.fromarray(image), kind, exif=_exif(orientation))
  finding = _examine(data, 'x')
  assert finding.kinds == ('rotated',)
  assert (finding.height, finding.width) == (16, 32)  # as it is stored
  converted = examine.convert(data)
  assert Image.open(io.BytesIO(converted)).format == kind
  assert _kinds(converted) == ()
  got = _pixels(converted)
  assert got.shape == ((32, 16, 3) if orientation > 4 else (16, 32, 3))
  assert got[corner].min() > 250
  assert (got > 127).sum() == 8 * 8 * 3


def test_only_exif_turns():
  xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x>'
  assert _kinds(_encode(_IMAGE, 'JPEG', xmp=xmp)) == ()
  for orientation in (1, 9):  # as it is; there is none such
    assert _kinds(_encode(_IMAGE, 'JPEG', exif=_exif(orientation))) == ()
  for broken in (b'Exif\0\0', b'Exif\0\0MM\0*\xff\xff\xff\xff', _exif(6)[:-9]):
    assert _kinds(_encode(_IMAGE, 'JPEG', exif=broken)) == ()


def test_conversion_is_the_same_each_time_and_holds_no_metadata():
  data = _encode(_IMAGE, 'JPEG', exif=_exif(6), icc_profile=b'profile' * 9, comment=b'hello')
  converted = examine.convert(data)
  assert converted == examine.convert(data)
  image = Image.open(io.BytesIO(converted))
  assert not {'exif', 'icc_profile', 'comment', 'xmp'} & set(image.info)
  # Quality 95 and full colours: as Pillow writes them.
  turned = np.rot90(np.asarray(Image.open(io.BytesIO(data))), -1)
  again = Image.fromarray(np.ascontiguousarray(turned))
  assert converted == _encode(again, 'JPEG', quality=95, subsampling=0)


# Thousands of mutants.


def _mutant(data, rng):
  """A file after one kind of accident."""
  data = bytearray(data)
  place = rng.randrange(len(data))
  accident = rng.randrange(8)
  if accident == 0:
    del data[place:]
  elif accident == 1:
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
      data[rng.randrange(len(data))] = rng.randrange(256)
  elif accident == 2:
    data[rng.randrange(min(64, len(data)))] = rng.randrange(256)
  elif accident == 3:
    del data[place : place + rng.choice((1, 2, 4, 16))]
  elif accident == 4:
    data[place:place] = rng.randbytes(rng.choice((1, 2, 8)))
  elif accident == 5:
    data[place:] = bytes(len(data) - place)
  elif accident == 6:
    data[place] ^= 1 << rng.randrange(8)
  else:
    data += rng.randbytes(rng.choice((1, 2, 50)))
  return bytes(data)


@pytest.mark.slow
def test_mutants_that_pass_are_decoded_in_training_and_others_converted(capfd, recwarn):
  warnings.simplefilter('always')
  rng = random.Random(0)
  talkative = ('avif', 'jpeg 2000', 'tiff')  # libraries that write to standard error
  seeds = [data for name, data in image_files.WHOLE.items() if not name.startswith(talkative)]
  seeds.append(_encode(_IMAGE, 'TIFF'))
  slowest, usable, verdicts = 0.0, [], set()
  for i in range(4000):
    data = _mutant(seeds[i % len(seeds)], rng)
    start = time.thread_time()  # of this thread alone: others load the machine
    finding = _examine(data, 'x.jpg')
    slowest = max(slowest, time.thread_time() - start)
    assert set(finding.kinds) <= set(actions.KINDS)
    verdicts.update(finding.kinds)
    if not {'corrupt', 'large', 'truncated', 'format'} & set(finding.kinds):
      usable.append((data, finding))
    elif not {'corrupt', 'large'} & set(finding.kinds):
      assert finding.height > 0 and finding.width > 0
    if 'corrupt' not in finding.kinds and finding.height * finding.width < 10**6 and i % 4 == 0:
      converted = _examine(examine.convert(data), 'x')
      assert not {'corrupt', 'truncated', 'format', 'rotated'} & set(converted.kinds)
      sizes = sorted((finding.height, finding.width))
      assert sorted((converted.height, converted.width)) == sizes
  assert [str(w.message) for w in recwarn] == []
  assert capfd.readouterr() == ('', '')
  # A damaged header may announce a hundred million pixels.
  assert slowest < 5
  assert verdicts == {*actions.KINDS[1:11]} - {'placeholder'}
  # Some are harmless, such as a changed pixel.
  assert 800 < len(usable) < 2400
  for data, finding in usable[::2]:
    image = _trained_on(data)
    assert image is not None, finding
    assert image.shape == (finding.height, finding.width, 3), finding


@pytest.mark.parametrize('outcomes', [[MemoryError], [OSError, MemoryError]])
def test_a_lack_of_memory_is_no_damage(outcomes, monkeypatch):
  monkeypatch.setattr(examine, '_load', mock.Mock(side_effect=outcomes))
  with pytest.raises(MemoryError):
    _examine(_encode(builders.random_pixels(8, 8), 'PNG'), 'x.png')
