"""Image files as Pillow opens them: one limit of size, and HEIC.

Every program that decodes with Pillow opens files here.
"""

from collections.abc import Iterator
import contextlib
import functools
import importlib
import importlib.util
import io
import warnings

import numpy as np
from PIL import Image

from anp_jax.data.image_files import colours, image_format
from anp_jax.system import files

# Photographs of telephones, which pillow-heif reads where it is installed.
HEIF_SUFFIXES = ('.heic', '.heif', '.hif')

# Pillow warns at 89 million pixels and refuses twice as many, whatever a config
# says. config.data.max_megapixels is the one limit.
Image.MAX_IMAGE_PIXELS = None


# Modules that Pillow does not load by itself. Loaded by name: when Pillow
# searches, a lack of descriptors reads as an unknown format.
_PLUGINS = {
  'AVIF': 'PIL.AvifImagePlugin',
  'JPEG2000': 'PIL.Jpeg2KImagePlugin',
  'TIFF': 'PIL.TiffImagePlugin',
  'WEBP': 'PIL.WebPImagePlugin',
}


def open_image(data: bytes, max_megapixels: float, must_be_whole: bool = True) -> Image.Image:
  """Opens an image: its header is read, its pixels are not decoded yet.

  The format is the one that `image_format.sniff` tells. Pillow tries no other:
  some formats, such as EPS, would start programs.

  Args:
    data: image file.
    max_megapixels: million pixels that it may have.
    must_be_whole: whether a file that ends early, or is damaged in a way that
      Pillow forgives and training does not, is refused.

  Raises:
    TooLargeError: if it has more pixels.
    ValueError: if it is not whole.
    Exception: whatever Pillow raises for a file that is no image.
  """
  name = image_format.sniff(data)
  if not name or name == 'HEIF' and not has_heif():  # Pillow 13 does not know the name
    raise Image.UnidentifiedImageError
  if name == 'HEIF':
    _register_heif()
  if name in _PLUGINS:
    importlib.import_module(_PLUGINS[name])
  image = Image.open(io.BytesIO(data), formats=(name,))
  width, height = image.size
  image_format.check_pixels(height, width, max_megapixels)
  if must_be_whole:
    image_format.check_whole(data)
  return image


@contextlib.contextmanager
def reading(data: bytes, max_megapixels: float) -> Iterator[Image.Image]:
  """Yields an opened image; decoding it fails with one line.

  Args:
    data: image file.
    max_megapixels: million pixels that it may have.

  Raises:
    ValueError: for a file that is no whole image.
    OSError: with an errno, for an error of the machine.
    MemoryError: if the machine lacks memory.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      with open_image(data, max_megapixels) as image:
        yield image
  except Image.UnidentifiedImageError:
    # Its text has an address of memory.
    text = 'not an image of a format that is read'
    if image_format.sniff(data) == 'HEIF' and not has_heif():
      text = 'HEIC, which takes pillow-heif (pip install pillow-heif)'
    if data.startswith(files.LFS_POINTER):
      text = 'a pointer of Git LFS, not the image (git lfs pull)'
    raise ValueError(text) from None
  except MemoryError:
    raise
  except Exception as e:  # whatever a decoder raises
    if isinstance(e, OSError) and e.errno is not None:
      raise  # an error of the machine: a decoder's has no errno
    text = ' '.join(str(e).split()) or type(e).__name__
    if 'out of memory' in text:
      raise MemoryError(text) from e
    raise ValueError(text) from e


def decode_shrunk(file: bytes, shorter: int, max_megapixels: float) -> np.ndarray:
  """Decodes an image file, its shorter side brought down to a length.

  Args:
    file: image file in a format that `image_format.sniff` knows.
    shorter: pixels; a smaller image keeps its size.
    max_megapixels: million pixels that the file may have.

  Returns:
    (height, width, 3) uint8.

  Raises:
    ValueError: if it has more pixels, or is no whole image.
  """
  with reading(file, max_megapixels) as image:
    return shrink(image, shorter)


def shrink(
  image: Image.Image, shorter: int, transpose: Image.Transpose | None = None
) -> np.ndarray:
  """Decodes an opened image, its shorter side brought down to a length.

  A JPEG is decoded at 1/2 to 1/8 of its scale where twice the length is left.

  Args:
    image: opened image, not decoded yet.
    shorter: pixels; a smaller image keeps its size.
    transpose: applied to the decoded image; None: none.

  Returns:
    (height, width, 3) uint8.
  """
  # Twice, since the last pixels of a smaller scale hang over the edge.
  image.draft('RGB', (2 * shorter, 2 * shorter))
  decoded = transposed(colours.rgb(image), transpose)
  size = shrunk_size(decoded.size, shorter)
  if size != decoded.size:
    decoded = decoded.resize(size, Image.Resampling.BILINEAR)
  return np.asarray(decoded)


def shrunk_size(size: tuple[int, int], shorter: int) -> tuple[int, int]:
  """Width and height with the shorter of them brought down to a length, if it is longer."""
  share = min(shorter / min(size), 1)
  width, height = (max(round(side * share), min(side, shorter)) for side in size)
  return width, height


def transposed(image: Image.Image, transpose: Image.Transpose | None) -> Image.Image:
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
  pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
