"""RandAugment: random operations of one strength on each image.

Cubuk et al. 2019 (arXiv 1909.13719), with the operations of timm's
'rand-mM-nN-mstd0.5-inc1', which trained DeiT and ConvNeXt. Each operation
grows stronger with its magnitude, which is normal around that of the config
with a deviation of 0.5; half of the operations are left out. What is rotated, sheared or
translated takes the nearest pixel, as in the paper's code and in torchvision. OpenCV does
it all, in two fifths of the time that Pillow takes.
"""

from collections.abc import Callable
import math

import ml_collections
import numpy as np

from anp_jax.data import index_shuffle
from anp_jax.data.input import decode_opencv

_STREAM = 4  # of random numbers, see `index_shuffle.uniform`
_DRAWS = 5  # which operation, whether, two of its magnitude, its direction
_PROBABILITY = 0.5
_DEVIATION = 0.5
MAX_MAGNITUDE = 10
_MAX_ADDED = 110  # grey levels of solarize_add
_LEVELS = np.arange(256)
_FLOAT_LEVELS = np.arange(256, dtype=np.float32)  # Pillow blends in float32
# Pillow's SMOOTH, from which `sharpness` leads away.
_SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13


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
  names = tuple(OPERATIONS)
  for choice, chance, radius, angle, sign in draws.tolist():
    if chance >= _PROBABILITY:
      continue
    # Box and Muller 1958: a normal number of two uniform ones.
    normal = math.sqrt(-2 * math.log1p(-radius)) * math.cos(2 * math.pi * angle)
    level = min(max(magnitude + _DEVIATION * normal, 0.0), MAX_MAGNITUDE)
    name = names[int(choice * len(names))]
    image = apply(image, name, level, -1 if sign < 0.5 else 1, fill)
  return image


def apply(
  image: np.ndarray, name: str, magnitude: float, direction: int, fill: tuple
) -> np.ndarray:
  """An image after one operation.

  Args:
    image: (height, width, 3) uint8.
    name: one of OPERATIONS.
    magnitude: 0 to 10.
    direction: 1 or -1; operations without a direction ignore it.
    fill: RGB, 0..255, colour beyond the image.

  Returns:
    (height, width, 3) uint8.
  """
  return OPERATIONS[name](image, magnitude / MAX_MAGNITUDE, direction, fill)


def _mapped(image, table):
  """An image whose levels are replaced, by table (256,) or (256, 3), which is cut to 0..255."""
  cv2 = decode_opencv.load()[0]
  table = np.clip(table, 0, 255).astype(np.uint8)
  return cv2.LUT(image, table.reshape(1, 256, -1))


def _histograms(image):
  """(256, 3) counts of the levels of each channel."""
  cv2 = decode_opencv.load()[0]
  counts = [cv2.calcHist([image], [channel], None, [256], [0, 256]) for channel in range(3)]
  return np.stack([count.ravel() for count in counts], 1).astype(np.int64)


def _auto_contrast(image, *_):
  present = _histograms(image) > 0
  low, high = present.argmax(0), 255 - present[::-1].argmax(0)
  scale = 255 / np.maximum(high - low, 1)
  stretched = (_LEVELS[:, None] * scale - low * scale).astype(np.int64)
  return _mapped(image, np.where(high > low, stretched, _LEVELS[:, None]))


def _equalize(image, *_):
  counts = _histograms(image)
  largest = counts[255 - (counts > 0)[::-1].argmax(0), range(3)]
  step = (counts.sum(0) - largest) // 255
  below = np.cumsum(counts, 0) - counts
  table = (step // 2 + below) // np.maximum(step, 1)
  return _mapped(image, np.where(step > 0, table, _LEVELS[:, None]))


def _posterize(image, level, *_):
  # At magnitude 10 timm keeps no bit: black, or an error of newer Pillows.
  bits = max(1, 4 - int(level * 4))
  return _mapped(image, _LEVELS & -(1 << 8 - bits))


def _solarize(image, level, *_):
  return _mapped(image, np.where(_LEVELS < 256 - int(level * 256), _LEVELS, 255 - _LEVELS))


def _solarize_add(image, level, *_):
  return _mapped(image, np.where(_LEVELS < 128, _LEVELS + int(level * _MAX_ADDED), _LEVELS))


def _factor(level, sign):
  """How far an enhancement goes from its plainest image, 0, over the image itself, 1."""
  return max(0.1, 1 + sign * level * 0.9)


def _contrast(image, level, sign, _):
  cv2 = decode_opencv.load()[0]
  mean = int(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)
  return _mapped(image, mean + np.float32(_factor(level, sign)) * (_FLOAT_LEVELS - mean))


def _brightness(image, level, sign, _):
  return _mapped(image, np.float32(_factor(level, sign)) * _FLOAT_LEVELS)


def _color(image, level, sign, _):
  cv2 = decode_opencv.load()[0]
  factor = _factor(level, sign)
  grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
  return cv2.addWeighted(image, factor, grey, 1 - factor, 0)


def _sharpness(image, level, sign, _):
  cv2 = decode_opencv.load()[0]
  factor = _factor(level, sign)
  result = cv2.addWeighted(image, factor, cv2.filter2D(image, -1, _SMOOTH), 1 - factor, 0)
  for edge in (np.s_[:1], np.s_[-1:], np.s_[:, :1], np.s_[:, -1:]):  # Pillow smooths none
    result[edge] = image[edge]
  return result


def _affine(image, rows, fill):
  """An image whose pixel (x, y) is that at `rows` (2, 3) times (x, y, 1)."""
  cv2 = decode_opencv.load()[0]
  matrix = np.array(rows, np.float64)
  matrix[:, 2] += matrix[:, :2].sum(1) / 2 - 0.5  # OpenCV's whole numbers are pixels' centres
  size = image.shape[1::-1]
  flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
  return cv2.warpAffine(image, matrix, size, flags=flags, borderValue=fill)


def _rotate(image, level, sign, fill):
  angle = math.radians(sign * level * 30)
  cosine, sine = math.cos(angle), math.sin(angle)
  y, x = image.shape[0] / 2, image.shape[1] / 2
  rows = ((cosine, -sine, x - cosine * x + sine * y), (sine, cosine, y - sine * x - cosine * y))
  return _affine(image, rows, fill)


def _linear(rows):
  """An operation whose `rows` of `_affine` are a function of level and image size."""

  def operation(image, level, sign, fill):
    height, width = image.shape[:2]
    return _affine(image, rows(sign * level, height, width), fill)

  return operation


# By name, in timm's order: (image, level 0..1, sign 1 or -1, fill) -> image.
OPERATIONS: dict[str, Callable] = {
  'auto_contrast': _auto_contrast,
  'equalize': _equalize,
  'invert': lambda image, *_: 255 - image,
  'rotate': _rotate,
  'posterize': _posterize,
  'solarize': _solarize,
  'solarize_add': _solarize_add,
  'color': _color,
  'contrast': _contrast,
  'brightness': _brightness,
  'sharpness': _sharpness,
  'shear_x': _linear(lambda x, height, width: ((1, x * 0.3, 0), (0, 1, 0))),
  'shear_y': _linear(lambda x, height, width: ((1, 0, 0), (x * 0.3, 1, 0))),
  'translate_x': _linear(lambda x, height, width: ((1, 0, x * 0.45 * width), (0, 1, 0))),
  'translate_y': _linear(lambda x, height, width: ((1, 0, 0), (0, 1, x * 0.45 * height))),
}
