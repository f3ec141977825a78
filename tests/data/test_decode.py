"""Tests of decode: how a file's box becomes the network's pixels."""

import importlib
import io
import itertools
import sys

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.input import augment, batch_plan, pipeline, tensorflow_cpu
from tests import builders, image_sources


def _picture(height, width, seed):
  return image_sources.picture(height, width, seed, detail=12)


def _evaluated(config, files):
  batch = image_sources.evaluated(config, image_sources.Source(files))
  assert batch['weight'].all()
  return batch['image'].astype(int)


def _by_hand(file, side, box, resample):
  top, left, height, width = (int(v) for v in box)
  image = Image.open(io.BytesIO(file)).convert('RGB')
  image = image.crop((left, top, left + width, top + height))
  return np.asarray(image.resize((side, side), resample)).astype(int)


def _shares(pixels, side):
  """(side, pixels): the share of each pixel in the stretch of each result."""
  edges = np.linspace(0, pixels, side + 1)
  start, end = edges[:-1, None], edges[1:, None]
  pixel = np.arange(pixels)
  covered = np.minimum(end, pixel + 1) - np.maximum(start, pixel)
  return np.maximum(covered, 0) * side / pixels


def _mean_over_areas(file, side, box):
  top, left, height, width = (int(v) for v in box)
  image = np.asarray(Image.open(io.BytesIO(file)).convert('RGB'), float)
  image = image[top : top + height, left : left + width]
  return np.einsum('ih,jw,hwc->ijc', _shares(height, side), _shares(width, side), image)


def _views(config, files):
  sizes = [Image.open(io.BytesIO(f)).size[::-1] for f in files]
  return augment.eval_views(config, np.array(sizes)).boxes


def test_boxes_move_by_less_than_a_pixel_of_the_result():
  rng = np.random.default_rng(0)
  sides = rng.integers(1, 3000, (5000, 2))
  boxes = np.concatenate([rng.integers(0, 3000, (5000, 2)), sides], 1)
  boxes = boxes.astype(np.int32)
  for side in (1, 32, 48, 224):
    moved, halvings = augment.reduced(boxes, side)
    assert moved.dtype == halvings.dtype == np.int32
    scale = 2**halvings
    # Whole pixels of the smaller image, inside of the old box or its corner.
    assert (moved % scale[:, None] == 0).all()
    assert ((moved <= boxes) & (boxes - moved < scale[:, None])).all()
    # As small as may be, and still as large as the result.
    shorter = boxes[:, 2:].min(1)
    want = [max(k for k in range(4) if k == 0 or n >= side * 2**k) for n in shorter]
    assert halvings.tolist() == want
    large = halvings > 0
    assert (moved[large, 2:] // scale[large, None] >= side).all()
    # A pixel of the result is at least `scale` pixels of the image.
    assert (shorter[large] / side >= scale[large]).all()
  assert set(halvings) == {0, 1, 2, 3}


@pytest.mark.parametrize(
  'kind, size', [('PNG', (20, 25)), ('PNG', (45, 61)), ('JPEG', (32, 32)), ('JPEG', (63, 40))]
)
def test_fast_is_the_mean_over_areas(config, kind, size):
  """Where both sides shrink, else bilinear as Pillow has it."""
  config.data.image_size = config.data.resize = 32
  # Halved colour would be interpolated from inside of the crop only.
  options = {'subsampling': 0} if kind == 'JPEG' else {}
  files = [builders.encode_image(_picture(*size, i), kind, **options) for i in range(3)]
  got = _evaluated(config, files)
  for image, file, box in zip(got, files, _views(config, files)):
    if min(size) >= 32:
      want = _mean_over_areas(file, 32, box)
    else:
      want = _by_hand(file, 32, box, Image.Resampling.BILINEAR)
    # Rounded to a level; Pillow also rounds its weights, and twice.
    assert np.abs(image - want).max() <= 1


class _Boxes(batch_plan.BatchPlan):
  """Cuts boxes that a test sets, none of them flipped."""

  boxes = None

  def views(self, positions, sizes):
    return augment.Views(self.boxes, np.zeros(len(positions), bool))


@pytest.mark.parametrize('subsampling', [0, 1, 2])
def test_boxes_near_the_edges_have_the_whole_pictures_pixels(config, monkeypatch, subsampling):
  """Halved colour of a box's first and last column depends on the next one."""
  side = 20
  config.data.image_size = config.data.resize = side
  # A decoder begins at a block of 8 or 16 columns.
  gaps = np.array([*itertools.product((0, 1, 8, 16, 17), (0, 1, 2, 3))])
  # Boxes of the result's size, so that nothing is resized.
  files = [
    builders.encode_image(
      _noise(side + top + 1, side + left + right, (top, left, right)),
      'JPEG',
      subsampling=subsampling,
    )
    for top, (left, right) in enumerate(gaps)
  ]
  boxes = np.array([(top, left, side, side) for top, (left, _) in enumerate(gaps)])
  monkeypatch.setattr(_Boxes, 'boxes', boxes)
  rows = np.arange(len(files))
  plan = _Boxes(config, len(files), len(files), rows, False)
  (batch,) = pipeline.batches(image_sources.Source(files), plan)
  for image, file, (top, left, *_), gap in zip(batch['image'], files, boxes, gaps):
    picture = np.asarray(Image.open(io.BytesIO(file)))
    want = picture[top : top + side, left : left + side]
    np.testing.assert_array_equal(image, want, err_msg=str((top, *gap)))


def _noise(height, width, seed):
  random = np.random.default_rng(seed)
  return random.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize('times', [2, 4, 8])
def test_large_jpegs_are_decoded_at_a_smaller_scale(config, times):
  """The same as when the whole picture is averaged, to the JPEG's precision."""
  config.data.image_size = config.data.resize = 32
  side = 32 * times
  files = [
    builders.encode_image(_picture(side, side, i), 'JPEG', subsampling=0, quality=95)
    for i in range(3)
  ]
  got = _evaluated(config, files)
  for image, file, box in zip(got, files, _views(config, files)):
    off = np.abs(image - _by_hand(file, 32, box, Image.Resampling.BOX))
    # The scaled inverse transform keeps the low frequencies instead of taking
    # a mean, which for a smooth picture is nearly the same.
    assert off.mean() < 1 and off.max() <= 8


def test_tensorflow_is_imported_without_keras(tmp_path, monkeypatch):
  builders.write_tree(
    tmp_path,
    {
      'tensorflow.py': b"""
class config:
  set_visible_devices = lambda devices, kind: None
try:
  import keras
except ImportError:
  keras = None
""",
      'keras.py': b'',
    },
  )
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('tensorflow', 'keras'):
    monkeypatch.setitem(sys.modules, name, None)  # which is undone
    del sys.modules[name]
  assert tensorflow_cpu.load.__wrapped__().keras is None
  assert importlib.import_module('keras').__file__ == str(tmp_path / 'keras.py')
