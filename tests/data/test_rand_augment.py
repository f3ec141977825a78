"""RandAugment against timm's, and the frequencies of what it draws."""

import functools
import importlib.util
import os

import jax
import numpy as np
from PIL import Image
import pytest
from scipy import stats

from anp_jax.data.input import rand_augment
from tests import builders

_N = 4000
_FILL = (124, 117, 104)
_TIMM_NAMES = {
  'auto_contrast': 'AutoContrast',
  'equalize': 'Equalize',
  'invert': 'Invert',
  'rotate': 'Rotate',
  'posterize': 'PosterizeIncreasing',
  'solarize': 'SolarizeIncreasing',
  'solarize_add': 'SolarizeAdd',
  'color': 'ColorIncreasing',
  'contrast': 'ContrastIncreasing',
  'brightness': 'BrightnessIncreasing',
  'sharpness': 'SharpnessIncreasing',
  'shear_x': 'ShearX',
  'shear_y': 'ShearY',
  'translate_x': 'TranslateXRel',
  'translate_y': 'TranslateYRel',
}
# Of whole numbers alone.
_EXACT = 'equalize', 'invert', 'posterize', 'solarize', 'solarize_add'


@pytest.fixture(scope='module')
def timm_module():
  """timm's module of operations alone: timm itself needs torchvision."""
  package = importlib.util.find_spec('timm')
  if package is None:
    pytest.skip('no timm here')
  path = os.path.join(package.submodule_search_locations[0], 'data', 'auto_augment.py')
  spec = importlib.util.spec_from_file_location('timm_auto_augment', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _image():
  # Smooth, with noise of few levels: `auto_contrast` has something to stretch.
  rows, columns = np.mgrid[:48, :48]
  ramp = np.stack([40 + rows, 60 + 2 * columns, 200 - rows - columns], -1)
  noise = builders.random_pixels(48, 48) // 16
  return Image.fromarray((ramp + noise).astype(np.uint8))


def test_the_operations_are_timms(timm_module):
  ours = [_TIMM_NAMES[name] for name in rand_augment.OPERATIONS]
  assert sorted(ours) == sorted(timm_module.rand_augment_choices('', increasing=True))


@functools.cache
def _apply():
  return jax.jit(functools.partial(rand_augment.apply, fill=_FILL))


def _applied(image, name, magnitude, direction):
  number = rand_augment.OPERATIONS.index(name)
  return np.asarray(_apply()(image, number, np.float32(magnitude), np.float32(direction)))


_NOISE = Image.fromarray(builders.random_pixels(48, 48))  # of all levels


@pytest.mark.parametrize('image', [_image(), _NOISE], ids=['smooth', 'noise'])
@pytest.mark.parametrize('name', _TIMM_NAMES)
def test_an_operation_is_timms(timm_module, monkeypatch, name, image):
  results = set()
  # timm's posterize keeps no bit at 10, which newer Pillows refuse.
  most = 9.9 if name == 'posterize' else 10
  for magnitude in (0, 2.6, 5.1, 9, most):
    for direction in (1, -1):
      # timm turns a level over where its number is above 0.5.
      chance = 0.9 if direction < 0 else 0.1
      monkeypatch.setattr(timm_module.random, 'random', lambda c=chance: c)
      operation = timm_module.AugmentOp(
        _TIMM_NAMES[name],
        prob=1,
        magnitude=magnitude,
        hparams={'img_mean': _FILL, 'interpolation': Image.Resampling.NEAREST},
      )
      result = _applied(np.asarray(image), name, magnitude, direction)
      assert result.dtype == np.uint8
      gaps = np.abs(result.astype(int) - np.asarray(operation(image)))
      if name in _EXACT:
        assert not gaps.any()
      elif name in ('rotate', 'shear_x', 'shear_y'):  # a place between two pixels may be either's
        assert (gaps > 0).any(-1).mean() < 0.002
      else:  # Pillow's doubles cut a few whole numbers down
        assert gaps.max() <= 1 and (gaps > 0).mean() < 0.01
      results.add(result.tobytes())
  without_strength = ('auto_contrast', 'equalize', 'invert')
  assert len(results) == 1 if name in without_strength else len(results) >= 4


def test_posterize_leaves_a_bit():
  image = np.asarray(_image())
  np.testing.assert_array_equal(_applied(image, 'posterize', 10, 1), image & 128)


@pytest.mark.parametrize('name', _TIMM_NAMES)
def test_an_image_of_one_colour_stays_valid(name):
  """Whose histogram cannot be stretched, and which may be smaller than a kernel."""
  for side in (1, 2, 5):
    image = np.full((side, side, 3), 77, np.uint8)
    result = _applied(image, name, 5, 1)
    assert result.shape == image.shape
    if name in ('auto_contrast', 'equalize', 'sharpness', 'color'):
      np.testing.assert_array_equal(result, image)


def test_operations_follow_each_other_in_each_lowering():
  """A loop over images, and all operations of all images, from which it selects."""
  keys = jax.random.split(jax.random.key(3), 24)
  images = np.stack([np.roll(np.asarray(_image()), i, 1) for i in range(len(keys))])
  want = []
  for image, key in zip(images, keys):
    for part in jax.random.split(key, 2):
      image = _apply()(image, *rand_augment.drawn(part, 6.0))
    want.append(image)
  changed = (np.stack(want) != images).any((1, 2, 3))
  assert 12 <= changed.sum() <= 23  # three of four have an operation, some of no effect
  augmented = functools.partial(rand_augment.augmented, operations=2, magnitude=6.0, fill=_FILL)
  np.testing.assert_array_equal(jax.jit(augmented)(images, keys), want)
  each = jax.jit(jax.vmap(lambda image, key: augmented(image[None], key[None])[0]))
  np.testing.assert_array_equal(each(images, keys), want)


def test_operations_and_magnitudes_are_those_of_the_recipe():
  """Operations are equally frequent, magnitudes normal, half left out."""
  keys = jax.random.split(jax.random.key(0), 3 * _N)
  numbers, magnitudes, directions = map(
    np.asarray, jax.vmap(lambda key: rand_augment.drawn(key, 5.0))(keys)
  )
  applied = numbers < len(rand_augment.OPERATIONS)
  # Five standard deviations of a binomial count.
  assert abs(applied.sum() - 1.5 * _N) < 5 * np.sqrt(3 * _N) / 2
  counts = np.unique(numbers[applied], return_counts=True)[1]
  # Chance is below it once in 10,000 seeds.
  assert len(counts) == 15 and stats.chisquare(counts).pvalue > 1e-4
  normal = (magnitudes - 5) / 0.5
  assert stats.kstest(normal, 'norm').pvalue > 1e-4
  assert abs((directions > 0).mean() - 0.5) < 2.5 / np.sqrt(len(directions))
  assert set(directions.tolist()) == {-1.0, 1.0}
  # Of an example's numbers none tells another.
  correlations = np.corrcoef([numbers, normal, directions]) - np.eye(3)
  assert np.abs(correlations).max() < 5 / np.sqrt(3 * _N)


@pytest.mark.parametrize('mean', [0, 10])
def test_magnitudes_stay_within_0_and_10(mean):
  keys = jax.random.split(jax.random.key(0), 400)
  magnitudes = jax.vmap(lambda key: rand_augment.drawn(key, mean)[1])(keys)
  assert magnitudes.min() >= 0 and magnitudes.max() <= 10
  assert (magnitudes == mean).mean() == pytest.approx(0.5, abs=0.15)
