"""Tests of raw_files: the formats of folders, and the same sets of tfds."""

import io

import numpy as np
from PIL import Image
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from anp_jax import config as config_lib
from tests import opening, raw_data

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
  with pytest.raises(config_lib.ConfigError, match='NumPy in .*one per folder'):
    raw_data.read(tmp_path)


def test_unknown_split_names_those_there_are(tmp_path, config):
  raw_data.mnist(tmp_path / 'mnist')
  raw_data.cifar(tmp_path / 'cifar')
  for name, split, words in (
    ('mnist', 'tset', ["'tset'", 'train, test, t10k, validation', "mean 'test'"]),
    ('cifar', 'trian', ["'trian'", 'train, test, validation', "mean 'train'"]),
  ):
    opening.refused(words, config, 'arrays', tmp_path / name, split)


# The same sets by their names in TensorFlow Datasets.


def _tfds_mnist():
  """A builder of that name; not registered, since tfds has one."""
  with registered.skip_registration():

    class Mnist(tfds.core.GeneratorBasedBuilder):
      VERSION = tfds.core.Version('3.0.1')
      url_infos = None  # nothing is downloaded

      def _info(self):
        return tfds.core.DatasetInfo(
          builder=self,
          features=tfds.features.FeaturesDict(
            {
              'image': tfds.features.Image(shape=(28, 28, 1)),
              'label': tfds.features.ClassLabel(num_classes=10),
            }
          ),
          supervised_keys=('image', 'label'),
        )

      def _split_generators(self, dl_manager):
        del dl_manager
        return {'train': self._generate_examples(0, 7), 'test': self._generate_examples(7, 10)}

      def _generate_examples(self, start, stop):
        for i in range(start, stop):
          yield i, {'image': _digit(i), 'label': i}

  return Mnist


def _digit(i):
  return (np.arange(784, dtype=np.uint8) + 20 * i).reshape(28, 28, 1)


@pytest.mark.slow
@pytest.mark.parametrize('stored', ['tfrecord', 'array_record'])
def test_tfds_mnist(tmp_path, config, stored):
  tfds.disable_progress_bar()
  builder = _tfds_mnist()(data_dir=tmp_path, file_format=stored)
  builder.download_and_prepare()
  config.data.dir = str(tmp_path)
  for split, expected in (('train', range(7)), ('test', range(7, 10))):
    source = opening.source(config, 'tfds:mnist', split=split)
    assert source.kind == 'encoded' and source.vocabulary.names == raw_data.DIGITS
    images, labels = source.read(np.arange(len(source)))
    assert sorted(labels.tolist()) == list(expected)
    for image, label in zip(images, labels):
      with Image.open(io.BytesIO(image)) as file:
        pixels = np.asarray(file)
      np.testing.assert_array_equal(pixels, _digit(int(label))[..., 0])


def test_tfds_cifar10_that_is_not_prepared(tmp_path, config):
  config.data.dir = str(tmp_path)
  opening.refused(
    [tmp_path, "no prepared set 'cifar10'", f'tfds build cifar10 --data_dir={tmp_path}'],
    config,
    'tfds:cifar10',
  )
