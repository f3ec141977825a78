"""Image files as Pillow opens them: one limit of size, and HEIC.

Every program that decodes with Pillow opens files here.
"""

import functools
import importlib.util
import io

import numpy as np
from PIL import Image

from anp_jax.data.image_files import colours
from anp_jax.data.image_files import image_format

# Photographs of telephones, which pillow-heif reads where it is installed.
HEIF_SUFFIXES = ('.heic', '.heif', '.hif')

# Pillow warns at 89 million pixels and refuses twice as many, whatever a config
# says. config.data.max_megapixels is the one limit.
Image.MAX_IMAGE_PIXELS = None


def open_image(
  data: bytes, max_megapixels: float, formats: tuple[str, ...] | None = None
) -> Image.Image:
  """Opens an image: its header is read, its pixels are not decoded yet.

  Args:
    data: the file.
    max_megapixels: million pixels that it may have.
    formats: Pillow's names of the formats to try; None: all.

  Raises:
    TooLarge: if it has more pixels.
    Exception: whatever Pillow raises for a file that is no image.
  """
  if has_heif():
    _register_heif()
  image = Image.open(io.BytesIO(data), formats=formats)
  width, height = image.size
  image_format.check_pixels(height, width, max_megapixels)
  return image


def decode_shrunk(
  file: bytes, shorter: int, max_megapixels: float
) -> np.ndarray:
  """Decodes an image file, its shorter side brought down to a length.

  Args:
    file: of any format that Pillow reads.
    shorter: pixels; a smaller image keeps its size.
    max_megapixels: million pixels that the file may have.

  Returns:
    (height, width, 3) uint8.

  Raises:
    TooLarge: if it has more pixels.
  """
  with open_image(file, max_megapixels) as image:
    return shrink(image, shorter)


def shrink(
  image: Image.Image, shorter: int, transpose: Image.Transpose | None = None
) -> np.ndarray:
  """Decodes an opened image, its shorter side brought down to a length.

  A JPEG is decoded at 1/2 to 1/8 of its scale where twice the length is left.

  Args:
    image: opened, not decoded yet.
    shorter: pixels; a smaller image keeps its size.
    transpose: applied to the decoded image; None: none.

  Returns:
    (height, width, 3) uint8.
  """
  # Twice, since the last pixels of a smaller scale hang over the edge.
  image.draft('RGB', (2 * shorter, 2 * shorter))
  decoded = transposed(colours.rgb(image), transpose)
  share = shorter / min(decoded.size)
  if share < 1:
    size = [max(round(side * share), shorter) for side in decoded.size]
    decoded = decoded.resize(size, Image.Resampling.BILINEAR)
  return np.asarray(decoded)


def transposed(
  image: Image.Image, transpose: Image.Transpose | None
) -> Image.Image:
  """The image after a transpose; None: the image itself."""
  return image if transpose is None else image.transpose(transpose)


@functools.cache
def has_heif() -> bool:
  """Whether pillow-heif is installed."""
  return importlib.util.find_spec('pillow_heif') is not None


@functools.cache
def _register_heif():
  import pillow_heif

  # The main picture alone: thumbnails, depth maps and the like are not used.
  pillow_heif.register_heif_opener(
    thumbnails=False, depth_images=False, aux_images=False
  )
