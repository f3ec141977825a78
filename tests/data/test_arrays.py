"""Tests of arrays: NumPy's files, whole and broken."""

import numpy as np
import pytest

from anp_jax.data.sources import arrays as arrays_lib
from tests import opening


def _arrays():
  rng = np.random.default_rng(0)
  return {
    'train_images': rng.integers(0, 256, (7, 5, 4, 3), np.uint8),
    'train_labels': np.array([0, 2, 1, 1, 0, 2, 11]),
    'validation_images': rng.integers(0, 256, (3, 5, 4, 3), np.uint8),
    'validation_labels': np.array([1, 0, 1], np.uint8),
  }


def _save(path, arrays):
  """Saves an .npz file or a folder of .npy files, by the path's suffix."""
  if path.suffix == '.npz':
    np.savez(path, **arrays)
  else:
    path.mkdir()
    for name, array in arrays.items():
      np.save(path / f'{name}.npy', array)


@pytest.mark.parametrize('name', ['set.npz', 'folder'])
def test_arrays(tmp_path, config, name):
  arrays = _arrays()
  _save(tmp_path / name, arrays)
  for split in ('train', 'validation'):
    source = opening.source(config, 'arrays', tmp_path / name, split)
    assert source.kind == 'pixels'
    assert len(source) == len(arrays[f'{split}_labels'])
    order = np.array([2, 0, 2, 1])
    images, labels = source.read(order)
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(labels, arrays[f'{split}_labels'][order])
    np.testing.assert_array_equal(images, arrays[f'{split}_images'][order])
    # Without names the classes are those of the training split, and sort.
    names = tuple(f'class{i:02}' for i in range(12))
    assert source.vocabulary.names == names


@pytest.mark.parametrize('name', ['set.npz', 'folder'])
def test_arrays_to_evaluate_on_need_no_training_examples(tmp_path, config, name):
  _save(tmp_path / name, {k: v for k, v in _arrays().items() if k.startswith('validation')})
  source = opening.source(config, 'arrays', tmp_path / name, 'validation')
  assert source.vocabulary.names == ('class0', 'class1') and source.labels().tolist() == [1, 0, 1]


@pytest.mark.parametrize('name', ['set.npz', 'folder'])
def test_arrays_with_names(tmp_path, config, name):
  names = [f'fine_é{i}' for i in range(12)]
  texts = names if name == 'folder' else [n.encode() for n in names]
  _save(tmp_path / name, _arrays() | {'class_names': np.array(texts)})
  source = opening.source(config, 'arrays', tmp_path / name, 'validation')
  assert source.vocabulary.names == tuple(names)
  assert source.vocabulary.is_anp


@pytest.mark.parametrize('name', ['set.npz', 'folder'])
@pytest.mark.parametrize(
  'change, words',
  [
    ({'train_images': None}, ["'train_images'"]),
    ({'train_images': np.zeros((7, 5, 4, 3))}, ['train_images', 'float64']),
    ({'train_images': np.zeros((7, 3, 5, 4), np.uint8)}, ['(7, 3, 5, 4)']),
    ({'train_labels': np.zeros(6, int)}, ['train_labels', '(6,)', '7 whole']),
    ({'train_labels': np.full(7, 0.5)}, ['train_labels', 'float64']),
    ({'train_labels': np.arange(-1, 6)}, ['-1 to 5', '0 to 5']),
    ({'class_names': np.array(['a', 'b'])}, ['0 to 11', '0 to 1']),
    # 2**32 must not pass for 0 in int32.
    ({'class_names': np.array(['a', 'b']), 'train_labels': np.full(7, 2**32)}, ['4294967296']),
    ({'class_names': np.array(['a', 3], object)}, ['class_names']),
    ({'class_names': np.arange(12)}, ['class_names', 'texts']),
    ({'class_names': np.array([b'\xff'] * 12)}, ['class_names', 'texts']),
    ({'class_names': np.array(['a', 'b', 'a', *'345678901'])}, ["'a'", 'class 2', 'class 0']),
    (
      {'train_images': np.zeros((0, 5, 4, 3), np.uint8), 'train_labels': np.zeros(0, int)},
      ['no examples'],
    ),
  ],
)
def test_bad_arrays(tmp_path, config, name, change, words):
  arrays = {k: v for k, v in (_arrays() | change).items() if v is not None}
  _save(tmp_path / name, arrays)
  if name == 'set.npz' and words == ['class_names']:
    words = []  # an .npz does not say which of its arrays it could not read
  opening.refused([tmp_path, *words], config, 'arrays', tmp_path / name)


def test_the_labels_that_name_the_classes_are_checked(tmp_path, config):
  for labels in (np.zeros((7, 1), int), np.full(7, np.nan), np.array(['a'] * 7)):
    np.savez(tmp_path / 'set.npz', **_arrays() | {'train_labels': labels})
    words = ['train_labels', 'expected whole numbers']
    opening.refused(words, config, 'arrays', tmp_path / 'set.npz', 'validation')


@pytest.mark.parametrize('name', ['set.npz', 'folder'])
def test_unknown_split_of_arrays(tmp_path, config, name):
  _save(tmp_path / name, _arrays())
  for split, words in (
    ('trian', ["'trian_images'", "did you mean 'train_images'"]),
    ('test', ["'test_images'", 'train_images', 'validation_images']),
  ):
    opening.refused(words, config, 'arrays', tmp_path / name, split)


def test_images_are_contiguous(tmp_path):
  """Whatever the order on disk: a stack would take it over."""
  stored = np.asfortranarray(_arrays()['train_images'])
  _save(tmp_path / 'folder', _arrays() | {'train_images': stored})
  source = arrays_lib.Arrays(str(tmp_path / 'folder'), 'train')
  images, _ = source.read(np.arange(7))
  assert all(image.flags.c_contiguous for image in images)
  np.testing.assert_array_equal(images, stored)


def test_bad_array_files(tmp_path, config):
  good = tmp_path / 'good.npz'
  _save(good, _arrays())
  data = good.read_bytes()
  np.save(tmp_path / 'single.npy', np.zeros(3))
  cases = {
    'empty.npz': b'',
    'text.npz': b'hello',
    'cut.npz': data[: len(data) // 2],
    'flipped.npz': data[:200] + bytes([data[200] ^ 1]) + data[201:],
  }
  for name, content in cases.items():
    (tmp_path / name).write_bytes(content)
  for name in [*cases, 'missing.npz', 'single.npy']:
    opening.refused([tmp_path / name], config, 'arrays', tmp_path / name)
  folder = tmp_path / 'folder'
  _save(folder, _arrays())
  labels = folder / 'train_labels.npy'
  labels.write_bytes(labels.read_bytes()[:-9])
  opening.refused([labels], config, 'arrays', folder)
