"""Tests of hf: sets of Hugging Face's `datasets` on disk."""

import os
import pathlib

import numpy as np
import pyarrow as pa
import pytest

from anp_jax import config as config_lib
from anp_jax.data.sources import table_cache
from tests import listed_sets, opening, prepared

_FEATURES = {'image': listed_sets.IMAGE, 'label': listed_sets.CLASS_LABEL}


def _table(numbers, labels=None):
  labels = [i % 2 for i in numbers] if labels is None else labels
  columns = {'image': listed_sets.photos(numbers), 'label': labels}
  return listed_sets.hf_table(columns, _FEATURES)


def _open(config, path, training=True):
  return opening.source(config, f'hf:{path}', training=training)


def _refused(words, config, path):
  opening.refused(words, config, f'hf:{path}')


def _save(form, folder):
  tables = {'train': _table(range(7)), 'test': _table(range(7, 10))}
  if form == 'arrow':
    return listed_sets.save_to_disk(folder, tables)
  for split, table in tables.items():
    for i in range(2):
      part = table.slice(i * 4, 4)
      name = f'data/{split}-{i:05}-of-00002.parquet'
      listed_sets.write_parquet(folder / name, part)
  return folder


@pytest.mark.parametrize('form', ['arrow', 'parquet'])
def test_splits_by_index(form, tmp_path, config):
  folder = _save(form, tmp_path / 'set')
  source = _open(config, folder)
  assert source.kind == 'encoded'
  assert source.vocabulary.names == ('cat', 'dog')
  order = np.array([6, 0, 5, 1, 2, 4, 3, 6])
  images, labels = source.read(order)
  assert images == [prepared.photo(i) for i in order]
  assert labels.tolist() == [i % 2 for i in order] and labels.dtype == np.int32
  assert source.example_name(3) == f'{folder}/train/3-3.jpg'
  assert source.listing()[-2:] == ('5-5.jpg', '6-6.jpg')
  config.data.eval_split = 'testing'
  assert _open(config, folder, training=False).labels().tolist() == [1, 0, 1]
  # The pixels are mapped, or copied once.
  copies = pathlib.Path(config.data.dir, table_cache.FOLDER).glob('*.arrow')
  assert len([*copies]) == 2 * (form == 'parquet')


@pytest.mark.parametrize(
  'columns, features, names, labels',
  [
    (
      {'adjective': ['old', 'big', 'old'], 'noun': ['dog', 'dog', 'cat']},
      None,
      ('big_dog', 'old_cat', 'old_dog'),
      [2, 0, 1],
    ),
    (
      {'adjective': [1, 0, 1], 'noun': ['dog', 'dog', 'cat']},
      {'adjective': {'_type': 'ClassLabel', 'names': ['big', 'old']}},
      ('big_dog', 'old_cat', 'old_dog'),
      [2, 0, 1],
    ),
    # Digits that are names, in another order.
    (
      {'kind': [0, 1, 0], 'id': [7, 8, 9]},
      {'kind': {'_type': 'ClassLabel', 'names': ['3', '0']}},
      ('3', '0'),
      [0, 1, 0],
    ),
    ({'label': [0, -1, None]}, _FEATURES, ('cat', 'dog'), [0, -1, -1]),
  ],
)
def test_columns_of_the_class(tmp_path, config, columns, features, names, labels):
  table = {'picture': listed_sets.photos(range(3)), **columns}
  table = listed_sets.hf_table(table, features)
  listed_sets.save_to_disk(tmp_path / 'set', {'train': table})
  source = _open(config, tmp_path / 'set')
  assert (source.vocabulary.names, source.labels().tolist()) == (names, labels)


def test_plain_bytes_and_images_outside_of_the_files(tmp_path, config):
  table = pa.table({'image': [prepared.photo(0), prepared.photo(1)], 'label': ['a', 'b']})
  listed_sets.write_parquet(tmp_path / 'plain' / 'train.parquet', table)
  images, _ = _open(config, tmp_path / 'plain').read(np.arange(2))
  assert images == [prepared.photo(0), prepared.photo(1)]
  images = [{'bytes': None, 'path': 'x.jpg'}, {'bytes': None, 'path': None}]
  table = listed_sets.hf_table({'image': images, 'label': [0, 1]}, _FEATURES)
  folder = listed_sets.save_to_disk(tmp_path / 'set', {'train': table})
  (folder / 'train' / 'x.jpg').write_bytes(prepared.photo(5))
  source = _open(config, folder)
  assert source.read(np.array([0]))[0] == [prepared.photo(5)]
  with pytest.raises(Exception, match='no image in the row'):
    source.read(np.array([1]))


# Bad input.


def test_unknown_splits(tmp_path, config):
  folder = _save('arrow', tmp_path / 'set')
  config.data.eval_split = 'tets'
  with pytest.raises(config_lib.ConfigError, match="train, test.*mean 'test'"):
    _open(config, folder, training=False)
  listed_sets.save_to_disk(tmp_path / 'one', {'train': _table(range(3))})
  config.data.eval_split = 'validation'
  with pytest.raises(config_lib.ConfigError, match='hf:.*one/train to have.*divided'):
    _open(config, tmp_path / 'one', training=False)
  for name in ('a', 'b'):
    listed_sets.write_parquet(tmp_path / 'two' / name / 'train.parquet', _table(range(2)))
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
  features = {k: v for k, v in _FEATURES.items() if k in columns}
  if isinstance(columns['image'][0], int):
    del features['image']
  table = listed_sets.hf_table(columns, features)
  listed_sets.save_to_disk(tmp_path / 'set', {'train': table}, rows=1)
  _refused([tmp_path / 'set', *words], config, tmp_path / 'set')


def test_bad_files_are_one_line(tmp_path, config):
  _refused(['nowhere', 'save_to_disk'], config, tmp_path / 'nowhere')
  (tmp_path / 'empty').mkdir()
  _refused(['empty', 'nor Parquet files'], config, tmp_path / 'empty')
  arrow = _save('arrow', tmp_path / 'arrow') / 'train'
  path = arrow / 'data-00001-of-00002.arrow'
  content = path.read_bytes()
  path.write_bytes(content[:300])
  _refused([path, 'Arrow file'], config, tmp_path / 'arrow')
  path.unlink()
  _refused([path, 'Arrow file'], config, tmp_path / 'arrow')
  (arrow / 'state.json').write_text('{}')
  _refused([arrow / 'state.json', 'lists no files'], config, tmp_path / 'arrow')
  parquet = _save('parquet', tmp_path / 'parquet') / 'data'
  path = parquet / 'train-00001-of-00002.parquet'
  os.truncate(path, 100)
  _refused([path, 'Parquet file'], config, tmp_path / 'parquet')
  listed_sets.write_parquet(path, pa.table({'x': [1]}))
  _refused([path, 'other columns'], config, tmp_path / 'parquet')
