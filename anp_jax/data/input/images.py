"""Image files as Pillow opens them: one limit of size, and HEIC.

Every program that decodes with Pillow opens files here.
"""

import functools
import importlib.util
import io

from PIL import Image

from anp_jax.data.input import image_format

# Photographs of telephones, which pillow-heif reads where it is installed.
HEIF_SUFFIXES = ('.heic', '.heif', '.hif')

# Pillow warns at 89 million pixels and refuses twice as many, whatever a config
# says. config.data.max_megapixels is the one limit.
Image.MAX_IMAGE_PIXELS = None


def open_image(
  data: bytes, max_megapixels: float, formats: tuple[str, ...] | None = None
) -> Image.Image:
  """An image whose header is read; its pixels are not decoded yet.

  Args:
    data: the file.
    max_megapixels: million pixels that it may have.
    formats: Pillow's names of those to try; None: all.

  Raises:
    TooLarge: if it has more pixels.
    Exception: whatever Pillow raises for what is no image.
  """
  if has_heif():
    _register_heif()
  image = Image.open(io.BytesIO(data), formats=formats)
  width, height = image.size
  image_format.check_pixels(height, width, max_megapixels)
  return image


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
