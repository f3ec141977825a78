"""RandAugment: random operations of one strength on each image.

Cubuk et al. 2019 (arXiv 1909.13719), with the operations of timm's
'rand-mM-nN-mstd0.5-inc1', which trained DeiT and ConvNeXt. Each operation
grows stronger with its magnitude, which is normal around that of the config
with a deviation of 0.5; half of the operations are left out. What is rotated, sheared or
translated takes the nearest pixel, as in the paper's code and in torchvision: Pillow's
bicubic filter took four fifths of the time of all operations.
"""

from collections.abc import Callable

import ml_collections
import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from anp_jax.data import index_shuffle

_STREAM = 4  # of random numbers, see `index_shuffle.uniform`
_DRAWS = 5  # which operation, whether, two of its magnitude, its direction
_PROBABILITY = 0.5
_DEVIATION = 0.5
MAX_MAGNITUDE = 10
_MAX_ADDED = 110  # grey levels of solarize_add


def draws(config: ml_collections.ConfigDict, positions: np.ndarray) -> np.ndarray:
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
    fill: RGB, 0..255, colour beyond the image.

  Returns:
    (height, width, 3) uint8.
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
    name: one of OPERATIONS.
    magnitude: 0 to 10.
    direction: 1 or -1; operations without a direction ignore it.
    fill: RGB, 0..255, colour beyond the image.

  Returns:
    An image of the same size.
  """
  return OPERATIONS[name](image, magnitude / MAX_MAGNITUDE, direction, fill)


def _affine(image, matrix, fill):
  return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)


def _solarize_add(image, level):
  added = int(level * _MAX_ADDED)
  return image.point([min(255, i + added) if i < 128 else i for i in range(256)] * 3)


def _enhanced(enhancer):
  return lambda image, level, sign, _: enhancer(image).enhance(max(0.1, 1 + sign * level * 0.9))


# By name, in timm's order: (image, level 0..1, sign 1 or -1, fill) -> image.
OPERATIONS: dict[str, Callable] = {
  'auto_contrast': lambda image, *_: ImageOps.autocontrast(image),
  'equalize': lambda image, *_: ImageOps.equalize(image),
  'invert': lambda image, *_: ImageOps.invert(image),
  'rotate': lambda image, level, sign, fill: image.rotate(sign * level * 30, fillcolor=fill),
  # At magnitude 10 timm keeps no bit: black, or an error of newer Pillows.
  'posterize': lambda image, level, *_: ImageOps.posterize(image, max(1, 4 - int(level * 4))),
  'solarize': lambda image, level, *_: ImageOps.solarize(image, 256 - int(level * 256)),
  'solarize_add': lambda image, level, *_: _solarize_add(image, level),
  'color': _enhanced(ImageEnhance.Color),
  'contrast': _enhanced(ImageEnhance.Contrast),
  'brightness': _enhanced(ImageEnhance.Brightness),
  'sharpness': _enhanced(ImageEnhance.Sharpness),
  'shear_x': lambda image, level, sign, fill: _affine(
    image, (1, sign * level * 0.3, 0, 0, 1, 0), fill
  ),
  'shear_y': lambda image, level, sign, fill: _affine(
    image, (1, 0, 0, sign * level * 0.3, 1, 0), fill
  ),
  'translate_x': lambda image, level, sign, fill: _affine(
    image, (1, 0, sign * level * 0.45 * image.width, 0, 1, 0), fill
  ),
  'translate_y': lambda image, level, sign, fill: _affine(
    image, (1, 0, 0, 0, 1, sign * level * 0.45 * image.height), fill
  ),
}
