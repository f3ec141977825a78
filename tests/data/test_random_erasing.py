"""Random erasing against closed forms."""

import jax
import numpy as np
import pytest

from anp_jax.data.input import random_erasing
from tests import random_numbers

_N, _SIDE = 4000, 2000  # rounding is below what a test resolves


def _boxes(share, side=_SIDE):
  return np.asarray(random_erasing.boxes(jax.random.split(jax.random.key(0), _N), share, side))


@pytest.mark.parametrize('share', [0.0, 0.25, 1.0])
def test_share_of_images(share):
  boxes = _boxes(share)
  assert boxes.shape == (_N, 4) and boxes.dtype == np.int32
  erased = boxes[:, 2] > 0
  np.testing.assert_array_equal(erased, boxes[:, 3] > 0)
  # Five standard deviations of a binomial share.
  assert abs(erased.mean() - share) <= 5 * np.sqrt(share * (1 - share) / _N)


def test_areas_ratios_and_places():
  boxes = _boxes(1.0).astype(float)
  area = boxes[:, 2] * boxes[:, 3] / _SIDE**2
  ratio = np.log(boxes[:, 3] / boxes[:, 2]) / np.log(1 / 0.3)
  # Area a of ratio r is cut where a max(r, 1 / r) > 1; none below 0.3 is.
  small = area < 0.29
  # Sides of 150 pixels and more, rounded by half a pixel.
  assert 0.0198 < area.min() and area.max() < 0.3336
  assert -1.01 < ratio.min() and ratio.max() < 1.01
  places = boxes[:, :2] / (_SIDE - boxes[:, 2:]).clip(1)
  random_numbers.assert_uniform(
    [(area[small] - 0.02) / 0.27, (ratio[small] + 1) / 2, places[small, 0], places[small, 1]]
  )


@pytest.mark.parametrize('side', [1, 2, 7, 32])
def test_boxes_are_inside_the_image(side):
  boxes = _boxes(1.0, side)
  assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] >= 1).all()
  assert (boxes[:, :2] + boxes[:, 2:] <= side).all()
  if side == 32:  # every edge is reached
    assert (boxes[:, :2].min(0) == 0).all()
    assert (boxes[:, :2] + boxes[:, 2:]).max(0).tolist() == [32, 32]


def test_what_is_in_the_box_has_the_colour():
  images = np.random.default_rng(0).integers(0, 100, (3, 8, 8, 3), np.uint8)
  boxes = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [5, 5, 3, 3]])
  want = images.copy()
  want[0, 1:4, 2:6] = want[2, 5:8, 5:8] = (124, 117, 104)
  erased = random_erasing.erased(images, boxes, (124, 117, 104))
  assert erased.dtype == np.uint8
  np.testing.assert_array_equal(erased, want)
