"""The part of an image that a training or evaluation example shows.

Boxes are computed in NumPy from the example's position in the stream and its
size, alike for every decoder, so an augmented example does not depend on the
process, thread or library that makes it.
"""

import dataclasses
from typing import Any

import ml_collections
import numpy as np

from anp_jax.data import index_shuffle

# Streams of random numbers; the shuffle has stream 0.
_STREAM = 1
_DRAWS = 5
_PAD_SHARE = 8  # He et al. pad images of 32 pixels by 4
RESAMPLED = ('bilinear', 'bicubic')  # of config.data.decode: Pillow's filters
_STRONG = 'strong_'  # before the name of a cut


@dataclasses.dataclass(frozen=True)
class Views:
  """The boxes that a batch of examples shows, and whether they are mirrored.

  Attributes:
    boxes: (n, 4) float64: top, left, height, width in pixels of the image.
    flips: (n,) bool: whether each is mirrored left to right.
  """

  boxes: np.ndarray
  flips: np.ndarray


def train_draws(config: ml_collections.ConfigDict, positions: np.ndarray) -> np.ndarray:
  """The random numbers of training examples.

  Args:
    config: the run's config.
    positions: (n,) int64 places in the endless stream.

  Returns:
    (n, 5) float64 in [0, 1), input of `train_views`.
  """
  return index_shuffle.uniform(config.seed, _STREAM, positions, _DRAWS)


def train_views(config: ml_collections.ConfigDict, draws: np.ndarray, sizes: np.ndarray) -> Views:
  """Random crops and flips.

  augment='crop' draws area and aspect ratio (Szegedy et al. 2014, arXiv
  1409.4842) and cuts a side longer than the image to it; 'scale' draws the
  length to which the shorter side is brought and a square in it (Simonyan and
  Zisserman 2014, arXiv 1409.1556); 'pad' mirrors the evaluation's view, whose
  pixels `moved` moves; 'none' takes that view unchanged. 'strong_crop' and
  the other strong cuts are cut alike.

  Args:
    config: the run's config.
    draws: (n, 5) float64 from `train_draws`.
    sizes: (n, 2) height and width of the decoded images.

  Returns:
    Views of whole pixels.
  """
  d, kind = config.data, cut(config)
  if kind == 'none':
    return eval_views(config, sizes)
  flips = draws[:, 4] < d.flip
  if kind == 'pad':
    return dataclasses.replace(eval_views(config, sizes), flips=flips)
  sizes = np.asarray(sizes, np.float64)
  if kind == 'crop':
    sides = np.stack(random_sides(draws, d.crop_area, d.crop_ratio, sizes), 1)
  else:
    low, high = d.scale_range
    shorter = low + np.floor(draws[:, 0] * (high - low + 1))
    sides = d.image_size * sizes.min(1) / shorter
    sides = np.stack([sides, sides], 1)
  sides = np.clip(np.round(sides), 1, sizes)
  corners = np.floor(draws[:, 2:4] * (sizes - sides + 1))
  boxes = np.concatenate([corners, sides], 1)
  return Views(boxes, flips)


def moved(config: ml_collections.ConfigDict, draws: np.ndarray, images: np.ndarray) -> np.ndarray:
  """The images of data.augment='pad': padded by zeros, and cut at random.

  The padding is an eighth of their side, rounded down: He et al. 2015 (arXiv
  1512.03385, section 4.2) pad 32 pixels by 4. Other augmentations move nothing.

  Args:
    config: the run's config.
    draws: (n, 5) float64 from `train_draws`.
    images: (n, size, size, 3) uint8, by `train_views`.

  Returns:
    The images, of the same shape and type.
  """
  pad, corners = padding(config), corners_of(config, draws)
  if not pad:
    return images
  side = config.data.image_size
  padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  return np.stack(
    [
      image[top : top + side, left : left + side]
      for image, (top, left) in zip(padded, corners.tolist(), strict=True)
    ]
  )


def padding(config: ml_collections.ConfigDict) -> int:
  """The pixels that `moved` adds at each side of an image."""
  return config.data.image_size // _PAD_SHARE if cut(config) == 'pad' else 0


def corners_of(config: ml_collections.ConfigDict, draws: np.ndarray) -> np.ndarray:
  """The corners (n, 2) int64 of what `moved` cuts out of padded images."""
  return np.floor(draws[:, 2:4] * (2 * padding(config) + 1)).astype(np.int64)


def eval_views(config: ml_collections.ConfigDict, sizes: np.ndarray) -> Views:
  """The central square that evaluation sees.

  Bringing the shorter side to `resize` pixels and cutting the central
  `image_size` is the same as cutting that part first and resizing once.

  Args:
    config: the run's config.
    sizes: (n, 2) height and width of the decoded images.

  Returns:
    Views, none of them flipped. Their boxes are whole pixels, except where
    decode is bilinear or bicubic, which resample from any box.
  """
  if config.data.decode in RESAMPLED:
    return _eval_views_of_resampled(config.data, np.asarray(sizes))
  sizes = np.asarray(sizes, np.float64)
  side = np.round(sizes.min(1) * config.data.image_size / config.data.resize)
  sides = np.maximum(np.stack([side, side], 1), 1)
  corners = np.floor((sizes - sides) / 2)
  boxes = np.concatenate([corners, sides], 1)
  return Views(boxes, np.zeros(len(boxes), bool))


def _eval_views_of_resampled(d, sizes):
  """The box that transformers cuts out, with its roundings.

  It brings the whole image to whole pixels, the longer side rounded down or as
  long as the shorter one, and cuts the centre out of that. torchvision may be a
  pixel off.
  """
  resized = d.resize * sizes // (sizes if d.stretch else sizes.min(1, keepdims=True))
  scales = sizes / resized
  corners = (resized - d.image_size) // 2 * scales
  boxes = np.concatenate([corners, d.image_size * scales], 1)
  return Views(boxes, np.zeros(len(boxes), bool))


def random_sides(draws: Any, area: tuple, ratio: tuple, sizes: np.ndarray) -> tuple[Any, Any]:
  """Height and width of boxes of random area and aspect ratio.

  Args:
    draws: (n, 2) in [0, 1), of NumPy or JAX; further columns are not read.
    area: least and most, shares of the image; uniform between them.
    ratio: least and most width over height; its logarithm is uniform.
    sizes: (n, 2) height and width of the images.

  Returns:
    Heights and widths, (n,) each like draws, neither rounded nor cut to the image.
  """
  low, high = area
  pixels = (low + draws[:, 0] * (high - low)) * sizes.prod(1)
  ratios = ratio[0] * (ratio[1] / ratio[0]) ** draws[:, 1]
  return (pixels / ratios) ** 0.5, (pixels * ratios) ** 0.5


def is_stretched(config: ml_collections.ConfigDict) -> bool:
  """Whether evaluation brings both sides of an image to one length."""
  return config.data.decode in RESAMPLED and config.data.stretch


def cut(config: ml_collections.ConfigDict) -> str:
  """The cut of config.data.augment: 'crop', 'scale', 'pad' or 'none'."""
  return config.data.augment.removeprefix(_STRONG)


def is_strong(config: ml_collections.ConfigDict) -> bool:
  """Whether RandAugment and random erasing follow the cut."""
  return config.data.augment.startswith(_STRONG)


def mean_colour(config: ml_collections.ConfigDict) -> tuple[int, int, int]:
  """The colour nearest to config.data.mean, RGB, 0..255."""
  return tuple(min(255, max(0, round(level))) for level in config.data.mean)
