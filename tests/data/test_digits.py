"""Tests of the digits: split, pixels, and that small networks learn them."""

import sys

import numpy as np
import pytest
from sklearn import datasets

from anp_jax.data.sources import digits
from anp_jax.reporting import telemetry
from tests import launching, opening


def _expected(split):
  """The images in order, from the definition, one by one."""
  data = datasets.load_digits()
  counts = dict.fromkeys(range(10), 0)
  images, labels = [], []
  for image, label in zip(data.images, data.target):
    counts[label] += 1
    if (counts[label] % 5 == 0) == (split == 'validation'):
      images.append(image)
      labels.append(label)
  return np.stack(images), labels


@pytest.mark.parametrize('split, size', [('train', 1442), ('validation', 355)])
def test_every_fifth_image_of_a_class_is_held_out(config, split, size):
  source = opening.source(config, 'digits', split=split)
  images, labels = _expected(split)
  assert len(source) == len(labels) == size
  assert source.kind == 'pixels'
  assert source.vocabulary.names == tuple('0123456789')
  assert not source.vocabulary.is_anp
  read, read_labels = source.read(np.arange(size)[::-1])
  assert read_labels.dtype == np.int32 and read_labels.tolist() == labels[::-1]
  np.testing.assert_array_equal(source.labels(), labels)
  for image, want in zip(read, images[::-1]):
    assert image.shape == (8, 8, 3) and image.dtype == np.uint8
    # 255/16 a level, to the nearest whole number.
    assert np.abs(image - 255 / 16 * want[..., None]).max() <= 0.5


def test_an_unknown_split_is_refused(config):
  words = ["digits has no split 'trian'", "did you mean 'train'?"]
  opening.refused(words, config, 'digits', split='trian')


def test_without_scikit_learn_the_command_is_named(config, monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  digits._load.cache_clear()
  text = "config.data.source='digits' needs scikit-learn, which brings them: pip install scikit-"
  opening.refused([text], config, 'digits')


@pytest.mark.soak
@pytest.mark.parametrize('recipe, epochs, least', [('lenet', 2, 0.85), ('cifar10_full', 15, 0.9)])
def test_the_networks_learn_them(tmp_path, recipe, epochs, least):
  """In part of their configs' time, to somewhat less."""
  keys = [f'--config.duration={epochs} epochs', '--config.log.tensorboard=False']
  flags = [f'--config=configs/{recipe}.py', f'--workdir={tmp_path}', *keys]
  launching.python('main.py', *flags, status=0, timeout=500)
  last = telemetry.read(str(tmp_path))[-1]
  assert last['kind'] == 'validation'
  # 91.5 and 96.6 % were seen; the standard deviation of 355 images is 1.5 %, and
  # chance is 10 %.
  assert last['anp_top1'] >= least
