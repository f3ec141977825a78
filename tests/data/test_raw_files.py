"""Tests of raw_files: the formats of folders; MNIST's and CIFAR-10's files, byte by byte."""

import numpy as np
import pytest

from anp_jax.data.sources import arrays as arrays_lib
from tests import builders, opening, raw_data

# What a folder holds.


def test_folder_of_nothing_known(tmp_path, config):
  words = [tmp_path, 'SPLIT_images.npy', 'train-images-idx3-ubyte', 'data_batch_1.bin', 'unpacked']
  opening.refused(words, config, 'arrays', tmp_path)
  for name in ('cifar-10-binary.tar.gz', 'data_batch_1', 'cat.jpg'):
    (tmp_path / name).write_bytes(b'')
  opening.refused(words, config, 'arrays', tmp_path)
  opening.refused([tmp_path / 'none'], config, 'arrays', tmp_path / 'none')


def test_folder_of_several_sets(tmp_path, config):
  raw_data.mnist(tmp_path)
  folder = raw_data.cifar(tmp_path / 'cifar-10-batches-bin')
  words = [f'MNIST in {tmp_path} and ', f'CIFAR-10 in {folder}']
  opening.refused(words, config, 'arrays', tmp_path)


def test_array_of_another_purpose_is_no_set(tmp_path):
  np.save(raw_data.mnist(tmp_path) / 'mean.npy', np.zeros(3))
  assert raw_data.read(tmp_path)[2] == [7, 0, 5]
  np.save(tmp_path / 'train_images.npy', np.zeros(3))
  builders.assert_refused('NumPy in .*one per folder', raw_data.read, tmp_path)


def test_unknown_split_names_those_there_are(tmp_path, config):
  raw_data.mnist(tmp_path / 'mnist')
  raw_data.cifar(tmp_path / 'cifar')
  for name, split, words in (
    ('mnist', 'tset', ["'tset'", 'train, test, t10k, validation', "mean 'test'"]),
    ('cifar', 'trian', ["'trian'", 'train, test, validation', "mean 'train'"]),
  ):
    opening.refused(words, config, 'arrays', tmp_path / name, split)


# MNIST, whole and broken.


@pytest.mark.parametrize('form', ['', 'gz', 'dots', 'dots gz'])
def test_mnist(tmp_path, form):
  raw_data.mnist(tmp_path, form)
  images, shape, labels, names = raw_data.read(tmp_path)
  assert shape == (2, 4, 3) and labels == [7, 0, 5] and names == raw_data.DIGITS
  assert images[1] == bytes(
    [18, 18, 18, 19, 19, 19, 20, 20, 20, 21, 21, 21, 22, 22, 22, 23, 23, 23, 24, 24, 24, 25, 25, 25]
  )
  assert images[0][:6] == bytes([10, 10, 10, 11, 11, 11])
  assert images[2][-6:] == bytes([32, 32, 32, 33, 33, 33])
  for split in ('test', 't10k', 'validation'):
    images, shape, labels, names = raw_data.read(tmp_path, split)
    assert labels == [3, 8] and names == raw_data.DIGITS
    assert images[0][::3] == bytes(range(33, 25, -1))
    assert images[1][::3] == bytes(range(25, 17, -1))


def test_mnist_keeps_each_grey_byte_once(tmp_path):
  count = 200
  raw_data.mnist(
    tmp_path,
    train_images_idx3_ubyte=raw_data.idx(bytes(count * 50 * 50), count, 50, 50),
    train_labels_idx1_ubyte=raw_data.idx(bytes(count)),
  )
  images = arrays_lib.Arrays(str(tmp_path), 'train')._images
  low, high = np.lib.array_utils.byte_bounds(images)
  assert images.shape == (count, 50, 50, 3) and high - low == count * 50 * 50


def test_mnist_of_more_classes(tmp_path):
  """EMNIST has more: the training labels say how many, in both splits."""
  raw_data.mnist(tmp_path, train_labels_idx1_ubyte=raw_data.idx([0, 11, 5]))
  names = tuple(str(i) for i in range(12))
  assert raw_data.read(tmp_path)[3] == names
  assert raw_data.read(tmp_path, 'test')[3] == names
  (tmp_path / 'train-labels-idx1-ubyte').unlink()
  assert raw_data.read(tmp_path, 'test')[2:] == ([3, 8], raw_data.DIGITS)


def test_plain_file_is_read_where_both_are(tmp_path):
  raw_data.mnist(tmp_path)
  (tmp_path / 'train-labels-idx1-ubyte.gz').write_bytes(b'half')
  assert raw_data.read(tmp_path)[2] == [7, 0, 5]


def test_folder_of_a_files_name_is_no_file(tmp_path):
  """Some archives unpack every file into a folder of its own name."""
  raw_data.mnist(tmp_path, 'dots')
  (tmp_path / 'train-images-idx3-ubyte').mkdir()
  assert raw_data.read(tmp_path)[2] == [7, 0, 5]


_IMAGES = raw_data.MNIST['train-images-idx3-ubyte']


@pytest.mark.parametrize(
  'name, data, words',
  [
    ('images_idx3', _IMAGES[:-1], ['39 bytes', '40', '3 x 2 x 4']),
    ('images_idx3', _IMAGES[:9], ['9 bytes']),
    ('images_idx3', b'', ['0x00000803']),
    ('images_idx3', raw_data.idx([7, 0, 5]), ['0x00000801', '0x00000803']),
    # A size that would wrap around in 64 bits.
    ('images_idx3', raw_data.idx([], 2**31, 2**31, 4), [str(2**64 + 16)]),
    ('images_idx3', raw_data.idx([], 3, 0, 4), ['0 x 4']),
    ('labels_idx1', raw_data.idx([1, 2]), ['2 labels', 'expected 3']),
    ('labels_idx1', _IMAGES, ['0x00000803', '0x00000801']),
    ('images_idx3', None, ['.gz']),
  ],
)
@pytest.mark.parametrize('form', ['', 'gz'])
def test_bad_mnist(tmp_path, config, form, name, data, words):
  raw_data.mnist(tmp_path, form, **{f'train_{name}_ubyte': data})
  file = f'train_{name}_ubyte'.replace('_', '-')
  opening.refused([tmp_path, file, *words], config, 'arrays', tmp_path)


def test_mnist_labels_out_of_range(tmp_path, config):
  raw_data.mnist(tmp_path, t10k_labels_idx1_ubyte=raw_data.idx([3, 10]))
  opening.refused(
    [tmp_path / 't10k-labels-idx1-ubyte', '3 to 10', '0 to 9'], config, 'arrays', tmp_path, 'test'
  )


@pytest.mark.parametrize('damage', ['plain', 'cut', 'byte', 'sum', 'empty'])
def test_bad_gzip(tmp_path, config, damage):
  raw_data.mnist(tmp_path, 'gz')
  file = tmp_path / 'train-images-idx3-ubyte.gz'
  data = file.read_bytes()
  file.write_bytes(
    {
      'plain': _IMAGES,
      'cut': data[:-9],
      'byte': data[:20] + bytes([data[20] ^ 255]) + data[21:],
      'sum': data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
      'empty': b'',
    }[damage]
  )
  words = [file, '0x00000803' if damage == 'empty' else 'a whole file']
  opening.refused(words, config, 'arrays', tmp_path)


def test_mnist_without_images(tmp_path, config):
  raw_data.mnist(
    tmp_path,
    train_images_idx3_ubyte=raw_data.idx([], 0, 28, 28),
    train_labels_idx1_ubyte=raw_data.idx([], 0),
  )
  opening.refused([tmp_path, 'no examples'], config, 'arrays', tmp_path)


# CIFAR-10, whole and broken.


@pytest.mark.parametrize('folder', ['', 'cifar-10-batches-bin'])
@pytest.mark.parametrize('names', [raw_data.KINDS, None])
def test_cifar(tmp_path, folder, names):
  raw_data.cifar(tmp_path / folder, names)
  names = names or raw_data.DIGITS
  contents = raw_data.contents()
  images, shape, labels, class_names = raw_data.read(tmp_path)
  assert shape == (32, 32, 3) and class_names == names
  assert labels == [n for name in raw_data.BATCHES for n in contents[name][0]]
  assert labels[:4] == [3, 0, 7, 4]
  assert images == [raw_data.pixels(raw_data.planes(seed)) for seed in range(8)]
  for split in ('test', 'validation'):
    images, _, labels, class_names = raw_data.read(tmp_path, split)
    assert labels == contents['test_batch'][0] and class_names == names
    assert images == [raw_data.pixels(raw_data.planes(seed)) for seed in range(8, 12)]


@pytest.mark.parametrize(
  'name, split', [('data_batch_1', 'train'), ('data_batch_4', 'train'), ('test_batch', 'test')]
)
def test_batch_that_is_missing(tmp_path, config, name, split):
  (raw_data.cifar(tmp_path) / f'{name}.bin').unlink()
  opening.refused([tmp_path, f'{name}.bin', 'No such file'], config, 'arrays', tmp_path, split)


@pytest.mark.parametrize('left', [0, 1, 3072, 3074, 2 * 3073 - 1])
def test_batch_that_is_cut(tmp_path, config, left):
  file = raw_data.cifar(tmp_path) / 'data_batch_3.bin'
  file.write_bytes(file.read_bytes()[:left])
  opening.refused([file, f'{left} bytes', '3073'], config, 'arrays', tmp_path)


def test_labels_out_of_range(tmp_path, config):
  file = raw_data.cifar(tmp_path) / 'data_batch_2.bin'
  raw_data.cifar(tmp_path, names=raw_data.KINDS[:7])
  opening.refused([file, '7', '0 to 6'], config, 'arrays', tmp_path)
  raw_data.cifar(tmp_path)
  file.write_bytes(b'\x0a' + raw_data.planes(0))
  opening.refused([file, '10 to 10', '0 to 9'], config, 'arrays', tmp_path)


@pytest.mark.parametrize('text', [b'', b'\n\n', b'a\n\nb\n', b'\na\nb\n', b'a\n \nb\n', b'\xff\n'])
def test_bad_names(tmp_path, config, text):
  file = raw_data.cifar(tmp_path) / 'batches.meta.txt'
  file.write_bytes(text)
  opening.refused([file], config, 'arrays', tmp_path)
