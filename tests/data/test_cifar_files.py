"""Tests of raw_files: CIFAR-10's files, whole and broken, byte by byte."""

import pytest

from tests import opening, raw_data


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
