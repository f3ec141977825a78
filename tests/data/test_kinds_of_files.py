"""Tests of one rule: what training decodes and what prediction decodes is one.

Each file has Pillow's pixels in both, or is refused in both.
"""

import io
import struct

import numpy as np
from PIL import Image, features
import pytest

from anp_jax.data.image_files import images
from anp_jax.data.input import decode_pillow
from anp_jax.data.sources import cache
from tests import builders, image_sources

_HEIGHT, _WIDTH = 45, 59


def _picture(mode='RGB', seed=1):
  return image_sources.picture(_HEIGHT, _WIDTH, seed, (7, 9), mode)


def _encode(kind, mode='RGB', **options):
  return builders.encode_image(_picture(mode), kind, **options)


def _deep_png():
  rng = np.random.default_rng(2)
  grey = rng.integers(0, 2**16, (_HEIGHT, _WIDTH), np.uint16)
  return builders.encode_image(Image.fromarray(grey), 'PNG')


def _several(kind, **options):
  frames = [_picture(seed=seed) for seed in (3, 4, 5)]
  return builders.encode_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def _transparent_palette(kind):
  return _encode(kind, 'P', transparency=3)


def _small_first_frame():
  """A GIF whose first frame leaves a border of its canvas."""
  data = bytearray(_encode('GIF', 'P'))
  data[6:10] = struct.pack('<HH', _WIDTH + 8, _HEIGHT + 6)
  return bytes(data)


_JPEG, _PNG = _encode('JPEG'), _encode('PNG')
_WHOLE = {
  'jpeg': _JPEG,
  'jpeg 4:4:4': _encode('JPEG', subsampling=0),
  'jpeg grey': _encode('JPEG', 'L'),
  'jpeg cmyk': _encode('JPEG', 'CMYK'),
  'jpeg progressive': _encode('JPEG', progressive=True),
  'jpeg restarts': _encode('JPEG', restart_marker_blocks=1),
  'jpeg with a second picture': _several('MPO'),
  'jpeg with bytes behind it': _JPEG + b'some bytes more',
  'jpeg turned': _encode('JPEG', exif=builders.exif(6)),
  'png': _PNG,
  **{f'png {m}': _encode('PNG', m) for m in ('1', 'LA', 'P', 'RGBA')},
  'png 2 bits': builders.encode_image(_picture().quantize(4), 'PNG', bits=2),
  'png 16 bits': _deep_png(),
  'png transparent palette': _transparent_palette('PNG'),
  'png transparent colour': _encode('PNG', transparency=(1, 2, 3)),
  'png animated': _several('PNG'),
  'gif': _encode('GIF', 'P'),
  'gif of many frames': _several('GIF'),
  'gif with a small frame': _small_first_frame(),
  'gif transparent': _transparent_palette('GIF'),
  'bmp': _encode('BMP'),
  'bmp with a palette': _encode('BMP', 'P'),
  'bmp with bytes behind it': _encode('BMP') + b'\0\0',
  'webp': _encode('WEBP'),
  'webp transparent': _encode('WEBP', 'RGBA', lossless=True),
  'tiff tiff_lzw': _encode('TIFF', compression='tiff_lzw'),
  'tiff of pages': _several('TIFF'),
  'tiff of inks': _encode('TIFF', 'CMYK'),
  'ppm': _encode('PPM'),
}
if features.check('avif'):
  _WHOLE['avif'] = _encode('AVIF')
if features.check('jpg_2000'):
  _WHOLE['jpeg 2000'] = _encode('JPEG2000')
_FRAME = b'\xff\xc0\0\x11'  # marker and length; its bits follow
_DAMAGED = {
  'empty': b'',
  'a page': b'<html><body>404</body></html>',
  'jpeg without its end': _JPEG[:-2],
  'jpeg cut': _JPEG[: len(_JPEG) // 2],
  'jpeg progressive, cut': _WHOLE['jpeg progressive'][:-300],
  'jpeg of 12 bits': _JPEG.replace(_FRAME + b'\x08', _FRAME + b'\x0c'),
  'png cut': _PNG[: len(_PNG) // 2],
  'png without its end': _PNG[:-12],
  'png with a flipped bit': _PNG[:90] + bytes([_PNG[90] ^ 1]) + _PNG[91:],
  'gif cut': _WHOLE['gif'][:900],
  'bmp cut': _encode('BMP')[:-500],
  'bmp with a palette, cut': _encode('BMP', 'P')[:-500],
  'webp cut': _WHOLE['webp'][:200],
  'tiff cut': _WHOLE['tiff tiff_lzw'][:300],
  'ppm cut': _WHOLE['ppm'][:-300],
  'postscript': b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n',
  'icon': _encode('ICO'),
  'svg': b'<svg xmlns="http://www.w3.org/2000/svg"/>',
}


def _config(cached='none', folder=''):
  keys = {'image_size': 32, 'resize': 36, 'cache': cached, 'max_damaged': 1.0, 'dir': str(folder)}
  return builders.config({f'data.{key}': value for key, value in keys.items()})


def _trained(config, files):
  """Pixels and weights of files in one stream, and the files that it names."""
  source = image_sources.Source(files)
  batch = image_sources.evaluated(config, cache.wrap(source, config))
  return batch['image'], batch['weight'], source.named


@pytest.fixture(scope='module')
def decoded():
  images, weights, named = _trained(_config(), list(_WHOLE.values()))
  return {
    name: (image, weight, i in named)
    for i, (name, image, weight) in enumerate(zip(_WHOLE, images, weights))
  }


def _pillow(file):
  """The picture as Pillow alone makes it, transparency dropped."""
  with Image.open(io.BytesIO(file)) as image:
    if image.mode.startswith('I;16'):
      return Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    if image.format == 'GIF' and 'transparency' in image.info:
      pixels = np.array(image.convert('RGBA'))
      pixels[pixels[..., 3] == 0] = 0
      return Image.fromarray(pixels[..., :3])
    if image.mode in ('LA', 'RGBA', 'P', 'PA'):
      return Image.fromarray(np.asarray(image.convert('RGBA'))[..., :3])
    return image.convert('RGB')


@pytest.mark.parametrize('name', _WHOLE)
def test_a_whole_file_is_trained_and_predicted_as_pillow_has_it(decoded, name):
  file = _WHOLE[name]
  trained, weight, is_named = decoded[name]
  assert weight == 1 and not is_named
  read = decode_pillow.eval_decoder(_config())
  np.testing.assert_array_equal(trained, read(file))
  want = read(builders.encode_image(_pillow(file).convert('RGB'), 'PNG'))
  # The product of inks is rounded.
  tolerance = 2 if 'cmyk' in name else 0
  assert np.abs(trained.astype(int) - want).max() <= tolerance
  assert want.std() > 5


@pytest.mark.parametrize('cached', ['none', 'mapped'])
def test_damaged_files_are_named_in_training_and_in_prediction(cached, tmp_path):
  config = _config(cached, tmp_path)
  files = [_PNG, *_DAMAGED.values()]
  _, weights, named = _trained(config, files)
  weight_of = dict(zip(['png', *_DAMAGED], weights))
  assert [name for name in weight_of if weight_of[name]] == ['png']
  assert sorted(named) == list(range(1, len(files)))
  read = decode_pillow.eval_decoder(config)
  for name, file in _DAMAGED.items():
    with pytest.raises(ValueError) as e:
      read(file)
    assert str(e.value) and '\n' not in str(e.value), name


def test_no_program_is_started_for_postscript(monkeypatch):
  """Pillow has Ghostscript draw an EPS, under any suffix."""
  started = []
  monkeypatch.setattr('subprocess.check_call', started.append)
  monkeypatch.setattr('subprocess.Popen', started.append)
  monkeypatch.setattr('shutil.which', lambda name: f'/usr/bin/{name}')
  with pytest.raises(ValueError, match='format'):
    decode_pillow.eval_decoder(_config())(_DAMAGED['postscript'])
  assert not started


def test_a_lack_of_memory_is_no_damage(monkeypatch):
  def fail(*args):
    raise OSError('out of memory error when reading image file')

  monkeypatch.setattr('PIL.ImageFile.ImageFile.load', fail)
  with pytest.raises(MemoryError):
    images.decode_shrunk(_PNG, 32, 100)


def test_one_frame_of_a_gif_is_decoded():
  """TensorFlow would decode all: a file of a megabyte may fill the memory."""
  file = decode_pillow.for_tensorflow(_WHOLE['gif of many frames'], 100)
  assert file.startswith(b'BM')
  assert len(file) == 54 + (3 * _WIDTH + 3) // 4 * 4 * _HEIGHT


def test_photographs_go_to_tensorflow_as_they_are():
  for name in ('jpeg', 'jpeg progressive', 'jpeg cmyk', 'png', 'png P'):
    assert decode_pillow.for_tensorflow(_WHOLE[name], 100) is _WHOLE[name]
