"""Tests of batch_reader: the rows of a batch, at once or one at a time."""

from concurrent import futures

import numpy as np
import pytest

from anp_jax.data.input import batch_plan, batch_reader, corruption
from tests import builders, image_sources


@pytest.fixture(params=['encoded', 'pixels'])
def images(request):
  """Ten images of 32 x 32 pixels."""
  images = [image_sources.pixels(32, 32, seed) for seed in range(10)]
  if request.param == 'encoded':
    images = [builders.encode_image(image, 'PNG') for image in images]
  return images


@pytest.fixture
def create():
  """Makes a reader of batches of four, with two threads."""
  with futures.ThreadPoolExecutor(2) as pool:

    def reader(config, images, rows=range(4), **options):
      source = image_sources.Source(images)
      plan = batch_plan.BatchPlan(config, len(images), 4, np.array(rows), **options)
      registry = corruption.Registry(source)
      return batch_reader.BatchReader(source, plan, registry, pool)

    yield reader


def _mark(image, position):
  """Stands for a decoder: pixels that tell the position and the image."""
  pixels = np.zeros((32, 32, 3), np.uint8)
  pixels[0, 0, 0], pixels[0, 0, 1] = position, memoryview(image).nbytes % 256
  return pixels


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('rows', [[0, 1, 2, 3], [1, 3]])
def test_rows_are_the_same_at_once_and_one_at_a_time(config, images, create, rows, training):
  reader = create(config, images, rows, training=training)
  for count in range(3):
    at_once = reader.read(count)
    decoded, labels, weights = reader.decode_rows(count, _mark)
    want = map(_mark, at_once.images, at_once.positions)
    np.testing.assert_array_equal(decoded, np.stack([*want]))
    np.testing.assert_array_equal(labels, at_once.labels)
    np.testing.assert_array_equal(weights, at_once.weights)
    assert (labels.dtype, weights.dtype) == (np.int32, np.float32)
    assert at_once.positions.tolist() == [4 * count + row for row in rows]


def test_damage_fails_a_batch_at_once_and_is_replaced_by_row(config, images, create):
  images[1] = images[2] = None
  reader = create(config, images, training=False)
  with pytest.raises(FileNotFoundError):
    reader.read(0)
  _, labels, weights = reader.decode_rows(0, _mark)
  assert labels.tolist() == [0, 3, 3, 3]
  assert weights.tolist() == [1, 0, 0, 1]
  # Both ways read the replacement from now on.
  at_once = reader.read(0)
  assert at_once.labels.tolist() == [0, 3, 3, 3]
  assert at_once.weights.tolist() == [1, 0, 0, 1]
