"""Image files to the pixels that evaluation sees, without TensorFlow.

Pillow decodes as TensorFlow does, to the bit: both have libjpeg-turbo. What
follows are TensorFlow's float32 operations in their order, in NumPy.
"""

from collections.abc import Callable
import warnings

import numpy as np
from PIL import Image

from anp_jax.data.image_files import colours
from anp_jax.data.image_files import image_format
from anp_jax.data.image_files import images
from anp_jax.data.image_files import orientation
from anp_jax.data.input import augment

_JPEG = b'\xff\xd8\xff'
# Sources whose examples are no files: they are cut by Pillow.
ARRAYS = ('arrays', 'digits')


def reader(config, upright: bool = False) -> Callable[[bytes], np.ndarray]:
  """What makes of an image file the pixels that evaluation sees of it.

  Args:
    config: the run's config.
    upright: whether a photograph is first turned as its EXIF data say, which
      evaluation does not look at; `prepare` has turned those of its sets.

  Returns:
    file -> (size, size, 3) uint8, from any thread; it raises ValueError for
    what is no whole image.
  """
  d = config.data
  kept = is_shrunk(config)

  def seen(image, is_jpeg):
    turn = orientation.transpose(image) if upright else None
    if kept:
      return _cut(config, images.shrink(image, d.resize, turn))
    if d.source in ARRAYS:
      upright_image = images.transposed(colours.rgb(image), turn)
      return _cut(config, np.asarray(upright_image))
    if d.decode in augment.RESAMPLED:
      upright_image = images.transposed(_rgb(image, is_jpeg), turn)
      return _cut(config, np.asarray(upright_image))
    return _view(config, image, is_jpeg, turn)

  def read(file):
    is_jpeg = file.startswith(_JPEG)
    return _opened(file, d.max_megapixels, lambda image: seen(image, is_jpeg))

  return read


def is_shrunk(config) -> bool:
  """Whether views are cut out of what config.data.cache='decoded' keeps."""
  return config.data.cache == 'decoded' and config.data.source not in ARRAYS


def whole(file: bytes, max_megapixels: float) -> np.ndarray:
  """An image file as (height, width, 3) uint8; ValueError for what is none."""
  is_jpeg = file.startswith(_JPEG)
  return np.asarray(
    _opened(file, max_megapixels, lambda image: _rgb(image, is_jpeg))
  )


def cut(
  image: np.ndarray, box: np.ndarray, flip: bool, side: int, decode: str
) -> np.ndarray:
  """One view of (height, width, 3) uint8 as (side, side, 3) uint8.

  Args:
    image: whole.
    box: top, left, height, width, as from `augment`.
    flip: whether it is mirrored left to right.
    side: of the result, pixels.
    decode: as config.data.decode; its filters see what lies beyond the box.
  """
  if decode in augment.RESAMPLED:
    image = _resampled(Image.fromarray(image), box, side, decode)
    return image[:, ::-1] if flip else image
  top, left, height, width = (int(v) for v in box)
  image = np.asarray(image)[top : top + height, left : left + width]
  if image.shape[:2] != (side, side):
    image = np.asarray(
      Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR)
    )
  return image[:, ::-1] if flip else image


def area(image: np.ndarray, side: int) -> np.ndarray:
  """The mean over areas, as TensorFlow's ResizeArea computes it.

  Args:
    image: (height, width, 3) uint8, both sides at least `side`.
    side: of the result, pixels.

  Returns:
    (side, side, 3) float32.
  """
  height, width = image.shape[:2]
  columns = np.ascontiguousarray(image.transpose(1, 0, 2))
  across = _gathered(columns, *_area_shares(width, side))
  rows = np.ascontiguousarray(across.transpose(1, 0, 2))
  f = np.float32
  pixels = f(height) / f(side) * (f(width) / f(side))
  return _gathered(rows, *_area_shares(height, side)) * (f(1) / pixels)


def bilinear(image: np.ndarray, side: int) -> np.ndarray:
  """Between the four nearest pixels, as TensorFlow's ResizeBilinear."""
  height, width = image.shape[:2]
  (top, bottom, down), (left, right, across) = (
    _neighbours(n, side) for n in (height, width)
  )
  image = image.astype(np.float32)
  down, across = down[:, None, None], across[:, None]
  rows = []
  for rows_at in (top, bottom):
    first, second = image[rows_at][:, left], image[rows_at][:, right]
    rows.append(first + (second - first) * across)
  return rows[0] + (rows[1] - rows[0]) * down


def triangle(image: np.ndarray, side: int) -> np.ndarray:
  """The triangle filter, as TensorFlow's resize with antialias."""
  height, width = image.shape[:2]
  rows = _gathered(image, *_triangle_shares(height, side))
  columns = np.ascontiguousarray(rows.transpose(1, 0, 2))
  return _gathered(columns, *_triangle_shares(width, side)).transpose(1, 0, 2)


def _opened(file, max_megapixels, use):
  """What `use` makes of the image; ValueError in one line where it cannot."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      with images.open_image(file, max_megapixels) as image:
        return use(image)
  except Image.UnidentifiedImageError:
    # Its text has an address of memory.
    text = 'not an image that Pillow knows'
    if image_format.sniff(file) == 'HEIF' and not images.has_heif():
      text = 'HEIC, which takes pillow-heif (pip install pillow-heif)'
    raise ValueError(text) from None
  except MemoryError:  # no fault of the file's
    raise
  except Exception as e:  # whatever a decoder raises
    text = ' '.join(str(e).split()) or type(e).__name__
    raise ValueError(text) from e


def _view(config, image, is_jpeg, turn):
  """See `decode._Graph`, whose operations these are."""
  d = config.data
  side = d.image_size
  size = image.size[:: 1 if orientation.swaps_sides(turn) else -1]
  box = augment.eval_views(config, np.array([size])).boxes.astype(np.int32)
  halvings = np.zeros(1, np.int32)
  if d.decode != 'exact':
    box, halvings = augment.reduced(box, side)
  box = box[0]
  shrinks = (box[2:] >= side).all()
  if is_jpeg and halvings[0]:
    image.draft(None, tuple(n >> int(halvings[0]) for n in image.size))
    box = box >> halvings
  top, left, height, width = (int(n) for n in box)
  pixels = np.asarray(images.transposed(_rgb(image, is_jpeg), turn))
  pixels = pixels[top : top + height, left : left + width]
  if d.decode == 'exact':
    result = triangle(pixels, side)
  else:
    result = (area if shrinks else bilinear)(pixels, side)
  return (result + np.float32(0.5)).astype(np.uint8)


def _resampled(image, box, side, decode):
  """The view that transformers' resize and crop give, but for roundings."""
  (top, left), ends = box[:2], box[:2] + box[2:]
  # A product's last bit must not put it beyond the image.
  bottom, right = np.minimum(ends, image.size[::-1])
  return np.asarray(image.resize(
    (side, side), Image.Resampling[decode.upper()], (left, top, right, bottom)
  ))  # fmt: skip


def _rgb(image, is_jpeg):
  if not is_jpeg or image.mode != 'CMYK':
    return colours.rgb(image)
  # Pillow rounds the product. It also turns all colours over, as Adobe's are.
  inks = np.asarray(image).astype(np.int32)
  if 'adobe' not in image.info:
    inks = 255 - inks
  inks = 255 - inks
  return Image.fromarray(
    (inks[..., :3] * inks[..., 3:] // 255).astype(np.uint8)
  )


def _cut(config, image):
  views = augment.eval_views(config, np.array([image.shape[:2]]))
  return cut(
    image, views.boxes[0], views.flips[0], config.data.image_size,
    config.data.decode,
  )  # fmt: skip


def _gathered(lines, first, shares):
  """Sums of lines (n, ...) from `first` (m,) on, times `shares` (m, k)."""
  last = len(lines) - 1
  total = np.zeros((len(first), *lines.shape[1:]), np.float32)
  term = np.empty_like(total)
  for k, share in enumerate(shares.T):
    used = lines[np.minimum(first + k, last)]
    np.multiply(used, share[:, None, None], out=term)
    total += term
  return total


def _area_shares(size, side):
  """The first pixel of each result's stretch, and the share of each pixel."""
  f = np.float32
  scale = f(size) / f(side)
  places = np.arange(side)
  start = places.astype(f) * scale
  end = (places + 1).astype(f) * scale
  first = np.floor(start).astype(np.int64)
  count = np.ceil(end).astype(np.int64) - first
  pixels = first[:, None] + np.arange(count.max())
  low, high = pixels.astype(f), (pixels + 1).astype(f)
  start, end = start[:, None], end[:, None]
  cut_off = high > end
  shares = np.where(
    low < start,
    np.where(cut_off, scale, high - start),
    np.where(cut_off, end - low, f(1)),
  )
  return first, np.where(pixels < first[:, None] + count[:, None], shares, f(0))


def _neighbours(size, side):
  f = np.float32
  scale = f(size) / f(side)
  place = (np.arange(side).astype(f) + f(0.5)) * scale - f(0.5)
  low = np.floor(place)
  lower = np.maximum(low.astype(np.int64), 0)
  upper = np.minimum(np.ceil(place).astype(np.int64), size - 1)
  return lower, upper, place - low


def _triangle_shares(size, side):
  f = np.float32
  inverse = f(1) / (f(side) / f(size))
  wide = max(inverse, f(1))
  centre = (np.arange(side).astype(f) + f(0.5)) * inverse
  first = np.ceil(centre - wide - f(0.5)).astype(np.int64)
  end = np.floor(centre + wide - f(0.5)).astype(np.int64)
  first, end = np.clip(first, 0, size - 1), np.clip(end, 0, size - 1) + 1
  pixels = first[:, None] + np.arange((end - first).max())
  off = np.abs((pixels.astype(f) + f(0.5) - centre[:, None]) * (f(1) / wide))
  shares = np.where(off < 1, f(1) - off, f(0))
  shares[pixels >= end[:, None]] = 0
  total = np.zeros(side, f)
  for column in shares.T:
    total += column
  return first, shares * (f(1) / total)[:, None]
