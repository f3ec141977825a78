"""Tests of list: CSV and Parquet lists of images."""

import numpy as np
import pyarrow as pa
import pytest

from tests import builders, listed_sets, opening, prepared


def _files(root):
  files = {f'x/{i}.jpg': prepared.photo(i) for i in range(6)}
  return builders.write_tree(root, files)


def _write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, newline='')
  return path


def _open(config, file, root='', training=True):
  return opening.source(config, f'list:{file}', root, training=training)


_SPLITS = """\
Path,label,split,author
x/0.jpg,old_dog,train,"a, b"
"x/1.jpg",old_cat,train,

x/2.jpg,old_dog,val,c
x/3.jpg,big_dog,train,c
"""


def test_rows_of_a_split(tmp_path, config):
  root = _files(tmp_path / 'photos')
  file = _write(root / 'list.csv', '\ufeff' + _SPLITS.replace('\n', '\r\n'))
  source = _open(config, file)
  assert source.kind == 'encoded' and source.vocabulary.is_anp
  assert source.vocabulary.names == ('big_dog', 'old_cat', 'old_dog')
  opening.assert_read(source, range(3), (0, 1, 3), [2, 1, 0])
  assert source.example_name(1) == f'{root}/x/1.jpg'
  assert _open(config, file, training=False).labels().tolist() == [2]
  # A list elsewhere, by config.data.path.
  file = _write(tmp_path / 'lists' / 'list.csv', _SPLITS)
  assert _open(config, file, root).read(np.array([2]))[0] == [prepared.photo(3)]


def test_parquet_and_two_columns_of_a_pair(tmp_path, config):
  root = _files(tmp_path)
  table = pa.table(
    {
      'noun': ['dog', 'cat', 'dog'],
      'width': [3.5, None, 1.0],
      'file': ['x/4.jpg', 'x/1.jpg', 'x/0.jpg'],
      'adjective': [b'old', b'old', b'big'],
      'image': [{'bytes': b'a picture'}] * 3,  # not a path: `file` comes first
      'split': ['train', 'train', 'test'],
    }
  )
  file = listed_sets.write_parquet(root / 'list.parquet', table)
  source = _open(config, file)
  assert source.vocabulary.names == ('big_dog', 'old_cat', 'old_dog')
  opening.assert_read(source, range(2), (4, 1), [2, 1])


@pytest.mark.parametrize(
  'labels, words',
  [([1.0, float('nan')], ':1: label is'), ([['x', 'y']] * 2, ":0: ['x', 'y'] is neither a text")],
)
def test_what_is_neither_text_nor_number_is_no_class(tmp_path, config, labels, words):
  table = pa.table({'path': ['x/0.jpg', 'x/1.jpg'], 'label': labels})
  file = listed_sets.write_parquet(_files(tmp_path) / 'list.parquet', table)
  opening.refused([f'{file}{words}'], config, f'list:{file}')


@pytest.mark.parametrize(
  'text, words',
  [
    ('', ['has the columns none']),
    ('path,label\n', ['has no rows']),
    ('path,lable\nx/0.jpg,a\n', ['path, lable', 'adjective and noun', "mean 'label'?"]),
    ('path,noun\nx/0.jpg,a\n', ['path, noun', 'adjective and noun']),
    ('path,label\nx/0.jpg,a\nx/1.jpg,\n', [':3: label is']),
    ('path,label\nx/0.jpg,a\nx/1.jpg\n', [':3: 1 columns, expected 2']),
    ('path,label\nx/0.jpg,a\nx/0.jpg,b\n', [':3:', 'already in', 'list.csv:2']),
    ('path,label,split\nx/0.jpg,a,train\n./x/0.jpg,a,val\n', [':3:', 'already in', 'list.csv:2']),
    ('path,label\nx/0.jpg,a\n"x/1.jpg,b\n', [':3: unexpected end']),
    ('path,label\ny/0.jpg,a\n', [':2: no file', 'config.data.path']),
    ('path,label,split\nx/0.jpg,a,trian\n', ["no split 'train'", "'trian'"]),
    ('path,label\nx/0.jpg,\xe9\n', []),
  ],
)
def test_a_bad_list_is_one_line(tmp_path, config, text, words):
  root = _files(tmp_path)
  file = root / 'list.csv'
  file.write_bytes(text.encode('latin-1'))
  opening.refused([file, *words], config, f'list:{file}')


def test_rows_of_a_split_that_is_mistyped_are_named(tmp_path, config, caplog):
  root = _files(tmp_path)
  text = _SPLITS.replace('old_cat,train', 'old_cat,trian').replace('val', 'test')
  assert _open(config, _write(root / 'list.csv', text)).labels().tolist() == [2, 0]
  place = f'{root}/list.csv:3'
  assert f"{place}: the split 'trian' is not read; did you mean 'train'?" in caplog.text
  assert "'test'" not in caplog.text
  _open(config, _write(root / 'list.csv', text.replace('split', 'splt')))
  assert "Path, label, splt, author, and no split; did you mean 'split'?" in caplog.text


def test_bad_files_are_one_line(tmp_path, config):
  opening.refused(['nowhere.csv'], config, f'list:{tmp_path}/nowhere.csv')
  opening.refused(['.csv or .parquet'], config, f'list:{tmp_path}/x.tsv')
  (tmp_path / 'x.parquet').write_bytes(b'PAR1')
  opening.refused(['x.parquet'], config, f'list:{tmp_path}/x.parquet')
  root = _files(tmp_path)
  config.data.lists = str(_write(tmp_path / 'anps.txt', 'a\nb\n'))
  file = _write(root / 'list.csv', 'path,label\nx/0.jpg,0\nx/1.jpg,2\n')
  opening.refused([f'{file}:3: class 2, expected 0 to 1'], config, f'list:{file}')
  config.data.lists, config.data.eval_split = '', 'test'
  builders.assert_refused('divided into train and', _open, config, file, training=False)
