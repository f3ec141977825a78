"""Tests of subset: which examples of a source are left for training."""

import numpy as np
import pytest

from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.sources import subset
from tests import builders, image_sources, opening, showing

_NAMES = ('big_cat', 'big_dog', 'red_cat', 'red_dog', 'red_sky')


def _source(labels, names=_NAMES):
  """Examples whose image is their index."""
  return image_sources.Source(range(len(labels)), labels, names)


def _wrapped(config, source, held_out=(), imbalance=1.0):
  config.data.held_out, config.data.imbalance = held_out, imbalance
  return subset.wrap(source, config)


def test_a_config_that_leaves_nothing_out_wraps_nothing(config):
  source = _source([0, 1, 2, 3, 4])
  assert _wrapped(config, source) is source


def test_held_out_pairs_have_no_example(config):
  source = _source([0, 1, 2, 3, 4, 3, 2, 1, 0])
  part = _wrapped(config, source, ('big_dog', 'red_cat'))
  assert len(part) == 5 and part.kind == 'pixels'
  images, labels = part.read(np.arange(5))
  assert images == [0, 3, 4, 5, 8] and labels.tolist() == [0, 3, 4, 3, 0]
  assert part.labels().tolist() == [0, 3, 4, 3, 0]
  assert part.example_name(3) == 'example 5'
  assert part.name == 'test, 5 of 9'
  # Ids stay those of the whole vocabulary, as evaluation has them.
  assert part.vocabulary is source.vocabulary
  assert sources.fingerprint(part)['examples'] == 5


@pytest.mark.parametrize(
  'held_out, labels, text',
  [
    (
      ('red_dogg',),
      [0, 1, 2, 3, 4],
      "config.data.held_out: test has no class 'red_dogg'; did you mean 'red_dog'?",
    ),
    (
      ('red_sky',),
      [0, 1, 2, 3, 4],
      "config.data.held_out: 'red_sky' leaves test without any example of the noun 'sky'",
    ),
    (
      ('big_cat', 'big_dog'),
      [0, 1, 2, 3, 4],
      "config.data.held_out: 'big_cat' leaves test without any example of the adjective 'big'",
    ),
    # That red_dog is a class does not help where it has no example either.
    (
      ('big_dog',),
      [0, 1, 2, 4],
      "config.data.held_out: 'big_dog' leaves test without any example of the noun 'dog'",
    ),
  ],
)
def test_pairs_that_cannot_be_held_out(config, held_out, labels, text):
  line = builders.refusal(_wrapped, config, _source(labels), held_out)
  assert line == text


def test_plain_classes_cannot_be_held_out(config):
  builders.assert_refused(
    'no adjective_noun pairs', _wrapped, config, _source([0, 1], ('cat', 'dog')), ('cat',)
  )


def test_long_tail_of_cifar10():
  """The counts of CIFAR-10-LT, as published (Cui et al.; Cao et al. 2019)."""
  labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
  indices = subset.cut(labels, 100.0, 0)
  counts = '5000 2997 1796 1077 645 387 232 139 83 50'
  assert ' '.join(map(str, np.bincount(labels[indices]))) == counts
  assert (np.diff(indices) > 0).all()
  # A stronger imbalance leaves some of these.
  assert set(subset.cut(labels, 200.0, 0)) < set(indices)


def test_cut_is_a_function_of_data_and_seed():
  labels = np.arange(4000) % 4
  indices = subset.cut(labels, 10.0, 3)
  np.testing.assert_array_equal(indices, subset.cut(labels, 10.0, 3))
  other = subset.cut(labels, 10.0, 4)
  assert len(other) == len(indices) and (other != indices).any()
  # Random ones of each class, no stretch of it: of class 3, 100 of 1000 whose
  # places have a mean of 499.5, and of the mean a deviation of 27.
  places = indices[labels[indices] == 3] // 4
  assert len(places) == 100 and abs(places.mean() - 499.5) < 5 * 27
  assert len(np.unique(np.diff(places))) > 10
  np.testing.assert_array_equal(subset.cut(labels, 1.0, 3), np.arange(4000))


def test_classes_that_are_too_small_bring_the_others_down():
  """No class keeps more than it has; one without examples does not count."""
  labels = np.repeat([0, 2, 3], [100, 30, 100])
  # 100, 50 and 25 where all had enough; 30 of class 2 allow 60, 30 and 15.
  indices = subset.cut(labels, 4.0, 0)
  assert np.bincount(labels[indices]).tolist() == [60, 0, 30, 15]


def test_cut_leaves_no_class_empty():
  labels = np.repeat([0, 1], [30, 30])
  assert np.bincount(labels[subset.cut(labels, 30.0, 0)]).tolist() == [30, 1]
  line = builders.refusal(subset.cut, labels, 31.0, 0)
  assert line == (
    'config.data.imbalance=31.0: expected less, for which the smallest class keeps an example'
  )


def test_the_profile_is_that_of_the_pairs_not_held_out(config):
  source = _source(np.repeat(np.arange(5), 16))
  part = _wrapped(config, source, ('big_dog',), 8.0)
  # Four classes are left: 16, 8, 4, 2.
  assert np.bincount(part.labels(), minlength=5).tolist() == [16, 0, 8, 4, 2]
  assert part.read(np.arange(30))[1].tolist() == part.labels().tolist()


def test_evaluation_keeps_all(tmp_path, config):
  labels = np.arange(40) % 5
  showing.save_arrays(tmp_path / 'set.npz', labels, labels, _NAMES)
  config.data.held_out, config.data.imbalance = ('red_dog',), 2.0
  train = opening.source(config, 'arrays', tmp_path / 'set.npz')
  assert np.bincount(train.labels(), minlength=5).tolist() == [8, 6, 5, 0, 4]
  assert len(sources.open_source(config, training=False)) == 40


@pytest.mark.parametrize(
  'key, text, expected',
  [
    ('data.held_out', "('class00',)", '() for synthetic examples'),
    ('data.imbalance', '2', '1 for synthetic examples'),
    ('data.balance', 'sample', "'none' for synthetic examples"),
    ('data.imbalance', '0.5', '1 or more'),
    ('data.held_out', '(3,)', "names of classes, as in ('red_car',)"),
    ('data.balance', 'samples', "did you mean 'sample'?"),
  ],
)
def test_configs_that_are_refused(key, text, expected):
  line = builders.refusal(command_line.load, 'configs/resnet_anp.py:tiny', {key: text})
  assert line.startswith(f'config.{key}=')
  assert line.endswith(expected)


def test_model_ring_cannot_balance():
  builders.assert_refused(
    'strategy.name is model_ring',
    command_line.load,
    'configs/model_ring_anp.py',
    {'data.balance': 'weights'},
  )


def test_examples_without_a_label_are_named():
  source = _source(np.array([0, -1, 2]))
  builders.assert_refused('1.* has no label', subset.complete_labels, source)
