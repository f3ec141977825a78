"""RandAugment: random operations of one strength on each image.

Cubuk et al. 2019 (arXiv 1909.13719), as timm's 'rand-mM-nN-mstd0.5-inc1' has
it, with which DeiT and ConvNeXt were trained: with the magnitude each operation
grows stronger; it is left out in half of the cases, and its own magnitude is
normal around that of the config, with a deviation of 0.5.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from anp_jax.data import index_shuffle

_STREAM = 4  # of random numbers, see `index_shuffle.uniform`
_DRAWS = 5  # which operation, whether, two of its magnitude, its direction
_PROBABILITY = 0.5
_DEVIATION = 0.5
MAX_MAGNITUDE = 10
_MAX_ADDED = 110  # grey levels of solarize_add


def draws(config, positions: np.ndarray) -> np.ndarray:
  """The random numbers of training examples.

  Args:
    config: the run's config.
    positions: (n,) int64 places in the endless stream.

  Returns:
    (n, operations, 5) float64 in [0, 1), inputs of `augmented`.
  """
  ops = config.data.rand_augment_ops
  numbers = index_shuffle.uniform(config.seed, _STREAM, positions, _DRAWS * ops)
  return numbers.reshape(-1, ops, _DRAWS)


def augmented(image: np.ndarray, draws: np.ndarray, magnitude: float, fill: tuple) -> np.ndarray:
  """One image after its operations.

  Args:
    image: (height, width, 3) uint8.
    draws: (operations, 5) float64 in [0, 1), of one example.
    magnitude: mean of the operations' magnitudes, 0 to 10.
    fill: RGB, 0..255, of what comes from beyond the image.

  Returns:
    Likewise.
  """
  result = Image.fromarray(image)
  names = tuple(OPERATIONS)
  for choice, chance, radius, angle, sign in draws.tolist():
    if chance >= _PROBABILITY:
      continue
    # Box and Muller 1958: a normal number of two uniform ones.
    normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    level = np.clip(magnitude + _DEVIATION * normal, 0, MAX_MAGNITUDE)
    name = names[int(choice * len(names))]
    direction = -1 if sign < 0.5 else 1
    result = apply(result, name, float(level), direction, fill)
  return np.asarray(result)


def apply(
  image: Image.Image, name: str, magnitude: float, direction: int, fill: tuple
) -> Image.Image:
  """An image after one operation.

  Args:
    image: RGB.
    name: of OPERATIONS.
    magnitude: 0 to 10.
    direction: 1 or -1, of the operations that have one: others ignore it.
    fill: RGB, 0..255, of what comes from beyond the image.

  Returns:
    An image of the same size.
  """
  return OPERATIONS[name](image, magnitude / MAX_MAGNITUDE, direction, fill)


def _affine(image, matrix, fill):
  return image.transform(
    image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BICUBIC, fillcolor=fill
  )


def _auto_contrast(image, level, direction, fill):
  del level, direction, fill
  return ImageOps.autocontrast(image)


def _equalize(image, level, direction, fill):
  del level, direction, fill
  return ImageOps.equalize(image)


def _invert(image, level, direction, fill):
  del level, direction, fill
  return ImageOps.invert(image)


def _rotate(image, level, direction, fill):
  return image.rotate(direction * level * 30, Image.Resampling.BICUBIC, fillcolor=fill)


def _posterize(image, level, direction, fill):
  del direction, fill
  # At magnitude 10 timm keeps no bit: black, or an error of newer Pillows.
  return ImageOps.posterize(image, max(1, 4 - int(level * 4)))


def _solarize(image, level, direction, fill):
  del direction, fill
  return ImageOps.solarize(image, 256 - int(level * 256))


def _solarize_add(image, level, direction, fill):
  del direction, fill
  added = int(level * _MAX_ADDED)
  table = [min(255, i + added) if i < 128 else i for i in range(256)]
  return image.point(table * 3)


def _enhanced(enhancer) -> Callable:
  def enhance(image, level, direction, fill):
    del fill
    return enhancer(image).enhance(max(0.1, 1 + direction * level * 0.9))

  return enhance


def _shear_x(image, level, direction, fill):
  return _affine(image, (1, direction * level * 0.3, 0, 0, 1, 0), fill)


def _shear_y(image, level, direction, fill):
  return _affine(image, (1, 0, 0, direction * level * 0.3, 1, 0), fill)


def _translate_x(image, level, direction, fill):
  pixels = direction * level * 0.45 * image.size[0]
  return _affine(image, (1, 0, pixels, 0, 1, 0), fill)


def _translate_y(image, level, direction, fill):
  pixels = direction * level * 0.45 * image.size[1]
  return _affine(image, (1, 0, 0, 0, 1, pixels), fill)


# By name, in timm's order: (image, level 0..1, direction, fill) -> image.
OPERATIONS = {
  'auto_contrast': _auto_contrast,
  'equalize': _equalize,
  'invert': _invert,
  'rotate': _rotate,
  'posterize': _posterize,
  'solarize': _solarize,
  'solarize_add': _solarize_add,
  'color': _enhanced(ImageEnhance.Color),
  'contrast': _enhanced(ImageEnhance.Contrast),
  'brightness': _enhanced(ImageEnhance.Brightness),
  'sharpness': _enhanced(ImageEnhance.Sharpness),
  'shear_x': _shear_x,
  'shear_y': _shear_y,
  'translate_x': _translate_x,
  'translate_y': _translate_y,
}
