"""Files of pictures in every format and mode, whole and damaged."""

import struct

import numpy as np
from PIL import Image, features

from tests import builders, image_sources

HEIGHT, WIDTH = 45, 59


def _picture(mode='RGB', seed=1):
  image = image_sources.picture(HEIGHT, WIDTH, seed, (7, 9), mode)
  if mode.endswith('A'):
    image.putalpha(200)
  return image


def _encode(kind, mode='RGB', **options):
  return builders.encode_image(_picture(mode), kind, **options)


def _deep_png():
  rng = np.random.default_rng(2)
  grey = rng.integers(0, 2**16, (HEIGHT, WIDTH), np.uint16)
  return builders.encode_image(Image.fromarray(grey), 'PNG')


def _several(kind, **options):
  frames = [_picture(seed=seed) for seed in (3, 4, 5)]
  return builders.encode_image(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def _small_first_frame():
  """A GIF whose first frame leaves a border of its canvas."""
  data = bytearray(_encode('GIF', 'P'))
  data[6:10] = struct.pack('<HH', WIDTH + 8, HEIGHT + 6)
  return bytes(data)


JPEG, PNG = _encode('JPEG'), _encode('PNG')
WHOLE = {
  'jpeg': JPEG,
  'jpeg 4:4:4': _encode('JPEG', subsampling=0),
  'jpeg grey': _encode('JPEG', 'L'),
  'jpeg cmyk': _encode('JPEG', 'CMYK'),
  'jpeg progressive': _encode('JPEG', progressive=True),
  'jpeg restarts': _encode('JPEG', restart_marker_blocks=1),
  'jpeg with a second picture': _several('MPO'),
  'jpeg with bytes behind it': JPEG + b'some bytes more',
  'jpeg with bytes before its end': JPEG[:-2] + bytes(239) + JPEG[-2:],  # libjpeg warns of them
  'jpeg turned': _encode('JPEG', exif=builders.exif(6)),
  'png': PNG,
  **{f'png {m}': _encode('PNG', m) for m in ('1', 'L', 'LA', 'P', 'RGBA')},
  'png 2 bits': builders.encode_image(_picture().quantize(4), 'PNG', bits=2),
  'png 16 bits': _deep_png(),
  'png transparent palette': _encode('PNG', 'P', transparency=3),
  'png transparent colour': _encode('PNG', transparency=(1, 2, 3)),
  'png animated': _several('PNG'),
  'gif': _encode('GIF', 'P'),
  'gif of many frames': _several('GIF'),
  'gif with a small frame': _small_first_frame(),
  'gif transparent': builders.encode_image(_picture().quantize(16), 'GIF', transparency=3),
  'bmp': _encode('BMP'),
  'bmp grey': _encode('BMP', 'L'),
  'bmp of four channels': _encode('BMP', 'RGBA'),
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
  WHOLE['avif'] = _encode('AVIF')
if features.check('jpg_2000'):
  WHOLE['jpeg 2000'] = _encode('JPEG2000')
_FRAME = b'\xff\xc0\0\x11'  # marker and length; its bits follow
DAMAGED = {
  'empty': b'',
  'a page': b'<html><body>404</body></html>',
  'jpeg without its end': JPEG[:-2],
  'jpeg cut': JPEG[: len(JPEG) // 2],
  'jpeg progressive, cut': WHOLE['jpeg progressive'][:-300],
  'jpeg of 12 bits': JPEG.replace(_FRAME + b'\x08', _FRAME + b'\x0c'),
  'png cut': PNG[: len(PNG) // 2],
  'png without its end': PNG[:-12],
  'png with a flipped bit': PNG[:90] + bytes([PNG[90] ^ 1]) + PNG[91:],
  'gif cut': WHOLE['gif'][:900],
  'bmp cut': _encode('BMP')[:-500],
  'bmp with a palette, cut': _encode('BMP', 'P')[:-500],
  'webp cut': WHOLE['webp'][:200],
  'tiff cut': WHOLE['tiff tiff_lzw'][:300],
  'ppm cut': WHOLE['ppm'][:-300],
  'tiff of floats': builders.encode_image(Image.fromarray(np.ones((24, 31), np.float32)), 'TIFF'),
  'pgm of 16 bits': b'P5 31 24 65535\n' + bytes(range(248)) * 6,
  'postscript': b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n',
  'icon': _encode('ICO'),
  'svg': b'<svg xmlns="http://www.w3.org/2000/svg"/>',
}
