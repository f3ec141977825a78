"""Tests of sources: every kind of data set, whole and broken."""

import hashlib
import os
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from anp_jax.data import sources
from anp_jax.data.sources import image_folder
from tests import builders, opening, showing


def _tree(root, files):
  builders.write_tree(root, {file: file.encode() for file in files})


# Trees of image files.


def test_classes_are_pairs_where_the_config_says_so(tmp_path, config):
  for split in ('train', 'validation'):
    _tree(tmp_path / split, ['big_cat/x.png', 'old_dog/x.png'])
  assert not opening.source(config, 'folder', tmp_path).vocabulary.is_anp
  config.data.pairs = 'yes'
  for training in (True, False):
    vocabulary = sources.open_source(config, training).vocabulary
    assert vocabulary.adjectives == ('big', 'old') and vocabulary.nouns == ('cat', 'dog')
  config.data.held_out = ('old_dog',)
  opening.refused(["'old_dog'", 'adjective'], config, 'folder', tmp_path)
  config.data.held_out = ()
  # Of folders whose parts recur.
  _tree(tmp_path, ['train/old_cat/c.jpg'])
  config.data.pairs = 'no'
  assert not opening.source(config, 'folder', tmp_path).vocabulary.is_anp
  config.data.pairs = 'auto'
  assert opening.source(config, 'folder', tmp_path).vocabulary.is_anp


def _names(config, root, split):
  source = opening.source(config, 'folder', root, split)
  return {image.decode() for image in source.read(np.arange(len(source)))[0]}


def test_a_tree_without_splits_is_divided_by_the_hash_of_each_path(tmp_path, config):
  """So files that are added later move no other one."""
  files = [f'{c}/{i}.jpg' for c in 'ab' for i in range(100)]
  training = {f for f in files if hashlib.sha256(f.encode()).digest() < _FOUR_FIFTHS}
  for count in (150, 200):
    _tree(tmp_path, files[:count])
    assert _names(config, tmp_path, 'train') == training & set(files[:count])
    assert _names(config, tmp_path, 'validation') == set(files[:count]) - training
    assert _names(config, tmp_path, '.') == set(files[:count])


@pytest.mark.parametrize(
  'train, evaluation, count',
  [('.', 'validation', 1), ('train', '.', 1), ('train', 'train', 1), ('train', 'validation', 0)],
)
def test_splits_that_share_examples_are_named_once(
  tmp_path, config, caplog, train, evaluation, count
):
  image_folder.warn_once.cache_clear()
  _tree(tmp_path, [f'{c}/{i}.jpg' for c in 'ab' for i in range(50)])
  config.data.eval_split = evaluation
  for _ in range(2):
    opening.source(config, 'folder', tmp_path, train)
    sources.open_source(config, training=False)
  text = f'config.data.train_split={train!r} and eval_split={evaluation!r} share examples'
  assert caplog.text.count(text) == count


_FOUR_FIFTHS = int(0.8 * 2**64).to_bytes(8, 'big')


# TensorFlow Datasets.


class TinyPairs(tfds.core.GeneratorBasedBuilder):
  """Pictures of one value each; two shards of training examples."""

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'For tests.'}
  url_infos = None  # nothing is downloaded

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {
          'image': tfds.features.Image(encoding_format='png'),
          'coarse': tfds.features.ClassLabel(num_classes=2),
          'label': tfds.features.ClassLabel(names=['tall_tree', 'red_car', 'old_dog']),
        }
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {s: self._generate_examples(n) for s, n in _COUNTS.items()}

  def _generate_examples(self, count):
    for i in range(count):
      image = np.full((3 + i % 4, 5, 3), i, np.uint8)
      yield i, {'image': image, 'label': i % 3, 'coarse': i % 2}


_COUNTS = {'train': 17, 'validation': 5}


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """The folder of data sets of each file format."""
  tfds.disable_progress_bar()
  result = {}
  for stored in ('tfrecord', 'array_record'):
    result[stored] = tmp_path_factory.mktemp(stored)
    TinyPairs(data_dir=result[stored], file_format=stored).download_and_prepare(
      download_config=tfds.download.DownloadConfig(num_shards=2)
    )
  return result


@pytest.fixture(params=['tfrecord', 'array_record'])
def stored(request, prepared, config):
  config.data.dir = str(prepared[request.param])
  return request.param


def _tfds_reads(stored, directory, split):
  """What tfds itself reads, in order: PNG files and labels."""
  builder = tfds.builder_from_directory(os.path.join(directory, 'tiny_pairs', '1.0.0'))
  skip = {'image': tfds.decode.SkipDecoding()}
  if stored == 'array_record':
    return list(builder.as_data_source(split, decoders=skip))
  data = builder.as_dataset(
    split, decoders=skip, read_config=tfds.ReadConfig(interleave_cycle_length=1)
  )
  return list(tfds.as_numpy(data))


def test_tfds_random_access_is_its_own_order(stored, config):
  for split, count in _COUNTS.items():
    source = opening.source(config, 'tfds:tiny_pairs:1.0.0', split=split)
    assert source.kind == 'encoded' and len(source) == count
    assert source.vocabulary.names == ('tall_tree', 'red_car', 'old_dog')
    expected = _tfds_reads(stored, config.data.dir, split)
    order = np.random.default_rng(0).permutation(count)
    order = np.append(order, order[:3])
    images, labels = source.read(order)
    assert labels.dtype == np.int32
    assert labels.tolist() == [expected[i]['label'] for i in order]
    assert all(type(image) is bytes for image in images)
    assert images == [expected[i]['image'] for i in order]
  assert len(set(images)) == 5  # there is something to mistake


def test_tfds_set_that_is_missing(stored, config, tmp_path):
  directory = config.data.dir
  opening.refused(
    [directory, "'tiny_pair'", "mean 'tiny_pairs'", 'tfds build'], config, 'tfds:tiny_pair'
  )
  opening.refused([directory, 'tiny_pairs:2.0.0'], config, 'tfds:tiny_pairs:2.0.0')
  opening.refused(
    ['tiny_pairs/1.0.0', "'test'", 'train, validation'], config, 'tfds:tiny_pairs', split='test'
  )
  config.data.dir = str(tmp_path / 'no where')
  opening.refused(
    [config.data.dir, f"tfds build tiny_pairs --data_dir='{tmp_path}"], config, 'tfds:tiny_pairs'
  )
  (tmp_path / 'no where' / 'anp_folder' / 'photos').mkdir(parents=True)
  opening.refused(
    ['anp_jax.data.prepare --from=FOLDER --name=photo --data_dir=', "mean 'photos'"],
    config,
    'tfds:anp_folder/photo',
  )


@pytest.mark.parametrize('damage', ['record', 'byte', 'gone'])
def test_tfds_shard_that_is_damaged(stored, config, tmp_path, damage):
  copy = tmp_path / 'tiny_pairs' / '1.0.0'
  copy.mkdir(parents=True)
  for path in pathlib.Path(config.data.dir, 'tiny_pairs/1.0.0').iterdir():
    (copy / path.name).write_bytes(path.read_bytes())
  shard = copy / f'tiny_pairs-train.{stored}-00001-of-00002'
  data = shard.read_bytes()
  keep = {'byte': len(data) - 1}
  # Bytes of the first TFRecord with its frame: what is left is well formed.
  keep['record'] = min(16 + int.from_bytes(data[:8], 'little'), len(data) // 3)
  shard.write_bytes(data[: keep.get(damage)])
  if damage == 'gone':
    shard.unlink()
  config.data.dir = str(tmp_path)
  opening.refused([shard], config, 'tfds:tiny_pairs')
  assert len(opening.source(config, 'tfds:tiny_pairs', split='validation')) == 5


# Random images, and what all kinds share.


def test_fingerprint_tells_sets_apart(tmp_path, config):
  labels = [0, 2, 1, 1, 0, 2, 11]
  showing.save_arrays(tmp_path / 'set.npz', labels)
  showing.save_arrays(tmp_path / 'named.npz', labels, names=[f'm{i}' for i in range(12)])
  first, other = (
    sources.fingerprint(opening.source(config, 'arrays', tmp_path / f'{name}.npz'))
    for name in ('set', 'named')
  )
  assert first['examples'] == 7 and first['classes'] == 12
  assert {k for k in first if first[k] != other[k]} == {'names'}


def test_fingerprint_tells_classes_of_files_apart(tmp_path, config):
  def fingerprint(name, *files):
    tree = builders.write_tree(tmp_path / name, {f'train/{file}.png': b'' for file in files})
    return sources.fingerprint(opening.source(config, 'folder', tree))

  first, moved = (
    fingerprint('first', 'a/1', 'b/2', 'b/3'),
    fingerprint('moved', 'a/1', 'a/2', 'b/3'),
  )
  assert {k for k in first if first[k] != moved[k]} == {'labels'}
