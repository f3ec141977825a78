"""Examines image files before they are trained on, decoding each file once."""

import io
import logging
import math
import os
from typing import NamedTuple
import warnings

from PIL import Image, ImageFile

from anp_jax.data.image_files import colours, image_format, images, orientation

# The picture that Flickr sends for a photograph that is gone has 2,051 bytes
# and 500x374 pixels. Honest files of so few bytes hold much smaller pictures.
PLACEHOLDER_BYTES, PLACEHOLDER_SIDE = 2051, 200

# Formats by suffix. Pillow learns of HEIF when it opens the first such file.
_FORMATS = Image.registered_extensions() | dict.fromkeys(images.HEIF_SUFFIXES, 'HEIF')

# Pillow logs what it thinks of tags; the finding is what counts.
logging.getLogger('PIL').setLevel(logging.CRITICAL)


class Finding(NamedTuple):
  """An image file, and what is unusual about it.

  Attributes:
    format: Pillow's name, such as 'JPEG'; '' if the bytes are of no image.
    height: in pixels as stored, 0 for a corrupt file.
    width: in pixels as stored, likewise.
    kinds: what is unusual, the worst first; none for an undamaged and upright
      colour picture in a format that training reads.
    reason: why it is corrupt, truncated or of a wrong format.
    size: bytes of the file; 0 if it was not read from one.
    digest: SHA-256 of them; b'' likewise.
  """

  format: str
  height: int
  width: int
  kinds: tuple[str, ...]
  reason: str
  size: int = 0
  digest: bytes = b''


def examine(data: bytes, file_name: str, max_megapixels: float) -> Finding:
  """Decodes an image and tells what is unusual about it.

  The kinds: 'corrupt': nothing can be decoded; 'large': of more than
  `max_megapixels`; 'truncated': a part can be decoded; 'placeholder': at most
  2,051 bytes though 200 pixels a side or more; 'format': of none that training
  reads (all but 8-bit JPEG and PNG, GIF and BMP); 'rotated' by its EXIF
  orientation; 'cmyk'; 'alpha': transparent in places; 'grey': of one channel;
  'suffix': the name says another format. A corrupt or large file has no other
  kind, and a large one is not decoded.

  Args:
    data: the file.
    file_name: only its suffix counts.
    max_megapixels: million pixels that training decodes.

  Returns:
    The finding; no file warns or prints, or raises but for a lack of memory.
  """
  name = image_format.sniff(data)
  if not name:
    return unusable(f'no image: begins with {data[:8]!r}' if data else 'no image: is empty')
  fault, reason = image_format.check(data)
  if fault == 'corrupt':
    return unusable(reason, format_name=name)
  try:
    image, damage = _decode(data, max_megapixels)
  except image_format.TooLargeError as e:
    reason = str(e).removeprefix('large: ')  # the kind says so
    return Finding(name, e.height, e.width, ('large',), reason)
  except ValueError as e:
    return unusable(str(e), format_name=name)
  if damage:
    fault, reason = 'truncated', damage
  if image.mode not in colours.MODES:
    return unusable(f'pixels of kind {image.mode}', format_name=name)
  kinds = _kinds(image, len(data), name, fault, file_name)
  width, height = image.size
  return Finding(name, height, width, kinds, reason)


def unusable(reason: str, kind: str = 'corrupt', format_name: str = '') -> Finding:
  """Returns the finding for a file that cannot be decoded at all."""
  return Finding(format_name, 0, 0, (kind,), reason)


def convert(data: bytes, upright: bool = True, shorter: int = 0, quality: int = 90) -> bytes:
  """Returns the same picture as an 8-bit RGB file without metadata.

  A JPEG, HEIC, AVIF or lossy WebP becomes a JPEG, all else a PNG. Transparency is ignored,
  as in training. What a truncated file lacks is grey or black.

  Args:
    data: a file that `examine` does not call large.
    upright: whether the picture is turned as its EXIF orientation says.
    shorter: pixels to which its shorter side is reduced, by an antialiased bicubic
      filter; the JPEG then has half the colour resolution. 0: the picture keeps its size,
      the JPEG has quality 95 and full colour resolution.
    quality: quality of the reduced JPEG, 1 to 100.

  Raises:
    ValueError: if it cannot be decoded: `examine` calls it corrupt.
  """
  name = image_format.sniff(data)
  image, _ = _decode(data, math.inf)
  turn = orientation.transpose(image) if upright else None
  pixels = images.transposed(colours.rgb(image), turn)
  if shorter:
    size = images.shrunk_size(pixels.size, shorter)
    pixels = pixels.resize(size, Image.Resampling.BICUBIC)
  # A picture of its own: nothing of the file's information would follow.
  clean = Image.frombytes('RGB', pixels.size, pixels.tobytes())
  result = io.BytesIO()
  is_lossy = b'VP8L' not in data if name == 'WEBP' else name in ('JPEG', 'HEIF', 'AVIF')
  if is_lossy:  # a photograph
    quality, subsampling = (quality, 2) if shorter else (95, 0)
    clean.save(result, 'JPEG', quality=quality, subsampling=subsampling)
  else:
    clean.save(result, 'PNG')
  return result.getvalue()


def _kinds(image, size, name, fault, file_name):
  suffix = os.path.splitext(file_name)[1].lower()
  few = size <= PLACEHOLDER_BYTES and min(image.size) >= PLACEHOLDER_SIDE
  is_kind = {
    'truncated': fault == 'truncated',
    'placeholder': few and fault != 'truncated',
    'format': fault == 'format',
    'rotated': orientation.transpose(image) is not None,
    'cmyk': image.mode == 'CMYK',
    'alpha': _is_transparent(image),
    'grey': image.mode in colours.GREY,
    'suffix': _FORMATS.get(suffix, name) != name,
  }
  return tuple(kind for kind, holds in is_kind.items() if holds)


def _is_transparent(image):
  """Whether a pixel is transparent, or may be where a colour stands for transparency."""
  if image.mode not in ('RGBA', 'LA', 'PA'):
    return 'transparency' in image.info
  return image.getchannel('A').getextrema()[0] < 255


def _decode(data, max_megapixels):
  """Pixels of the first frame; if it is damaged, those before it and the damage."""
  try:
    return _load(data, max_megapixels), ''
  except (image_format.TooLargeError, MemoryError):
    raise
  except Exception as e:  # whatever Pillow makes of damaged fields
    damage = _text(e)
  ImageFile.LOAD_TRUNCATED_IMAGES = True
  try:
    return _load(data, max_megapixels), damage
  except MemoryError:
    raise
  except Exception as e:
    raise ValueError(damage) from e
  finally:
    ImageFile.LOAD_TRUNCATED_IMAGES = False


def _load(data, max_megapixels):
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    image = images.open_image(data, max_megapixels, must_be_whole=False)
    image.load()
  return image


def _text(error):
  if isinstance(error, Image.UnidentifiedImageError):
    return 'header cannot be read'  # its text has an address of memory
  return ' '.join(str(error).split()) or type(error).__name__
