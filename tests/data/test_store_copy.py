"""Tests of store_copy: data sets in object stores, and runs on them."""

import os
import shutil
from unittest import mock

import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.sources import store_copy
from anp_jax.system import remote
from tests import builders, gcs_server, launching, s3_server

_BUCKET = f'gs://{gcs_server.BUCKET}'


@pytest.fixture
def root(tmp_path, monkeypatch):
  """The folder of data sets."""
  monkeypatch.setenv('ANP_DATA', str(tmp_path / 'sets'))
  return tmp_path / 'sets'


@pytest.fixture
def s3(monkeypatch):
  """A stand-in for S3 that s3fs finds."""
  s3fs = pytest.importorskip('s3fs', reason="needs s3fs: pip install '.[s3]'")
  with s3_server.Server() as server:
    for name, value in server.environment.items():
      monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
  s3fs.S3FileSystem.clear_instance_cache()


def _tree():
  """A folder of two classes, by path."""
  return {
    f'{split}/{name}/{i}.png': builders.encode_image(
      builders.random_pixels(8, 8, seed=10 * i + len(split + name))
    )
    for split, count in (('train', 3), ('validation', 1))
    for name in ('cat', 'tiger')
    for i in range(count)
  }


def _put(store, prefix, files):
  for name in [n for n in store.objects if n.startswith(prefix + '/')]:
    store.remove(name)
  for name, content in files.items():
    store.put(f'{prefix}/{name}', content)


def _copy(config):
  return store_copy.path('config.data.path', config.data.path, config)


def _config(source, **keys):
  return builders.config({'data.source': source} | {f'data.{k}': v for k, v in keys.items()})


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_folder_in_a_store_is_that_folder(scheme, request, root, tmp_path, capsys):
  store = request.getfixturevalue({'gs': 'gcs'}.get(scheme, scheme))
  _put(store, 'photos', _tree())
  builders.write_tree(tmp_path / 'photos', _tree())
  config = _config('folder', path=f'{scheme}://bucket/photos/')
  source = sources.open_source(config, training=True)
  local = _config('folder', path=str(tmp_path / 'photos'))
  expected = sources.open_source(local, training=True)
  assert source.vocabulary == expected.vocabulary
  assert sources.fingerprint(source) == sources.fingerprint(expected)
  everything = np.arange(len(expected))
  images, labels = source.read(everything)
  assert images == expected.read(everything)[0]
  np.testing.assert_array_equal(labels, expected.labels())
  size = sum(map(len, _tree().values())) / 1e6
  folder = root / 'remote' / scheme / 'bucket' / 'photos'
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f'copying {scheme}://bucket/photos to {folder}, {size:.1f} MB: 8/8 files')
  sources.open_source(config, training=False)
  assert not capsys.readouterr().err  # the other split is there


def test_only_what_changed_is_copied_again(gcs, root, capsys):
  tree = _tree()
  _put(gcs, 'changing', tree)
  config = _config('folder', path=f'{_BUCKET}/changing')
  folder = root / 'remote/gs/bucket/changing'

  def copy():
    _copy(config)
    return builders.read_tree(folder), capsys.readouterr().err

  assert copy()[0] == tree
  # Of the same size, as a label that was corrected may be.
  name = 'train/cat/0.png'
  gcs.put(f'changing/{name}', tree[name][::-1])
  gcs.remove('changing/train/cat/1.png')
  os.remove(folder / 'train/cat/2.png')
  (folder / 'train/tiger/0.png').write_bytes(b'cut')
  drafts = [builders.leave_draft(path) for path in (folder, folder / 'train/cat/1.png')]
  (folder / 'train/tiger/9.png').write_bytes(b'gone from the store since it was copied')
  del tree['train/cat/1.png']
  copied, text = copy()
  assert copied == tree | {name: tree[name][::-1]} and not drafts[0].exists()
  assert ': 3/3 files, ' in text


def test_what_did_not_arrive_is_copied_by_the_next_start(gcs, root, monkeypatch):
  """The older file has the size of the new one."""
  tree, name = _tree(), 'train/cat/0.png'
  _put(gcs, 'torn', tree)
  config = _config('folder', path=f'{_BUCKET}/torn')
  _copy(config)
  gcs.put(f'torn/{name}', tree[name][::-1])
  error = config_lib.ConfigError('no answer')
  with monkeypatch.context() as patch:
    patch.setattr(store_copy, '_copy_file', mock.Mock(side_effect=error))
    builders.assert_refused('no answer', _copy, config)
  _copy(config)
  assert (root / 'remote/gs/bucket/torn' / name).read_bytes() == tree[name][::-1]


_KILLED = """
import os
from anp_jax.data.sources import store_copy
from anp_jax.system import files
from tests import builders

append = files.append_json_line
files.append_json_line = lambda *line: append(*line) or os._exit(9)  # once one has arrived
store_copy.path('config.data.path', 'gs://bucket/killed', builders.config())
"""


def test_copy_that_was_killed_goes_on(gcs, root, capsys):
  _put(gcs, 'killed', _tree())
  result = launching.python('-c', _KILLED)
  assert result.returncode == 9, result.stderr
  store_copy.path('config.data.path', f'{_BUCKET}/killed', builders.config())
  # Drafts may be left.
  assert _tree().items() <= builders.read_tree(root / 'remote/gs/bucket/killed').items()
  assert f': {len(_tree()) - 1}/{len(_tree()) - 1} files, ' in capsys.readouterr().err


def test_arrays_and_a_prepared_set_in_a_store(gcs, root, tmp_path):
  pixels = np.stack([builders.random_pixels(8, 8, seed) for seed in range(4)])
  np.savez(tmp_path / 'set.npz', train_images=pixels, train_labels=np.array([0, 1] * 2))
  gcs.put('set.npz', (tmp_path / 'set.npz').read_bytes())
  config = _config('arrays', path=f'{_BUCKET}/set.npz')
  images, labels = sources.open_split(config, 'train', 'train').read(np.array([2, 1]))
  np.testing.assert_array_equal(images, pixels[[2, 1]])
  assert labels.tolist() == [0, 1]

  from tests import prepared

  photos = builders.write_tree(tmp_path / 'photos', _tree())
  local = tmp_path / 'prepared'
  prepared.prepare.main(
    ['prepare', f'--from={photos}', '--name=small', f'--data_dir={local}', '--workers=1']
  )
  for path in (local / 'anp_folder').rglob('*'):
    if path.is_file():
      gcs.put(f'sets/{path.relative_to(local)}', path.read_bytes())
  gcs.put('sets/another/large', b'x')
  read = {}
  for directory in (str(local), f'{_BUCKET}/sets'):
    config = _config('tfds:anp_folder/small', dir=directory)
    source = sources.open_source(config, training=True)
    read[directory] = source.read(np.arange(len(source)))[0]
  assert read[str(local)] == read[f'{_BUCKET}/sets']
  assert len(read[str(local)]) == 6
  assert os.listdir(root / 'remote/gs/bucket/sets') == ['anp_folder']


@pytest.mark.parametrize(
  'keys, words',
  [
    (
      {'source': 'folder', 'path': f'{_BUCKET}/nothing'},
      ['config.data.path: there is nothing at gs://bucket/nothing'],
    ),
    ({'source': 'folder', 'path': 'gs://no-bucket/x'}, ['gs://no-bucket/x cannot be read']),
    (
      {'source': 'tfds:mnst', 'dir': f'{_BUCKET}/none'},
      ['config.data.dir: there is nothing at gs://bucket/none/mnst'],
    ),
    (
      {'source': 'anp_shapes', 'dir': f'{_BUCKET}/none'},
      ["config.data.dir='gs://bucket/none': expected a path of this machine"],
    ),
  ],
)
def test_what_cannot_be_copied_is_one_line(gcs, root, keys, words):
  builders.assert_refused(words, sources.open_source, _config(**keys), training=True)


@pytest.mark.parametrize('scheme', ['gs', 's3'])
def test_a_name_that_leads_out_of_the_folder_is_refused(scheme, request, root):
  store = request.getfixturevalue({'gs': 'gcs'}.get(scheme, scheme))
  _put(store, 'strange', _tree() | {'train/../../../../../../evil': b'x'})
  config = _config('folder', path=f'{scheme}://bucket/strange')
  words = [f'{scheme}://bucket/strange', 'evil', "expected no '..'"]
  builders.assert_refused(words, sources.open_source, config, training=True)
  assert not [p for p in root.parent.rglob('evil')]


def test_full_disk_and_a_torn_copy_are_one_line(gcs, root, monkeypatch):
  _put(gcs, 'torn', _tree())
  config = _config('folder', path=f'{_BUCKET}/torn')
  usage = shutil.disk_usage
  with monkeypatch.context() as patch:
    patch.setattr(shutil, 'disk_usage', lambda p: usage(p)._replace(free=10))
    builders.assert_refused(
      r'ANP_DATA=.* 0\.0 MB of room', sources.open_source, config, training=True
    )
  store = remote.file_system(config.data.path)
  get_file = store.get_file
  with monkeypatch.context() as patch:

    def cut(address, path):
      get_file(address, path)
      os.truncate(path, 5)

    patch.setattr(store, 'get_file', cut)
    builders.assert_refused('5 bytes were copied of', sources.open_source, config, training=True)
  with monkeypatch.context() as patch:
    patch.setenv('ANP_DATA', __file__)  # no folder
    builders.assert_refused(r'torn cannot be written', sources.open_source, config, training=True)
  folder = root / 'remote/gs/bucket/torn'
  assert not [p for p in folder.rglob('*') if p.is_file()]
  assert len(sources.open_source(config, training=True)) == 6
