"""The colours that training sees of an image that Pillow has opened."""

import warnings

import numpy as np
from PIL import Image

# Pillow's names of 16-bit grey.
DEEP = ('I;16', 'I;16L', 'I;16B', 'I;16N')
GREY = ('1', 'L', 'LA', *DEEP)
# Others, such as floats, have no 8-bit colours that all agree on.
MODES = (*GREY, 'P', 'PA', 'RGB', 'RGBA', 'RGBX', 'CMYK', 'YCbCr')
_JPEG = ('JPEG', 'MPO')  # the latter: with further pictures behind the first


def rgb(image: Image.Image) -> Image.Image:
  """The image in 8-bit RGB, as the training decoder has it.

  Transparency is dropped; 16 bits lose their lower half, which Pillow would
  take for the whole value; transparent pixels of a GIF are black; the inks of a
  JPEG are multiplied as TensorFlow does it.

  Args:
    image: opened image.

  Returns:
    An image of mode RGB.

  Raises:
    ValueError: if its mode is none of MODES.
  """
  if image.mode not in MODES:
    raise ValueError(f'pixels of kind {image.mode}')
  if image.mode == 'CMYK' and image.format in _JPEG:
    # Pillow rounds the product. It also turns all colours over, as Adobe's are.
    inks = np.asarray(image).astype(np.int32)
    if 'adobe' in image.info:
      inks = 255 - inks
    return Image.fromarray((inks[..., :3] * inks[..., 3:] // 255).astype(np.uint8))
  if image.mode in DEEP:
    high = (np.asarray(image) >> 8).astype(np.uint8)
    image = Image.fromarray(high)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    if image.format == 'GIF' and 'transparency' in image.info:
      with_alpha = image.convert('RGBA')
      black = Image.new('RGBA', image.size, (0, 0, 0, 255))
      return Image.alpha_composite(black, with_alpha).convert('RGB')
    return image.convert('RGB')
