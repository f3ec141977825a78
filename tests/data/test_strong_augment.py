"""RandAugment and random erasing in the stream: after the cut, by position."""

import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.data.input import augment, batch_plan, rand_augment, random_erasing
from tests import builders, image_sources

_BATCH = image_sources.BATCH
# How an example's pixels come about: (kind of the source, data.decode).
_PATHS = [('encoded', 'fast'), ('encoded', 'bicubic'), ('pixels', 'fast')]


@pytest.fixture(scope='module')
def sources():
  """The same 21 pictures as files and as arrays, by kind."""
  images = image_sources.pixels_of_many_sizes()
  files = [builders.encode_image(image, 'PNG') for image in images]
  return {'encoded': image_sources.Source(files), 'pixels': image_sources.Source(images)}


@pytest.fixture
def strong(config):
  config.data.augment, config.data.resize = 'strong_crop', 40
  config.data.erase = 0.5
  return config


def _images(config, source, steps, **process):
  """The images of the first steps, (steps * rows, side, side, 3)."""
  batches = image_sources.batches(config, source, steps, **process)
  return np.concatenate([batch['image'] for batch in batches])


@pytest.mark.parametrize('kind, decode', _PATHS)
@pytest.mark.parametrize('cut', ['crop', 'pad'])
def test_they_follow_the_cut_in_each_decoder(strong, sources, kind, decode, cut):
  strong.data.decode, strong.data.augment = decode, f'strong_{cut}'
  images = _images(strong, sources[kind], 2)
  positions = np.arange(2 * _BATCH)
  boxes = random_erasing.boxes(strong, positions)
  draws = rand_augment.draws(strong, positions)
  strong.data.augment = cut
  plain = _images(strong, sources[kind], 2)
  fill = augment.mean_colour(strong)
  assert fill == (124, 117, 104)  # of ImageNet, rounded
  want = np.stack(
    [rand_augment.augmented(image, numbers, 9.0, fill) for image, numbers in zip(plain, draws)]
  )
  changed = (want != plain).any((1, 2, 3))
  # Three of four images have an operation, some of no effect.
  assert 6 <= changed.sum() <= 15
  random_erasing.erase(want, boxes, fill)
  np.testing.assert_array_equal(images, want)


@pytest.mark.parametrize('kind', ['encoded', 'pixels'])
def test_the_position_decides(strong, sources, kind):
  """Not the batch's size, the process, the first step or the threads."""
  source = sources[kind]
  images = _images(strong, source, 4)
  by_step = images.reshape(4, _BATCH, *images.shape[1:])
  np.testing.assert_array_equal(_images(strong, source, 8, batch=4), images)
  rows = np.array([1, 2, 6])
  part = _images(strong, source, 4, rows=rows).reshape(4, 3, *images.shape[1:])
  np.testing.assert_array_equal(part, by_step[:, rows])
  later = _images(strong, source, 1, start=3)
  np.testing.assert_array_equal(later, by_step[3])
  for threads in (1, 3):
    strong.data.threads = threads
    np.testing.assert_array_equal(_images(strong, source, 1), by_step[0])


def test_draws_belong_to_the_position_and_the_seed(strong):
  positions, some, draws = np.arange(1000), np.array([999, 3, 500]), []
  for function in (augment.train_draws, rand_augment.draws, random_erasing.boxes):
    draws.append(function(strong, positions))
    np.testing.assert_array_equal(function(strong, some), draws[-1][some])
    strong.seed += 1
    assert not np.array_equal(function(strong, positions), draws[-1])
    strong.seed -= 1
  crops, operations, _ = draws
  # No number is drawn twice, not for another purpose either.
  assert len(np.unique(np.append(crops, operations))) == crops.size + operations.size


def test_images_of_a_decoder_that_are_read_only_are_not_changed(strong):
  strong.data.rand_augment_ops, strong.data.erase = 0, 1.0
  plan = batch_plan.BatchPlan(strong, _BATCH, _BATCH, np.arange(_BATCH), True)
  side = strong.data.image_size
  images = np.zeros((_BATCH, side, side, 3), np.uint8)
  images.flags.writeable = False
  assert plan.augmented(0, images).any((1, 2, 3)).all()
  assert not images.any()


def test_nothing_is_left_where_both_are_off(strong, sources):
  strong.data.rand_augment_ops, strong.data.erase = 0, 0.0
  images = _images(strong, sources['pixels'], 2)
  strong.data.augment = 'crop'
  np.testing.assert_array_equal(images, _images(strong, sources['pixels'], 2))


@pytest.mark.parametrize('kind, decode', _PATHS)
def test_evaluation_is_as_it_was(strong, sources, kind, decode):
  strong.data.decode = decode
  images = image_sources.evaluated(strong, sources[kind])['image']
  strong.data.augment = 'none'
  expected = image_sources.evaluated(strong, sources[kind])['image']
  np.testing.assert_array_equal(images, expected)


def test_the_keys_apply_to_strong_augmentation_only():
  keys = {'data.erase', 'data.rand_augment_ops', 'data.rand_augment_magnitude'}
  for cut, its in (
    ('crop', {'data.crop_area', 'data.crop_ratio'}),
    ('scale', {'data.scale_range'}),
    ('pad', set()),
  ):
    flat = config_lib.flat(builders.config({'data.augment': cut}))
    assert its <= set(flat) and not keys & set(flat)
    flat = config_lib.flat(builders.config({'data.augment': f'strong_{cut}'}))
    assert its | keys <= set(flat)
    assert flat['data.rand_augment_ops'] == 2 and flat['data.erase'] == 0.25
