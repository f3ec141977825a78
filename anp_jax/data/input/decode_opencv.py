"""Views by OpenCV and simplejpeg: config.data.decode='fast'.

A JPEG is decoded at 1/2, 1/4 or 1/8 of its scale, which the format offers almost for
nothing, so that a view is made from less than twice its pixels a side; then each pixel lies
between its four nearest, which takes a sixth of the time of a mean over areas.
"""

import functools
import threading
import types
from typing import NamedTuple

import numpy as np

from anp_jax.data.image_files import image_format

_MAX_HALVINGS = 3
_scratch = threading.local()


@functools.cache
def load() -> tuple[types.ModuleType, types.ModuleType]:
  """Imports and returns cv2 and simplejpeg; nothing needs them where no image is resized."""
  import cv2
  import simplejpeg

  cv2.setNumThreads(1)  # the input has threads of its own
  return cv2, simplejpeg


class Jpeg(NamedTuple):
  """A JPEG that is not decoded yet.

  Attributes:
    data: file.
    shape: height and width in pixels.
  """

  data: bytes
  shape: tuple[int, int]


def opened(file: bytes, max_megapixels: float) -> Jpeg | None:
  """A file that `view` reads: a JPEG of three colours or one; None for another.

  Args:
    file: image file.
    max_megapixels: million pixels that it may have.

  Raises:
    ValueError: if it is damaged or has more pixels.
  """
  if not image_format.is_jpeg(file) or not image_format.is_read_as_pillow_reads(file):
    return None
  height, width, colours, _ = _whole(load()[1].decode_jpeg_header, file)
  image_format.check_pixels(height, width, max_megapixels)
  return Jpeg(file, (height, width)) if colours in ('YCbCr', 'RGB', 'Gray') else None


def view(image: Jpeg | np.ndarray, box: np.ndarray, flip: bool, out: np.ndarray) -> None:
  """Writes a view of an image.

  Args:
    image: file, or (height, width, 3) uint8.
    box: (4,) top, left, height, width, whole pixels.
    flip: whether the view is mirrored left to right.
    out: (side, side, 3) uint8, contiguous.

  Raises:
    ValueError: for a file that is not whole.
  """
  if isinstance(image, Jpeg):
    halvings, (top, left, height, width) = reduced(box, len(out))
    pixels = decoded(image, halvings)
  else:
    pixels, (top, left, height, width) = image, map(int, box)
  pixels = pixels[top : top + height, left : left + width]
  if pixels.shape == out.shape:
    out[:] = pixels[:, ::-1] if flip else pixels
    return
  resize(pixels, out)
  if flip:
    load()[0].flip(out, 1, dst=out)


def reduced(box: np.ndarray, side: int) -> tuple[int, list[int]]:
  """A box of an image whose scale was halved as often as leaves it `side` pixels wide and long.

  Args:
    box: (4,) top, left, height, width, in pixels of the image.
    side: pixels a side of the view.

  Returns:
    halvings, at most three; the box in whole pixels of the smaller image.
  """
  halvings = min(max((int(min(box[2:])) // side).bit_length() - 1, 0), _MAX_HALVINGS)
  return halvings, [int(n) >> halvings for n in box]


def decoded(image: Jpeg, halvings: int) -> np.ndarray:
  """A JPEG at a part of its scale, in memory that the thread's next one takes.

  Args:
    image: file.
    halvings: how often its height and width are halved, rounded up; at most three.

  Returns:
    (height, width, 3) uint8.

  Raises:
    ValueError: for a file that is not whole.
  """
  height, width = image.shape
  # Fresh memory for each image would take a seventh of the time.
  if len(getattr(_scratch, 'pixels', ())) < height * width * 3:
    _scratch.pixels = np.empty(height * width * 3, np.uint8)
  least = {}
  if halvings:
    least = {'min_height': -(-height >> halvings), 'min_width': -(-width >> halvings)}
  return _whole(load()[1].decode_jpeg, image.data, buffer=_scratch.pixels, **least)


def _whole(function, file, **keywords):
  try:
    return function(file, **keywords)
  except ValueError as e:
    try:
      image_format.check_whole(file)
      return function(file, strict=False, **keywords)  # as Pillow, without libjpeg's warnings
    except ValueError:
      raise ValueError(f'not a whole image: {e}') from None


def resize(pixels: np.ndarray, out: np.ndarray) -> None:
  """Resizes (height, width, 3) uint8 to fill (side, side, 3) uint8, which is contiguous."""
  cv2, side = load()[0], len(out)
  is_large = min(pixels.shape[:2]) >= 2 * side  # no JPEG, or a huge one
  how = cv2.INTER_AREA if is_large else cv2.INTER_LINEAR
  cv2.resize(pixels, (side, side), dst=out, interpolation=how)
