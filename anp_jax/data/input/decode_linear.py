"""Views by OpenCV and simplejpeg: config.data.decode='linear'.

A JPEG is decoded at 1/2, 1/4 or 1/8 of its scale, as `fast` does, so a view is made from
less than twice its pixels a side; then each pixel lies between its four nearest, which
takes a sixth of the time of a mean over areas.
"""

import functools
import threading
import types
from typing import NamedTuple

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.image_files import image_format
from anp_jax.data.input import augment

_scratch = threading.local()


@functools.cache
def load() -> tuple[types.ModuleType, types.ModuleType]:
  """Imports and returns cv2 and simplejpeg.

  Raises:
    ConfigError: if one of them is not installed.
  """
  try:
    import cv2
    import simplejpeg
  except ImportError as e:
    raise config_lib.ConfigError(
      "config.data.decode='linear' takes opencv-python-headless and simplejpeg: "
      "pip install '.[opencv]'"
    ) from e
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
  if not image_format.is_jpeg(file) or not image_format.is_read_by_tensorflow(file):
    return None
  height, width, colours, _ = load()[1].decode_jpeg_header(file)
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
  shorter = int(min(box[2:]))
  halvings = min(max((shorter // len(out)).bit_length() - 1, 0), augment.MAX_HALVINGS)
  top, left, height, width = (int(n) >> halvings for n in box)
  if isinstance(image, Jpeg):
    pixels = _decoded(image, halvings)
  else:
    pixels = image
    top, left, height, width = (n << halvings for n in (top, left, height, width))
  resize(pixels[top : top + height, left : left + width], out)
  if flip:
    load()[0].flip(out, 1, dst=out)


def _decoded(image, halvings):
  """A JPEG at a part of its scale, in memory that the thread's next one takes."""
  height, width = image.shape
  # Fresh memory for each image would take a seventh of the time.
  if len(getattr(_scratch, 'pixels', ())) < height * width * 3:
    _scratch.pixels = np.empty(height * width * 3, np.uint8)
  least = {}
  if halvings:
    least = {'min_height': -(-height >> halvings), 'min_width': -(-width >> halvings)}
  return load()[1].decode_jpeg(image.data, buffer=_scratch.pixels, **least)


def resize(pixels: np.ndarray, out: np.ndarray) -> None:
  """Resizes (height, width, 3) uint8 to fill (side, side, 3) uint8, which is contiguous."""
  cv2 = load()[0]
  side = len(out)
  is_large = min(pixels.shape[:2]) >= 2 * side  # no JPEG, or a huge one
  how = cv2.INTER_AREA if is_large else cv2.INTER_LINEAR
  cv2.resize(pixels, (side, side), dst=out, interpolation=how)
