"""Tests of raw_files: the formats of folders, and the same sets of tfds."""

import io
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered

from anp_jax import config as config_lib
from tests import opening, raw_data

# What a folder holds.


def test_folder_of_nothing_known(tmp_path, config):
  for names in ([], ['cifar-10-python.tar.gz', 'cat.jpg']):
    for name in names:
      (tmp_path / name).write_bytes(b'')
    opening.refused(
      [
        tmp_path,
        'SPLIT_images.npy',
        'train-images-idx3-ubyte',
        'data_batch_1.bin',
        'cifar-10-batches-py/',
        'unpacked',
      ],
      config,
      'arrays',
      tmp_path,
    )
  opening.refused([tmp_path / 'none'], config, 'arrays', tmp_path / 'none')


def test_folder_of_several_sets(tmp_path, config):
  raw_data.mnist(tmp_path)
  raw_data.cifar(tmp_path / 'cifar-10-batches-py', 'python')
  opening.refused(
    [f'MNIST in {tmp_path} and ', f'CIFAR-10 (Python) in {tmp_path / "cifar-10-batches-py"}'],
    config,
    'arrays',
    tmp_path,
  )
  raw_data.cifar(tmp_path / 'two', 'python')
  raw_data.cifar(tmp_path / 'two', 'binary')
  opening.refused(['(binary) in', '(Python) in'], config, 'arrays', tmp_path / 'two')


def test_array_of_another_purpose_is_no_set(tmp_path):
  np.save(raw_data.mnist(tmp_path) / 'mean.npy', np.zeros(3))
  assert raw_data.read(tmp_path)[2] == [7, 0, 5]
  np.save(tmp_path / 'train_images.npy', np.zeros(3))
  with pytest.raises(config_lib.ConfigError, match='NumPy in .*each in a'):
    raw_data.read(tmp_path)


def test_unknown_split_names_those_there_are(tmp_path, config):
  raw_data.mnist(tmp_path / 'mnist')
  opening.refused(
    ["'tset'", 'train, test, t10k, validation', "mean 'test'"],
    config,
    'arrays',
    tmp_path / 'mnist',
    'tset',
  )
  for form in ('binary', 'python'):
    raw_data.cifar(tmp_path / form, form)
    opening.refused(
      ["'trian'", 'train, test, validation', "mean 'train'"],
      config,
      'arrays',
      tmp_path / form,
      'trian',
    )


def test_no_tensorflow_is_loaded(tmp_path):
  """Nor JAX: pixels come to a batch by NumPy and Pillow alone."""
  raw_data.mnist(tmp_path / 'a', 'gz')
  raw_data.cifar(tmp_path / 'b', 'binary')
  raw_data.cifar(tmp_path / 'c', 'python')
  code = (
    'import sys\n'
    'from anp_jax.data.sources import arrays\n'
    'from anp_jax.data import sources\n'
    'for path in sys.argv[1:]:\n'
    '  for split in ("train", "validation"):\n'
    '    arrays.Arrays(path, split).read([0, 1])\n'
    'print([m for m in ("tensorflow", "jax", "tensorflow_datasets")\n'
    '       if m in sys.modules])\n'
  )
  folders = [str(tmp_path / name) for name in 'abc']
  result = subprocess.run([sys.executable, '-c', code, *folders], capture_output=True, text=True)
  assert (result.stdout, result.returncode) == ('[]\n', 0), result.stderr


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
