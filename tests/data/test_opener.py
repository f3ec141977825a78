"""Tests of the one opener: what may stand where a set has an image file."""

import os

import numpy as np
import pyarrow as pa
import pytest

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.sources import stored_images
from anp_jax.predict import file_batches as predict_files
from tests import builders, image_sources, listed_sets, opening, prepared

pytestmark = pytest.mark.timeout(60)  # a pipe would be waited for without end


@pytest.fixture(name='pipe')
def _pipe(tmp_path):
  path = tmp_path / 'pipe.jpg'
  os.mkfifo(path)
  return str(path)


def _huge(tmp_path):
  path = tmp_path / 'huge.jpg'
  with open(path, 'wb') as file:
    file.truncate(2**31)
  return str(path)


@pytest.mark.parametrize('kind', ['pipe', 'device', 'folder', 'huge'])
def test_only_regular_files_of_some_size_are_read(tmp_path, pipe, kind):
  path = {'pipe': pipe, 'device': '/dev/zero', 'folder': str(tmp_path), 'huge': _huge(tmp_path)}[
    kind
  ]
  with pytest.raises(stored_images.UnusableError):
    stored_images.read_file(path)
  with pytest.raises(stored_images.UnusableError):
    stored_images.DiskFiles('', [path]).read(0)
  paths = [(path, '')]
  (batch,) = predict_files.batches(paths, lambda data: data, 1, 8, 1)
  assert batch.files == [] and len(batch.unreadable) == 1


def test_a_pipe_in_a_class_folder_is_damage(tmp_path, config, caplog):
  tree = {f'train/{c}/{i}.jpg': prepared.photo(i) for c in ('a', 'b') for i in (0, 1)}
  root = builders.write_tree(tmp_path / 'tree', tree)
  os.mkfifo(root / 'train' / 'a' / '2.jpg')
  source = opening.source(config, 'folder', root)
  batch = image_sources.evaluated(config, source)
  assert batch['weight'].tolist() == [1, 1, 0, 1, 1]
  assert 'a/2.jpg cannot be used' in caplog.text


@pytest.fixture(name='outside')
def _outside(tmp_path):
  """A set, in a folder that has a photograph of its own."""
  root = builders.write_tree(
    tmp_path, {'secret.jpg': prepared.photo(9), 'set/x/0.jpg': prepared.photo(0)}
  )
  return root / 'set'


@pytest.mark.parametrize('name', ['../secret.jpg', 'x/../../secret.jpg', '/'])
@pytest.mark.parametrize('kind', ['list', 'split'])
def test_a_list_stays_in_its_folder(outside, config, kind, name):
  name = str(outside.parent / 'secret.jpg') if name == '/' else name
  if kind == 'list':
    (outside / 'list.csv').write_text(f'path,label\nx/0.jpg,0\n{name},1\n')
    config.data.source, split = f'list:{outside}/list.csv', 'train'
    line = 'list.csv:3: '
  else:
    (outside / 'all.txt').write_text(f'x/0.jpg 0\n{name} 1\n')
    config.data.source, split = 'folder', 'all.txt'
    config.data.path, line = str(outside), 'all.txt:2: '
  with pytest.raises(config_lib.ConfigError) as e:
    sources.open_split(config, split, split)
    # A hash of its path may have put the file into the other part of the list.
    sources.open_split(config, 'validation', 'train')
  assert line in str(e.value) and 'outside' in str(e.value)


def test_an_absolute_path_into_the_folder_is_read(outside, config):
  file = outside / 'x' / '0.jpg'
  (outside / 'all.csv').write_text(f'path,label,split\n{file},0,train\n')
  source = opening.source(config, f'list:{outside}/all.csv')
  assert source.read(np.arange(1))[0] == [file.read_bytes()]


def test_a_link_of_a_list_stays_in_its_folder(outside, config):
  """Unless the folder itself is reached by the link."""
  (outside / 'x' / '1.jpg').symlink_to(outside.parent / 'secret.jpg')
  (outside / 'x' / '2.jpg').symlink_to('0.jpg')
  rows = ''.join(f'x/{i}.jpg,0,train\n' for i in range(3))
  (outside / 'all.csv').write_text(f'path,label,split\n{rows}')
  link = outside.parent / 'link'
  link.symlink_to(outside)
  source = opening.source(config, f'list:{link}/all.csv')
  assert source.read(np.array([0, 2]))[0] == [prepared.photo(0), prepared.photo(0)]
  with pytest.raises(stored_images.UnusableError, match='outside'):
    source.read(np.array([1]))


@pytest.mark.parametrize('path', ['/dev/zero', '/etc/hostname', '../secret.jpg', 'x/0.jpg'])
def test_a_table_of_hugging_face_names_files_of_its_own(outside, config, path):
  table = pa.table({'image': [{'bytes': None, 'path': path}], 'label': ['cat']})
  listed_sets.write_parquet(outside / 'train.parquet', table)
  source = opening.source(config, f'hf:{outside}')
  if path == 'x/0.jpg':
    assert source.read(np.arange(1))[0] == [prepared.photo(0)]
  else:
    with pytest.raises(stored_images.UnusableError):
      source.read(np.arange(1))
