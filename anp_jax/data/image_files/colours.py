"""The colours that training sees of an image that Pillow has opened."""

import warnings

import numpy as np
from PIL import Image

# Pillow's names of 16-bit grey.
DEEP = ('I;16', 'I;16L', 'I;16B', 'I;16N')


def rgb(image: Image.Image) -> Image.Image:
  """The image in 8-bit RGB, as the training decoder has it.

  Transparency is dropped; 16 bits lose their lower half, which Pillow would
  take for the whole value; transparent pixels of a GIF are black.

  Args:
    image: opened, of any mode that has colours.

  Returns:
    An image of mode RGB.
  """
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
