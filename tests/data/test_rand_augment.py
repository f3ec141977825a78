"""RandAugment against timm's, and the frequencies of what it draws."""

import importlib.util
import os

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


@pytest.fixture
def strong(config):
  config.data.augment = 'strong_crop'
  return config


def _image():
  # Smooth, with noise of few levels: `auto_contrast` has something to stretch.
  rows, columns = np.mgrid[:48, :48]
  ramp = np.stack([40 + rows, 60 + 2 * columns, 200 - rows - columns], -1)
  noise = builders.random_pixels(48, 48) // 16
  return Image.fromarray((ramp + noise).astype(np.uint8))


def test_the_operations_are_timms_in_its_order(timm_module):
  ours = [_TIMM_NAMES[name] for name in rand_augment.OPERATIONS]
  assert ours == timm_module.rand_augment_choices('', increasing=True)


# Grey levels from timm's: of two images Pillow cuts a mixture's fractions off, OpenCV rounds.
_GAPS = {'color': 2, 'sharpness': 1}


@pytest.mark.parametrize('name', _TIMM_NAMES)
def test_an_operation_is_timms(timm_module, monkeypatch, name):
  image, results = _image(), set()
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
      result = rand_augment.apply(np.asarray(image), name, magnitude, direction, _FILL)
      gaps = np.abs(result.astype(int) - np.asarray(operation(image)))
      if name == 'rotate':  # a place between two pixels may be given to either
        assert (gaps > 0).any(-1).mean() < 0.001
      else:
        assert gaps.max() <= _GAPS.get(name, 0)
      results.add(result.tobytes())
  without_strength = ('auto_contrast', 'equalize', 'invert')
  assert len(results) == 1 if name in without_strength else len(results) >= 4


def test_operations_follow_each_other(strong):
  """By hand: which, whether, how strong and in which direction."""
  names = list(rand_augment.OPERATIONS)

  def draw(name, applies=True, radius=0.0, angle=0.0, sign=0.9):
    chance = 0.49 if applies else 0.5
    return [(names.index(name) + 0.5) / 15, chance, radius, angle, sign]

  image = np.asarray(_image())
  radius = 1 - np.exp(-2.0)  # two deviations, of 0.5 each
  result = rand_augment.augmented(
    image,
    np.array(
      [
        draw('rotate', sign=0.1),
        draw('invert', applies=False),
        draw('shear_x', radius=radius, angle=0.5),
      ]
    ),
    6.0,
    _FILL,
  )
  want = _image().rotate(-18, fillcolor=_FILL)
  # Pixels whose place the rounding of a shear of 0.15 moves across a border may differ.
  want = want.transform(want.size, Image.Transform.AFFINE, (1, 0.15, 0, 0, 1, 0), fillcolor=_FILL)
  assert (result != np.asarray(want)).any(-1).mean() < 0.02
  unchanged = rand_augment.augmented(image, np.array([draw('invert', applies=False)]), 6.0, _FILL)
  np.testing.assert_array_equal(unchanged, image)


def test_operations_and_magnitudes_are_those_of_the_recipe(strong, monkeypatch):
  """Operations are equally frequent, magnitudes normal, half left out."""
  strong.data.rand_augment_ops = 3
  draws = rand_augment.draws(strong, np.arange(_N))
  assert draws.shape == (_N, 3, 5) and draws.dtype == np.float64
  applied = []
  for name in rand_augment.OPERATIONS:

    def note(image, level, direction, fill, name=name):
      assert fill == _FILL
      applied.append((name, 10 * level, direction))
      return image

    monkeypatch.setitem(rand_augment.OPERATIONS, name, note)
  pixel = np.zeros((1, 1, 3), np.uint8)
  for numbers in draws:
    rand_augment.augmented(pixel, numbers, 5.0, _FILL)
  # Five standard deviations of a binomial count.
  assert abs(len(applied) - 1.5 * _N) < 5 * np.sqrt(3 * _N) / 2
  names, magnitudes, directions = map(np.array, zip(*applied))
  counts = np.unique(names, return_counts=True)[1]
  # Chance is below it once in 10,000 seeds.
  assert len(counts) == 15 and stats.chisquare(counts).pvalue > 1e-4
  normal = (magnitudes - 5) / 0.5
  assert stats.kstest(normal, 'norm').pvalue > 1e-4
  assert abs((directions > 0).mean() - 0.5) < 2.5 / np.sqrt(len(directions))
  # Of an example's operations none tells another.
  numbers = draws.reshape(_N, -1)
  correlations = np.corrcoef(numbers.T) - np.eye(15)
  assert np.abs(correlations).max() < 5 / np.sqrt(_N)


def test_magnitudes_stay_within_0_and_10(strong, monkeypatch):
  levels = []
  monkeypatch.setattr(
    rand_augment, 'apply', lambda image, name, magnitude, *_: levels.append(magnitude) or image
  )
  pixel = np.zeros((1, 1, 3), np.uint8)
  for mean in (0.0, 10.0):
    for numbers in rand_augment.draws(strong, np.arange(200)):
      rand_augment.augmented(pixel, numbers, mean, _FILL)
  assert min(levels) == 0 and max(levels) == 10


def test_posterize_leaves_a_bit(strong):
  image = np.asarray(_image())
  result = rand_augment.apply(image, 'posterize', 10, 1, _FILL)
  np.testing.assert_array_equal(result, image & 128)
