"""Tests of what lists, tar shards and sets of Hugging Face share: examples and batches."""

import hashlib
import pathlib
import pickle

import numpy as np
import pytest

from anp_jax.data import sources
from anp_jax.data.sources import listings
from tests import builders, image_sources, listed_sets, opening, prepared

_KINDS = ('list', 'tar', 'hf')
_COUNT, _DAMAGED = 21, 5
_CLASSES = ('big_dog', 'old_cat', 'old_dog')
_LABELS = [_CLASSES[i * len(_CLASSES) // _COUNT] for i in range(_COUNT)]


def _photos():
  photos = [builders.encode_image(image_sources.pixels(40, 50, i), 'JPEG') for i in range(_COUNT)]
  photos[_DAMAGED] = photos[_DAMAGED][: len(photos[_DAMAGED]) // 2]
  return photos


def test_batches_are_those_of_a_tree(tmp_path, config, caplog):
  """Pixels, labels and weights, also where an image is damaged."""
  files = {
    f'train/{label}/{i:03}.jpg': data for i, (label, data) in enumerate(zip(_LABELS, _photos()))
  }
  tree = opening.source(config, 'folder', builders.write_tree(tmp_path / 't', files))
  expected = image_sources.batches(config, tree, 4)
  assert 1 <= sum(int((batch['weight'] == 0).sum()) for batch in expected) <= 4
  for kind in _KINDS:
    caplog.clear()
    place = listed_sets.write(tmp_path / kind, kind, _LABELS, photos=_photos())
    source = opening.source(config, place)
    assert source.vocabulary == tree.vocabulary
    assert sources.fingerprint(source) == sources.fingerprint(tree)
    for batch, other in zip(image_sources.batches(config, source, 4), expected, strict=True):
      for name in other:
        np.testing.assert_array_equal(batch[name], other[name], name)
    (line,) = [r.getMessage() for r in caplog.records if 'cannot be used' in r.getMessage()]
    assert source.example_name(_DAMAGED) in line


@pytest.mark.parametrize('kind', _KINDS)
def test_classes_are_held_out_and_cut(kind, tmp_path, config):
  config.data.pairs = 'yes'
  config.data.held_out = ('old_dog',)
  source = opening.source(config, listed_sets.write(tmp_path, kind, _LABELS))
  assert np.bincount(source.labels()).tolist() == [7, 7]
  config.data.held_out, config.data.imbalance = (), 7.0
  source = sources.open_source(config, training=True)
  # 7, and 7 over the root of 7, and 1.
  assert np.bincount(source.labels()).tolist() == [7, 2, 1]


@pytest.mark.parametrize('kind, key', [('list', '{:03}.jpg'), ('tar', '/{:03}'), ('hf', '{}')])
def test_a_set_without_splits_is_divided_by_names(tmp_path, config, kind, key):
  """The documented rule: SHA-256 of the path, the sample's name or the row's number."""
  source = listed_sets.write(tmp_path, kind, [i % 3 for i in range(30)], split='')
  digests = [hashlib.sha256(key.format(i).encode()).digest()[:8] for i in range(30)]
  is_training = [int.from_bytes(d, 'big') < 0.8 * 2**64 for d in digests]
  for training in (True, False):
    half = opening.source(config, source, training=training)
    rows = [i for i in range(30) if is_training[i] == training]
    opening.assert_read(half, range(len(half)), rows, [i % 3 for i in rows])
    assert half.vocabulary.names == ('class0', 'class1', 'class2')
  (tmp_path / 'classes.txt').write_text('c\nb\na\n')
  assert opening.source(config, source).vocabulary.names == ('c', 'b', 'a')
  config.data.eval_split = 'test'
  opening.refused('no split .test.*divided', config, source, training=False)


@pytest.mark.parametrize('kind', _KINDS)
def test_lists_select_examples(tmp_path, config, kind):
  source = listed_sets.write(tmp_path, kind, list('abcabc'))
  config.data.lists = str(tmp_path / 'lists.txt')
  (tmp_path / 'lists.txt').write_text('c\na\n')
  part = opening.source(config, source)
  assert part.labels().tolist() == [1, 0, 1, 0]
  assert part.read(np.array([1]))[0] == [prepared.photo(2)]
  (tmp_path / 'lists.txt').write_text('aa\n')
  opening.refused("class 'a' is none of the 1 listed.*mean 'aa'", config, source)


@pytest.mark.parametrize('kind', ['tar', 'hf'])
def test_names_that_look_like_numbers_in_one_split_are_names(tmp_path, config, kind):
  source = listed_sets.write(tmp_path, kind, ['1', '2', '1'])
  listed_sets.write(tmp_path, kind, ['2', 'cat'], split='val')
  train = opening.source(config, source)
  assert train.vocabulary.names == ('1', '2', 'cat')
  assert train.labels().tolist() == [0, 1, 0]


@pytest.mark.parametrize('kind', _KINDS)
def test_a_storage_reads_in_another_process(tmp_path, config, kind):
  config.data.source = listed_sets.write(tmp_path, kind, list('abcabc'))
  listing = listings.find(config.data, 'train', '', config.data.dir)
  part = pickle.loads(pickle.dumps(listing.storage.select(np.array([5, 2]))))
  assert [part.read(0), part.read(1)] == [prepared.photo(5), prepared.photo(2)]
  size, time = part.state(0)
  path = pathlib.Path(listing.paths()[5])
  if kind == 'list':
    assert (size, time) == (path.stat().st_size, path.stat().st_mtime_ns)
  if kind == 'tar':
    assert (size, time) == (len(prepared.photo(5)), path.parent.stat().st_mtime_ns)


@pytest.mark.parametrize('kind', ['tar', 'hf'])
def test_a_table_is_built_once_and_again_for_other_files(tmp_path, config, kind):
  source = listed_sets.write(tmp_path, kind, ['a', 'b'])
  first = opening.source(config, source)
  tables = [*pathlib.Path(config.data.dir).glob('**/*.arrow')]
  assert len(tables) == 1
  built = tables[0].stat().st_mtime_ns
  again = opening.source(config, source)
  assert tables[0].stat().st_mtime_ns == built
  assert again.labels().tolist() == first.labels().tolist()
  # As exact resume compares it.
  assert sources.fingerprint(again) == sources.fingerprint(first)
  listed_sets.write(tmp_path, kind, ['a', 'b', 'a'])
  assert len(opening.source(config, source)) == 3
  assert len([*pathlib.Path(config.data.dir).glob('**/*.arrow')]) == 2
  listed_sets.write(tmp_path, kind, ['a'])
  config.data.dir = str(tables[0])  # no folder
  opening.refused('cannot be written.*config.data.dir', config, source)
