"""Random erasing: a rectangle of each image is painted over.

Zhong et al. 2017 (arXiv 1708.04896), with the sizes that timm gives it and the
colour of the paper's RE-M: the mean, which is 0 once images are normalised.
"""

import ml_collections
import numpy as np

from anp_jax.data import index_shuffle
from anp_jax.data.input import augment

_STREAM = 5  # of random numbers, see `index_shuffle.uniform`
_DRAWS = 5  # whether, area, aspect, top, left
_AREA = (0.02, 1 / 3)  # shares of the image
_RATIO = (0.3, 1 / 0.3)  # width over height


def boxes(config: ml_collections.ConfigDict, positions: np.ndarray) -> np.ndarray:
  """The rectangles of training examples.

  Args:
    config: the run's config.
    positions: (n,) int64 places in the endless stream.

  Returns:
    (n, 4) int64: top, left, height, width in pixels; height and width 0 where
    nothing is erased.
  """
  d = config.data
  draws = index_shuffle.uniform(config.seed, _STREAM, positions, _DRAWS)
  sizes = np.full((len(draws), 2), float(d.image_size))
  sides = augment.random_sides(draws[:, 1:3], _AREA, _RATIO, sizes)
  sides = np.clip(np.round(sides), 1, sizes)
  corners = np.floor(draws[:, 3:5] * (sizes - sides + 1))
  sides *= draws[:, :1] < d.erase
  return np.concatenate([corners, sides], 1).astype(np.int64)


def erase(images: np.ndarray, boxes: np.ndarray, fill: tuple) -> None:
  """Paints boxes of images over.

  Args:
    images: (n, height, width, 3) uint8, which is changed.
    boxes: (n, 4) int64, from `boxes`.
    fill: RGB, 0..255.
  """
  for image, (top, left, height, width) in zip(images, boxes.tolist(), strict=True):
    image[top : top + height, left : left + width] = fill
