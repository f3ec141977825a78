"""Tests of raw_files: the formats of folders."""

import numpy as np

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
