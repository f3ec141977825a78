"""Batches without TensorFlow, and the pixels that evaluation sees of a file.

Pillow decodes as TensorFlow and simplejpeg do, to the bit: all have libjpeg-turbo. What
follows are OpenCV's operations, or TensorFlow's in NumPy.
"""

from collections.abc import Callable, Iterator
import io

import ml_collections
import numpy as np
from PIL import Image

from anp_jax.data.image_files import colours, image_format, images, orientation
from anp_jax.data.input import augment, batch_reader, decode_opencv, numpy_resize

# Sources whose examples are no files; decode='exact' cuts them by Pillow.
ARRAYS = ('arrays', 'digits')


def eval_decoder(
  config: ml_collections.ConfigDict, upright: bool = False
) -> Callable[[bytes], np.ndarray]:
  """A function from an image file to the pixels that evaluation sees of it.

  Args:
    config: the run's config.
    upright: whether a photograph is first turned as its EXIF data say, which
      evaluation does not look at; `prepare` has turned those of its sets.

  Returns:
    file -> (size, size, 3) uint8, from any thread; it raises ValueError for
    what is no whole image.
  """
  d = config.data
  shrinks, is_array = is_shrunk(config), d.source in ARRAYS

  def decode(file):
    with images.reading(file, d.max_megapixels) as image:
      transpose = orientation.transpose(image) if upright else None
      if shrinks:
        return _eval_crop(config, images.shrink(image, d.resize, transpose))
      if not is_array and d.decode not in augment.RESAMPLED:
        is_fast = d.decode == 'fast'
        is_reduced = is_fast and decode_opencv.opened(file, d.max_megapixels) is not None
        return _eval_view(config, image, is_reduced, transpose)
      return _eval_crop(config, np.asarray(images.transposed(colours.rgb(image), transpose)))

  return decode


def is_shrunk(config: ml_collections.ConfigDict) -> bool:
  """Whether views are cut out of what config.data.cache='mapped' keeps."""
  return config.data.cache == 'mapped' and config.data.source not in ARRAYS


def batches(reader: batch_reader.BatchReader) -> Iterator[batch_reader.Batch]:
  """The batches of arrays, or of files that TensorFlow does not decode.

  Args:
    reader: rows of a source of kind 'encoded' or 'pixels'.

  Returns:
    images (n, size, size, 3) uint8, labels (n,) int32, weights (n,) float32.
  """
  d, is_encoded = reader.sampler.config.data, reader.source.kind == 'encoded'

  def prepare(image):
    if not is_encoded:
      return image
    jpeg = decode_opencv.opened(image, d.max_megapixels) if d.decode == 'fast' else None
    return jpeg or decode_file(image, d.max_megapixels)

  def cut(image, box, flip, out):
    if d.decode == 'fast':
      decode_opencv.view(image, box, flip, out)
      return
    view = crop(image, box, d.image_size, d.decode)
    # NumPy copies a mirrored image five times as fast by channels.
    for channel in range(3 if flip else 0):
      out[..., channel] = view[:, ::-1, channel]
    if not flip:
      out[:] = view

  return reader.batches(prepare, cut)


def decode_file(file: bytes, max_megapixels: float) -> np.ndarray:
  """An image file as (height, width, 3) uint8; ValueError for what is none."""
  with images.reading(file, max_megapixels) as image:
    return np.asarray(colours.rgb(image))


def for_tensorflow(file: bytes, max_megapixels: float) -> bytes:
  """A file that TensorFlow decodes to the pixels that Pillow makes of `file`.

  Args:
    file: image file of any format that is read.
    max_megapixels: million pixels that it may have.

  Returns:
    The file itself; or its pixels as an uncompressed BMP, where TensorFlow
    would refuse the file or make others of it.

  Raises:
    ValueError: for what is no whole image.
  """
  if image_format.is_read_as_pillow_reads(file):
    return file
  result = io.BytesIO()
  with images.reading(file, max_megapixels) as image:
    colours.rgb(image).save(result, 'BMP')
  return result.getvalue()


def crop(image: np.ndarray, box: np.ndarray, side: int, decode: str) -> np.ndarray:
  """One view of (height, width, 3) uint8 as (side, side, 3) uint8.

  Args:
    image: whole image.
    box: top, left, height, width, as from `augment`.
    side: pixels a side of the result.
    decode: config.data.decode, whose filters see what lies beyond the box.
  """
  if decode in augment.RESAMPLED:
    return _resampled(Image.fromarray(image), box, side, decode)
  if decode == 'fast':
    view = np.empty((side, side, 3), np.uint8)
    decode_opencv.view(image, box, False, view)
    return view
  top, left, height, width = (int(v) for v in box)
  image = np.asarray(image)[top : top + height, left : left + width]
  if image.shape[:2] != (side, side):
    image = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
  return image


def _eval_view(config, image, is_reduced, transpose):
  """The pixels of evaluation, by the operations of the batches' decoder."""
  d = config.data
  side = d.image_size
  size = image.size[:: 1 if orientation.swaps_sides(transpose) else -1]
  box = augment.eval_views(config, np.array([size])).boxes.astype(np.int32)[0]
  if is_reduced:
    halvings, box = decode_opencv.reduced(box, side)
    image.draft(None, tuple(n >> halvings for n in image.size))
  top, left, height, width = box
  pixels = np.asarray(images.transposed(colours.rgb(image), transpose))
  pixels = pixels[top : top + height, left : left + width]
  if d.decode == 'exact':
    return (numpy_resize.triangle(pixels, side) + np.float32(0.5)).astype(np.uint8)
  view = np.empty((side, side, 3), np.uint8)
  decode_opencv.resize(pixels, view)
  return view


def _resampled(image, box, side, decode):
  """The view that transformers' resize and crop give, but for roundings."""
  (top, left), ends = box[:2], box[:2] + box[2:]
  # A product's last bit must not put it beyond the image.
  bottom, right = np.minimum(ends, image.size[::-1])
  return np.asarray(
    image.resize((side, side), Image.Resampling[decode.upper()], (left, top, right, bottom))
  )


def _eval_crop(config, image):
  views = augment.eval_views(config, np.array([image.shape[:2]]))
  return crop(image, views.boxes[0], config.data.image_size, config.data.decode)
