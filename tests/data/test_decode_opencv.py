"""Tests of decode_opencv: views of JPEGs at a part of their scale."""

import io
import itertools

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.input import batch_sampler, pipeline
from tests import builders, image_sources


@pytest.fixture
def config(config):
  """The tiny recipe, which cuts views of 32 pixels by OpenCV."""
  config.data.image_size, config.data.resize = 32, 36
  config.data.max_damaged = 1.0
  return config


def _between_neighbours(image, side):
  """Bilinear between the four nearest pixels, half-pixel centres, in float64."""
  image = np.asarray(image, float)
  for axis in (0, 1):
    size = image.shape[axis]
    places = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    low = np.minimum(places.astype(int), size - 2) if size > 1 else np.zeros(side, int)
    share = (places - low).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    first, second = image.take(low, axis), image.take(np.minimum(low + 1, size - 1), axis)
    image = first + (second - first) * share
  return image


_SIZES = ((40, 40), (31, 90), (121, 97), (260, 331), (517, 701), (810, 576))


def _files():
  kinds = itertools.cycle([('JPEG', 'RGB'), ('PNG', 'RGB'), ('JPEG', 'L')])
  return [
    builders.encode_image(image_sources.picture(*size, i, 9, mode), kind)
    for i, (size, (kind, mode)) in enumerate(zip(_SIZES, kinds))
  ]


@pytest.mark.parametrize('training', [True, False])
def test_views_lie_between_the_four_nearest_pixels_of_pillows_image(config, training):
  """The image is whole, or a JPEG at the scale that leaves less than twice the view."""
  files = _files()
  count = len(files)
  sampler = batch_sampler.BatchSampler(config, count, count, np.arange(count), training)
  batch = next(pipeline.batches(image_sources.Source(files), sampler))
  assert batch['weight'].all()
  positions, indices, _ = sampler.indices(0)
  sizes = np.array([_SIZES[i] for i in indices])
  views = sampler.views(positions, sizes)
  for pixels, index, box, flip in zip(batch['image'], indices, views.boxes, views.flips):
    image = Image.open(io.BytesIO(files[index]))
    scale = 2 ** min(3, max(0, int(np.log2(min(box[2:]) / 32))))
    if scale > 1 and image.format == 'JPEG':
      image.draft(None, (image.width // scale, image.height // scale))
      box = box // scale
    top, left, height, width = box.astype(int)
    part = np.asarray(image.convert('RGB'))[top : top + height, left : left + width]
    if min(part.shape[:2]) >= 64:  # a PNG: means over areas, of a smooth picture
      want = np.asarray(Image.fromarray(part).resize((32, 32), Image.Resampling.BOX), float)
    else:
      want = _between_neighbours(part, 32)
    want = want[:, ::-1] if flip else want
    # OpenCV has 11 bits for each weight; BOX cuts no pixel in parts.
    limit = 6 if min(part.shape[:2]) >= 64 else 1.01
    assert np.abs(pixels - want).max() <= limit
