"""Tests of hf: sets of Hugging Face's `datasets` on disk."""

import os
import pathlib
import sys

import numpy as np
import pyarrow as pa
import pytest

from tests import builders, listed_sets, opening, prepared


def _set(numbers):
  labels = [i % 2 for i in numbers]
  return listed_sets.hf_set({'image': listed_sets.photos(numbers), 'label': labels})


def _open(config, path, training=True):
  return opening.source(config, f'hf:{path}', training=training)


def _refused(words, config, path):
  opening.refused(words, config, f'hf:{path}')


def _save(form, folder, digest=''):
  parts = {'train': _set(range(7)), 'test': _set(range(7, 10))}
  if form == 'arrow':
    return listed_sets.save_to_disk(folder, parts)
  for split, part in parts.items():
    for i in range(2):
      shard = part.shard(2, i, contiguous=True)
      shard.to_parquet(folder / f'data/{split}-{i:05}-of-00002{digest}.parquet')
  return folder


@pytest.mark.parametrize(
  'form, digest', [('arrow', ''), ('parquet', ''), ('parquet', '-a09b74b3ef9c3b56')]
)
def test_splits_by_index(form, digest, tmp_path, config):
  folder = _save(form, tmp_path / 'set', digest)
  source = _open(config, folder)
  assert source.kind == 'encoded'
  assert source.vocabulary.names == ('cat', 'dog')
  order = [6, 0, 5, 1, 2, 4, 3, 6]
  opening.assert_read(source, order, order, [i % 2 for i in order])
  assert source.example_name(3) == f'{folder}/train/3-3.jpg'
  assert source.listing()[-2:] == ('5-5.jpg', '6-6.jpg')
  config.data.eval_split = 'testing'
  assert _open(config, folder, training=False).labels().tolist() == [1, 0, 1]
  # The pixels are mapped, or copied once.
  copies = pathlib.Path(config.data.dir).glob('**/*.arrow')
  assert len([*copies]) == 2 * (form == 'parquet')


@pytest.mark.parametrize(
  'columns, label_names, names, labels',
  [
    (
      {'adjective': ['old', 'big', 'old'], 'noun': ['dog', 'dog', 'cat']},
      {},
      ('big_dog', 'old_cat', 'old_dog'),
      [2, 0, 1],
    ),
    (
      {'adjective': [1, 0, 1], 'noun': ['dog', 'dog', 'cat']},
      {'adjective': ['big', 'old']},
      ('big_dog', 'old_cat', 'old_dog'),
      [2, 0, 1],
    ),
    # Digits that are names, in another order.
    ({'kind': [0, 1, 0], 'id': [7, 8, 9]}, {'kind': ['3', '0']}, ('3', '0'), [0, 1, 0]),
    ({'label': [0, -1, None]}, {'label': ['cat', 'dog']}, ('cat', 'dog'), [0, -1, -1]),
  ],
)
def test_columns_of_the_class(tmp_path, config, columns, label_names, names, labels):
  columns = {'mask': [b'', b'', b''], 'picture': listed_sets.photos(range(3)), **columns}
  kinds = {'picture': 'Image', **dict.fromkeys(label_names, 'ClassLabel')}
  part = listed_sets.hf_set(columns, next(iter(label_names.values()), ()), kinds)
  listed_sets.save_to_disk(tmp_path / 'set', {'train': part})
  source = _open(config, tmp_path / 'set')
  assert (source.vocabulary.names, source.labels().tolist()) == (names, labels)


def test_plain_bytes_and_images_outside_of_the_files(tmp_path, config):
  table = pa.table({'image': [prepared.photo(0), prepared.photo(1)], 'label': ['a', 'b']})
  listed_sets.write_parquet(tmp_path / 'plain' / 'train.parquet', table)
  images, _ = _open(config, tmp_path / 'plain').read(np.arange(2))
  assert images == [prepared.photo(0), prepared.photo(1)]
  images = [{'bytes': None, 'path': 'x.jpg'}, {'bytes': None, 'path': None}]
  table = pa.table({'image': images, 'label': [0, 1]})
  listed_sets.write_parquet(tmp_path / 'set' / 'train.parquet', table)
  (tmp_path / 'set' / 'x.jpg').write_bytes(prepared.photo(5))
  source = _open(config, tmp_path / 'set')
  assert source.read(np.array([0]))[0] == [prepared.photo(5)]
  with pytest.raises(Exception, match='no image in the row'):
    source.read(np.array([1]))


# Bad input.


def test_unknown_splits(tmp_path, config):
  folder = _save('arrow', tmp_path / 'set')
  config.data.eval_split = 'tets'
  builders.assert_refused("train, test.*mean 'test'", _open, config, folder, training=False)
  listed_sets.save_to_disk(tmp_path / 'one', {'train': _set(range(3))})
  config.data.eval_split = 'validation'
  builders.assert_refused(
    'hf:.*one/train to have.*divided', _open, config, tmp_path / 'one', training=False
  )
  for name in ('a', 'b'):
    _set(range(2)).to_parquet(tmp_path / 'two' / name / 'train.parquet')
  _refused(["split 'train' in", '/two/a and', 'one of these'], config, tmp_path / 'two')


@pytest.mark.parametrize(
  'columns, words',
  [
    ({'image': [0, 1], 'label': [0, 1]}, ['image (int64), label (ClassLabel)']),
    ({'image': 'photos', 'title': ['a', 'b']}, ['title (string)', 'adjective']),
    ({'image': 'photos', 'label': [0.5, 1.5]}, ['class 0.5, expected whole numbers']),
    ({'image': 'photos', 'label': [0, 2]}, ['class 2, expected 0 to 1']),
    ({'image': 'photos', 'label': [0, -5]}, ['class -5, expected 0 to 1']),
  ],
)
def test_bad_columns_are_one_line(tmp_path, config, columns, words):
  columns = {
    name: listed_sets.photos(range(2)) if value == 'photos' else value
    for name, value in columns.items()
  }
  is_number = isinstance(columns.get('label', [''])[0], int)
  kinds = {'label': 'ClassLabel'} if is_number else {}
  part = listed_sets.hf_set(columns, kinds=kinds)
  listed_sets.save_to_disk(tmp_path / 'set', {'train': part})
  _refused([tmp_path / 'set', *words], config, tmp_path / 'set')
  listed_sets.save_to_disk(tmp_path / 'two', {'train': _set(range(2)), 'validation': part})
  _refused([tmp_path / 'two', *words], config, tmp_path / 'two')


def test_bad_files_are_one_line(tmp_path, config):
  _refused(['nowhere', 'save_to_disk'], config, tmp_path / 'nowhere')
  (tmp_path / 'empty').mkdir()
  _refused(['empty', 'nor Parquet files'], config, tmp_path / 'empty')
  arrow = _save('arrow', tmp_path / 'arrow') / 'train'
  path = arrow / 'data-00001-of-00002.arrow'
  os.truncate(path, 300)
  _refused([path, 'Arrow file'], config, tmp_path / 'arrow')
  path.unlink()
  _refused([path, 'No such file'], config, tmp_path / 'arrow')
  (arrow / 'state.json').write_text('{}')
  _refused([tmp_path / 'arrow', 'save_to_disk'], config, tmp_path / 'arrow')
  parquet = _save('parquet', tmp_path / 'parquet') / 'data'
  path = parquet / 'train-00001-of-00002.parquet'
  os.truncate(path, 100)
  _refused([path, 'Parquet file'], config, tmp_path / 'parquet')
  listed_sets.write_parquet(path, pa.table({'x': [1]}))
  _refused([path, 'other columns'], config, tmp_path / 'parquet')


def test_the_package_that_reads_them_is_named(tmp_path, config, monkeypatch):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  _refused(['package datasets', "'.[hf]'"], config, tmp_path / 'set')
