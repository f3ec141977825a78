"""Features as examples: formats, files joined by the names of their images, errors."""

import json

import numpy as np
import pyarrow as pa
from pyarrow import parquet
import pytest
from safetensors import numpy as safetensors_numpy

from anp_jax.checkpoint import run_dir
from anp_jax.data.sources import features, label_mapping, subset
from tests import builders, image_sources, opening

NAMES = ('a/old_cat/1.jpg', 'a/red_dog/2.jpg', 'a/old_cat/3.jpg')
VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)


def _npz(path, names=NAMES, **arrays):
  np.savez(path, names=names, **(arrays or {'features': VALUES}))


@pytest.fixture
def config():
  return builders.load('configs/features.py:tiny')


def test_formats_hold_the_same(tmp_path):
  _npz(tmp_path / 'x.npz', logits=VALUES.astype(np.float64))
  table = pa.table({'names': [name.encode() for name in NAMES], 'logits': VALUES.tolist()})
  parquet.write_table(table, tmp_path / 'x.parquet')
  metadata = {'names': json.dumps(NAMES)}
  safetensors_numpy.save_file({'logits': VALUES}, tmp_path / 'x.safetensors', metadata)
  for suffix in ('npz', 'parquet', 'safetensors'):
    names, values = features.read(str(tmp_path / f'x.{suffix}'), 'logits')
    assert names == NAMES and values.dtype == np.float32
    np.testing.assert_array_equal(values, VALUES)


def test_files_are_joined_by_the_names_of_their_images(tmp_path, config):
  _npz(tmp_path / 'x-train.npz')
  _npz(tmp_path / 'y-train.npz', NAMES[::-1], logits=np.array([[30.0], [20], [10]]))
  # A class that the training examples lack counts, too.
  _npz(tmp_path / 'x-validation.npz', ('new_fox/1.jpg', *NAMES[1:]))
  source = opening.source(
    config, f'features:{tmp_path}/x-{{split}}.npz,{tmp_path}/y-train.npz#logits'
  )
  assert source.vocabulary.names == ('new_fox', 'old_cat', 'red_dog')
  images, labels = source.read(np.array([2, 0]))
  np.testing.assert_array_equal(np.stack(images), [[[[4, 5, 30]]], [[[0, 1, 10]]]])
  np.testing.assert_array_equal(labels, [1, 1])
  assert source.example_name(1) == NAMES[1] and tuple(source.listing()) == NAMES


def test_classes_of_words(tmp_path, config):
  _npz(tmp_path / 'train.npz')
  config.data.eval_split = 'train'
  for words, names, labels in (
    ('adjectives', ('old', 'red'), [0, 1, 0]),
    ('nouns', ('cat', 'dog'), [0, 1, 0]),
  ):
    config.data.pairs = words
    source = opening.source(config, f'features:{tmp_path}/{{split}}.npz')
    assert source.vocabulary.names == names and not source.vocabulary.is_anp
    np.testing.assert_array_equal(source.labels(), labels)


def test_one_name_that_is_no_pair_among_pairs_is_named(tmp_path, config):
  """A photograph in a deeper folder of the tree that the features are of."""
  names = ('old_cat/1.jpg', 'red_cat/2.jpg', 'old_dog/sub/3.jpg')
  _npz(tmp_path / 'train.npz', names)
  words = ["train: class 2: 'sub' is not an adjective_noun pair", 'config.data.pairs=no']
  opening.refused(words, config, f'features:{tmp_path}/{{split}}.npz')
  config.data.pairs = 'no'
  source = opening.source(config, f'features:{tmp_path}/{{split}}.npz')
  assert source.vocabulary.names == ('old_cat', 'red_cat', 'sub')


def test_an_example_without_a_class_has_no_word():
  source = image_sources.Source(VALUES, [2, -1, 0], ('old_cat', 'red_dog', 'red_cat'))
  words = label_mapping.of_words(source, 'adjectives')
  np.testing.assert_array_equal(words.labels(), [1, -1, 0])


def test_a_label_beyond_the_pairs_stays_beyond_their_words():
  source = image_sources.Source(VALUES, [2, 3, 9], ('old_cat', 'red_dog', 'red_cat'))
  words = label_mapping.of_words(source, 'adjectives')
  assert words.labels()[0] == 1 and (words.labels()[1:] >= 2).all()
  builders.assert_refused('1 has label 2; expected 0 to 1', subset.complete_labels, words)


def test_features_of_other_widths_are_refused(tmp_path, config):
  _npz(tmp_path / 'x-train.npz')
  _npz(tmp_path / 'x-validation.npz', features=np.ones((3, 5)))
  line = f'{tmp_path}/x-validation.npz has 5 numbers per example, expected 2'
  opening.refused([line], config, f'features:{tmp_path}/x-{{split}}.npz')
  # Those of a run, in another order of its files.
  _npz(tmp_path / 'y.npz', features=np.ones((3, 5)))
  config.data.source = f'features:{tmp_path}/y.npz,{tmp_path}/x-train.npz'
  (tmp_path / 'config.json').write_text('{"data.widths": [2, 5]}')
  assert run_dir.with_sizes(config, str(tmp_path), 1).data.widths == (5, 2)  # nothing is saved yet
  (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
  builders.assert_refused(
    'has 5 and 2 numbers per example, expected 2 and 5',
    run_dir.with_sizes,
    config,
    str(tmp_path),
    1,
  )


def test_networks_of_images_do_not_read_features():
  line = "config.model.name='resnet50': expected linear where data are features"
  builders.assert_refused(line, builders.load, 'configs/features.py', {'model.name': 'resnet50'})


@pytest.mark.parametrize(
  'arrays, words',
  [
    ({'logits': VALUES}, "'features'"),
    ({'features': VALUES[:2]}, '(2, 2), expected (3, width)'),
    ({'features': VALUES[0]}, '(2,), expected (3, width)'),
    ({'features': VALUES * np.nan}, 'not finite'),
    ({'features': VALUES, 'names': ('x/1', 'x/1', 'x/2')}, 'names repeat'),
    ({'features': VALUES, 'names': ('x/1', '2.jpg', 'x/2')}, "'2.jpg' has no class"),
    ({'features': VALUES, 'names': ('x/1', 'x/3', '\x1b]x/2')}, 'has no class'),
    ({'features': VALUES, 'names': VALUES}, '[0.0, 1.0] is neither a text nor a number'),
    ({'features': np.array([None] * 3)}, 'pickle'),
  ],
)
def test_bad_files_are_refused_in_a_line(tmp_path, config, arrays, words):
  _npz(tmp_path / 'x.npz', **{'names': NAMES, **arrays})
  opening.refused([words], config, f'features:{tmp_path}/x.npz')


def test_missing_and_foreign_files_are_refused_in_a_line(tmp_path, config):
  _npz(tmp_path / 'x.npz')
  _npz(tmp_path / 'y.npz', ('b/1', *NAMES[1:]))
  (tmp_path / 'z.npz').write_bytes(b'PK')
  opening.refused(['gone.npz', 'No such file'], config, f'features:{tmp_path}/gone.npz')
  opening.refused(['x.csv', '.npz, .parquet, .safetensors'], config, f'features:{tmp_path}/x.csv')
  opening.refused(['z.npz'], config, f'features:{tmp_path}/z.npz')
  line = f'{tmp_path}/y.npz has features of other examples than {tmp_path}/x.npz'
  opening.refused([line], config, f'features:{tmp_path}/x.npz,{tmp_path}/y.npz')
