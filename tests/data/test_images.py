"""Tests of images: what every program decodes, and what it refuses."""

import io
import struct
import warnings
import zlib

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.image_files import image_format, images
from anp_jax.data.input import decode_pillow
from anp_jax.data.prepare import examine
from tests import builders, image_sources


def _file(kind, size=(40, 40), **options):
  tones = np.linspace(0, 255, size[0] * size[1] * 3).astype(np.uint8)
  return builders.encode_image(tones.reshape(size[1], size[0], 3), kind, **options)


def _announcing(kind, width, height):
  """A small file whose header tells of another size."""
  data = bytearray(_file(kind))
  if kind == 'PNG':
    data[16:24] = struct.pack('>II', width, height)
    crc = struct.pack('>I', zlib.crc32(bytes(data[12:29])))
    data[29:33] = crc
  else:
    place = data.index(b'\xff\xc0') + 5
    data[place : place + 4] = struct.pack('>HH', height, width)
  return bytes(data)


def _source(file):
  """Three small pictures and another file, the third."""
  small = [_file(kind, (30, 30)) for kind in ('JPEG', 'PNG', 'BMP')]
  return image_sources.Source([*small[:2], file, small[2]])


def _verdicts(config, file, caplog):
  """Whether each program calls the file large, by what it says of it."""
  caplog.clear()
  batch = image_sources.evaluated(config, _source(file))  # train, evaluate and show
  weights = batch['weight'].tolist()
  assert weights in ([1, 1, 0, 1], [1, 1, 1, 1])
  messages = [r.getMessage() for r in caplog.records]
  assert len(messages) == weights.count(0)
  if messages:
    assert 'example 2 cannot be used' in messages[0] and 'large: ' in messages[0]
  result, limit = [weights[2] == 0], config.data.max_megapixels
  for read in (
    decode_pillow.eval_decoder(config),  # predict
    lambda f: images.decode_shrunk(f, 32, limit),  # cache
    lambda f: decode_pillow.decode_file(f, limit),  # bicubic
  ):
    try:
      read(file)
      result.append(False)
    except ValueError as e:
      assert str(e).startswith('large: ')
      result.append(True)
  verdict = examine.examine(file, 'x', config.data.max_megapixels)  # prepare
  assert verdict.kinds in ((), ('large',))
  return [*result, verdict.kinds == ('large',)]


@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_a_large_image_is_large_to_every_program(config, kind, caplog):
  file = _announcing(kind, 20000, 12000)
  assert image_format.size(file) == (12000, 20000)
  assert _verdicts(config, file, caplog) == [True] * 5
  with pytest.raises(ValueError, match='^large: 20000 x 12000 pixels, above '):
    decode_pillow.eval_decoder(config)(file)


@pytest.mark.parametrize('decode', ['fast', 'bicubic'])
def test_the_limit_is_that_of_the_config(config, decode, caplog):
  """40 x 40 pixels: 1,600 are not more than 1,600."""
  config.data.decode = decode
  for kind in ('JPEG', 'PNG'):
    config.data.max_megapixels = 0.0016
    assert _verdicts(config, _file(kind), caplog) == [False] * 5
    config.data.max_megapixels = 0.0015
    assert _verdicts(config, _file(kind), caplog) == [True] * 5


def test_pillow_has_no_limit_of_its_own():
  """It would warn of 89.5 million pixels or more, or refuse them."""
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    image = images.open_image(_announcing('PNG', 14000, 12000), 178.9)
  assert image.size == (14000, 12000)


# HEIC.


@pytest.fixture
def heic():
  """A photograph as a telephone saves it: its file and its RGB pixels."""
  pillow_heif = pytest.importorskip('pillow_heif')
  small = Image.fromarray(builders.random_pixels(4, 4))
  image = small.resize((80, 60), Image.Resampling.BICUBIC)
  data = io.BytesIO()
  pillow_heif.from_pillow(image).save(data, quality=95)
  return data.getvalue(), np.asarray(image).astype(int)


def test_heic_is_converted_to_jpeg(heic):
  data, pixels = heic
  assert image_format.sniff(data) == 'HEIF'
  verdict = examine.examine(data, 'x.heic', 178.9)
  assert (verdict.format, verdict.kinds) == ('HEIF', ('format',))
  assert (verdict.height, verdict.width) == (60, 80)
  image = Image.open(io.BytesIO(examine.convert(data)))
  assert image.format == 'JPEG'
  assert np.abs(np.asarray(image).astype(int) - pixels).mean() < 4


def test_heic_is_predicted(heic, config):
  data, pixels = heic
  config.data.image_size = config.data.resize = 60
  view = decode_pillow.eval_decoder(config)(data)
  assert np.abs(view.astype(int) - pixels[:, 10:70]).mean() < 4


def test_heic_without_its_package(config, monkeypatch):
  data = b'\0\0\0\x18ftypheic\0\0\0\0mif1heic' + b'\0' * 50
  monkeypatch.setattr(images, 'has_heif', lambda: False)
  Image.init()  # or it would fill the list that the monkeypatch drops
  monkeypatch.setattr(Image, 'ID', [k for k in Image.ID if k != 'HEIF'])
  with pytest.raises(ValueError, match='pip install pillow-heif'):
    decode_pillow.eval_decoder(config)(data)


@pytest.mark.parametrize(
  'brands, name',
  [
    (b'heic\0\0\0\0mif1heic', 'HEIF'),
    (b'mif1\0\0\0\0mif1heic', 'HEIF'),
    (b'mif1\0\0\0\0mif1avif', 'AVIF'),
    (b'avif\0\0\0\0avifmif1', 'AVIF'),
    (b'isom\0\0\0\0isomavc1', ''),  # a film
  ],
)
def test_brands(brands, name):
  data = struct.pack('>I', 8 + len(brands)) + b'ftyp' + brands + b'avif' * 9
  assert image_format.sniff(data) == name
