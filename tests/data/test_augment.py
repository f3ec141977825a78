"""Tests of augment: what part of an image an example shows."""

import collections

import numpy as np
from PIL import Image
import pytest
from scipy import stats

from anp_jax import config as config_lib
from anp_jax.data.input import augment
from tests import random_numbers

_N = 4000


def _views(config, sizes):
  sizes = np.broadcast_to(sizes, (_N, 2))
  draws = augment.train_draws(config, np.arange(_N))
  return augment.train_views(config, draws, sizes)


@pytest.mark.parametrize('mode', ['crop', 'scale', 'none'])
def test_boxes_are_whole_pixels_inside_the_image(config, mode):
  config.data.augment = mode
  config.data.crop_area = (0.01, 1.0)
  config.data.crop_ratio = (0.1, 10.0)
  config.data.scale_range = (32, 300)
  sizes = np.random.default_rng(0).integers(1, 90, (_N, 2))
  boxes = _views(config, sizes).boxes
  assert boxes.shape == (_N, 4) and boxes.dtype == np.float64
  np.testing.assert_array_equal(boxes, np.floor(boxes))
  assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] >= 1).all()
  assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


# An image of 100 x 200 pixels; worked out by hand.
@pytest.mark.parametrize(
  'draws, box',
  [
    # Half the area, square: sqrt(10000 / 1); in the middle of what is free.
    ([0.0, 0.5, 0.5, 0.5], [0, 50, 100, 100]),
    # Half the area, half as wide as high: 141.4 is cut to 100; 70.7.
    ([0.0, 0.0, 0.9, 0.25], [0, 32, 100, 71]),
    # Three quarters of the area, twice as wide as high: 86.6 x 173.2.
    ([0.5, 1 - 2**-53, 0.5, 0.0], [7, 0, 87, 173]),
    # The last free place is reached.
    ([0.0, 0.5, 0.0, 1 - 2**-53], [0, 100, 100, 100]),
  ],
)
def test_crop_by_hand(config, draws, box):
  config.data.crop_area = (0.5, 1.0)
  config.data.crop_ratio = (0.5, 2.0)
  views = augment.train_views(config, np.array([[*draws, 0.6]]), np.array([[100, 200]]))
  assert views.boxes.tolist() == [box]


@pytest.mark.parametrize(
  'draw, side',
  [
    (0.0, 80),  # shorter side to 40, 32 of it: 32 / 40 of 100 pixels
    (0.5, 53),  # to 60, one of 40..80: 53.3 pixels
    (1 - 2**-53, 40),  # to 80
  ],
)
def test_scale_by_hand(config, draw, side):
  config.data.augment = 'scale'
  config.data.scale_range = (40, 80)
  views = augment.train_views(
    config, np.array([[draw, 0.0, 0.5, 0.0, 0.0]]), np.array([[100, 200]])
  )
  assert views.boxes.tolist() == [[(101 - side) // 2, 0, side, side]]


def test_area_and_aspect_are_those_of_the_config(config):
  # The largest crop, 0.3 of the area twice as wide as high, still fits, so no
  # draw is cut; on 4000 pixels rounding is far below what the test resolves.
  config.data.crop_area = (0.1, 0.3)
  config.data.crop_ratio = (0.5, 2.0)
  boxes = _views(config, (4000, 4000)).boxes
  area = boxes[:, 2] * boxes[:, 3] / 4000**2
  ratio = np.log2(boxes[:, 3] / boxes[:, 2])
  assert 0.0999 < area.min() and area.max() < 0.3001
  assert -1.001 < ratio.min() and ratio.max() < 1.001
  free = boxes[:, :2] / (4000 - boxes[:, 2:])
  random_numbers.assert_uniform([(area - 0.1) / 0.2, (ratio + 1) / 2, free[:, 0], free[:, 1]])


def test_scales_are_whole_numbers_alike(config):
  config.data.augment = 'scale'
  config.data.scale_range = (32, 35)
  sides = _views(config, (35 * 34 * 33, 10**6)).boxes[:, 2]
  lengths, counts = np.unique(sides, return_counts=True)
  assert lengths.tolist() == [32 * 34 * 33, 35 * 32 * 33, 35 * 34 * 32, 39270]
  assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize('mode, share', [('crop', 0.25), ('scale', 0.25), ('pad', 1.0)])
def test_share_of_flips(config, mode, share):
  changes = {'data.augment': mode, 'data.flip': share}
  config = config_lib.replaced(config, changes)
  views = _views(config, (100, 120))
  assert views.flips.dtype == bool
  # Five standard deviations of a binomial share.
  wide = 5 * np.sqrt(share * (1 - share) / _N)
  assert abs(views.flips.mean() - share) <= wide
  if share == 0.25 and mode != 'pad':  # flips do not depend on the place
    left = views.boxes[:, 1]
    correlation = np.corrcoef(left, views.flips)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(_N)


def test_none_is_the_evaluations_view(config):
  config.data.augment = 'none'
  sizes = np.array([[100, 200], [33, 32], [1, 5]])
  draws = augment.train_draws(config, np.arange(3))
  views = augment.train_views(config, draws, sizes)
  np.testing.assert_array_equal(views.boxes, augment.eval_views(config, sizes).boxes)
  assert not views.flips.any()


def test_padded_images_are_cut_at_every_place_alike(config):
  """Each of 9 x 9 places as often as the others; black beyond the image."""
  config.data.augment, config.data.image_size = 'pad', 32
  draws = augment.train_draws(config, np.arange(_N))
  image = np.arange(32 * 32 * 3, dtype=np.int64).reshape(32, 32, 3) % 251 + 1
  images = np.broadcast_to(image.astype(np.uint8), (_N, 32, 32, 3))
  moved = augment.moved(config, draws, images)
  padded = np.zeros((40, 40, 3), np.uint8)
  padded[4:36, 4:36] = image
  places = {
    padded[top : top + 32, left : left + 32].tobytes(): (top, left)
    for top in range(9)
    for left in range(9)
  }
  counts = collections.Counter(places[pixels.tobytes()] for pixels in moved)
  assert stats.chisquare([counts[p] for p in places.values()]).pvalue > 1e-4


def test_only_pad_moves_pixels(config):
  images = np.ones((4, 32, 32, 3), np.uint8)
  for config.data.augment in ('crop', 'scale', 'none'):
    draws = augment.train_draws(config, np.arange(4))
    assert augment.moved(config, draws, images) is images


def test_evaluation_by_hand(config):
  config.data.image_size, config.data.resize = 224, 256
  sizes = np.array([[256, 256], [512, 640], [100, 50], [3, 1]])
  views = augment.eval_views(config, sizes)
  assert views.boxes.tolist() == [
    [16, 16, 224, 224],
    [32, 96, 448, 448],
    [28, 3, 44, 44],  # 50 * 224 / 256 = 43.75
    [1, 0, 1, 1],
  ]
  # Of a margin that is odd, the pixel left over is below, and on the right.
  config.data.image_size, config.data.resize = 7, 8
  boxes = augment.eval_views(config, np.array([[100, 103], [104, 107]])).boxes
  assert boxes.tolist() == [[6, 7, 88, 88], [6, 8, 91, 91]]  # 87.5 and 91 pixels
  assert not views.flips.any() and views.flips.shape == (4,)


@pytest.mark.parametrize('size', [(300, 400), (1000, 257), (64, 65)])
def test_evaluation_is_resize_then_central_crop(config, size):
  """Pillow brings the shorter side to `resize` and cuts; we look where."""
  side, resize = 48, 64
  config.data.image_size, config.data.resize = side, resize
  box = augment.eval_views(config, np.array([size])).boxes[0]
  factor = min(size) / resize
  new = [round(n / factor) for n in size]
  for axis in (0, 1):
    # An image whose values are its own coordinates, resized and cut.
    ramp = np.arange(size[axis], dtype=np.float32) + 0.5
    ramp = ramp[:, None] if axis == 0 else ramp[None]
    image = Image.fromarray(np.broadcast_to(ramp, size).copy())
    image = image.resize(new[::-1], Image.Resampling.BILINEAR)
    top, left = ((n - side) // 2 for n in new)
    cut = np.asarray(image)[top : top + side, left : left + side]
    line = cut[:, 0] if axis == 0 else cut[0]
    start, end = line[0] - factor / 2, line[-1] + factor / 2
    # Ours is whole pixels of the image, Pillow's of the resized image: each
    # is off by up to one of its own, the middle by half of both.
    assert abs(box[axis] - start) < 1 + factor
    assert abs(box[axis] + box[axis + 2] - end) < 1 + factor
    assert abs(box[axis + 2] - side * factor) <= 0.5 + 1e-9
