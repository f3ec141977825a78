"""Tests of anp_folder: what is written is what tfds reads."""

import io
import os

from array_record.python import array_record_module
import numpy as np
from PIL import Image
import pytest
import tensorflow_datasets as tfds

from anp_jax.data import sources, vocabulary
from anp_jax.data.prepare import anp_folder, anp_folder_files
from tests import builders, launching, prepared

_PAIRS = vocabulary.Vocabulary(
  ('big_cat', 'old_cat', 'old_dog'), adjectives=('old', 'big'), nouns=('dog', 'fish', 'cat')
)
_PLAIN = vocabulary.Vocabulary(('dress', 't-shirt', 'long sleeve'))


def _image(seed, kind='PNG'):
  pixels = builders.random_pixels(5, 4 + seed, seed)
  return builders.encode_image(pixels, kind)


_EXAMPLES = [
  (_image(0), 2, 'old_dog/0.png'),
  (_image(1, 'JPEG'), 0, 'big_cat/1 of 2|x.jpg'),
  (_image(2), 1, 'old_cat/\udcff.png'),  # a name that is no UTF-8
  (_image(3, 'GIF'), 0, 'big_cat/ü.gif'),
]


@pytest.fixture(params=['pairs', 'plain'])
def written(request, tmp_path):
  """A set of two splits, the first of two shards."""
  classes = {'pairs': _PAIRS, 'plain': _PLAIN}[request.param]
  folder = str(prepared.folder(tmp_path, 'My-set.v2'))
  os.makedirs(folder)
  for i, (split, examples) in enumerate(
    [('train', _EXAMPLES[:3]), ('train', _EXAMPLES[3:]), ('test', _EXAMPLES[1:2])]
  ):
    name = anp_folder_files.shard(split, i % 2, 2 if split == 'train' else 1)
    path = os.path.join(folder, name)
    anp_folder.write_shard(path, classes, examples)
  splits = {'train': [3, 1], 'test': [1]}
  anp_folder.write_info(folder, 'My-set.v2', classes, splits, {'policy': {'grey': 'keep'}})
  return classes, str(tmp_path), folder


def test_tfds_reads_it(written):
  classes, data_dir, _ = written
  builder = tfds.builder('anp_folder/My-set.v2', data_dir=data_dir)
  assert builder.info.full_name == 'anp_folder/My-set.v2/1.0.0'
  assert builder.info.file_format.value == 'array_record'
  assert builder.info.splits['train'].num_examples == 4
  assert list(builder.info.splits['train'].shard_lengths) == [3, 1]
  assert builder.info.splits['test'].num_examples == 1
  features = builder.info.features
  assert features['label'].names == list(classes.names)
  assert builder.info.supervised_keys == ('image', 'label')
  assert ('adjective' in features) == ('noun' in features) == classes.is_anp
  data = builder.as_data_source('train')
  assert len(data) == 4
  for example, (image, label, name) in zip(data, _EXAMPLES):
    assert example['label'] == label
    assert example['file_name'] == os.fsencode(name)
    picture = Image.open(io.BytesIO(image))
    if picture.mode == 'RGB':  # tfds gives the indices of a palette
      np.testing.assert_array_equal(example['image'], np.asarray(picture))
  skip = {'image': tfds.decode.SkipDecoding()}
  stored = builder.as_data_source('train', decoders=skip)
  assert [e['image'] for e in stored] == [image for image, _, _ in _EXAMPLES]
  if classes.is_anp:
    # Their own order, not that of the alphabet.
    assert [e['adjective'] for e in data] == [0, 1, 0, 1]
    assert [e['noun'] for e in data] == [0, 2, 2, 2]
    assert features['noun'].names == ['dog', 'fish', 'cat']
  by_name = tfds.data_source('anp_folder/My-set.v2', data_dir=data_dir)
  assert by_name['test'][0]['label'] == 0


def test_features_are_stored_in_the_order_of_their_names(tmp_path):
  """Not in that of a hash, which is another one in each process."""
  path = str(tmp_path / 'shard')
  anp_folder.write_shard(path, _PAIRS, [(b'x', 0, 'y')])
  (record,) = array_record_module.ArrayRecordReader(path).read_all()
  names = [b'adjective', b'file_name', b'image', b'label', b'noun']
  assert sorted(names, key=record.index) == names


def test_a_shard_that_does_not_fit_raises(tmp_path):
  """Nothing of a full disk may pass for a written shard."""
  code = (
    'import resource, signal, sys\n'
    'from anp_jax.data import vocabulary\n'
    'from anp_jax.data.prepare import anp_folder\n'
    'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
    'resource.setrlimit(resource.RLIMIT_FSIZE, (300000, 300000))\n'
    'classes = vocabulary.Vocabulary(("a", "b"))\n'
    'examples = [(b"x" * 10000, 0, "a/x")] * 100\n'
    'anp_folder.write_shard(sys.argv[1], classes, examples)\n'
  )
  done = launching.python('-c', code, tmp_path / 'shard')
  assert done.returncode == 1
  assert 'File too large' in done.stderr


def test_tensorflow_is_not_imported_to_prepare_or_to_decode_with_pillow(tmp_path):
  code = (
    'import sys\n'
    'from anp_jax.data import vocabulary\n'
    'from anp_jax.data.input import decode_pillow\n'
    'from anp_jax.data.prepare import anp_folder, anp_folder_files, examine\n'
    'classes = vocabulary.Vocabulary(("a_b", "c_d"))\n'
    'path = sys.argv[1] + "/" + anp_folder_files.shard("train", 0, 1)\n'
    'anp_folder.write_shard(path, classes, [(b"x", 0, "a_b/x")])\n'
    'anp_folder.write_info(sys.argv[1], "n", classes, {"train": [1]}, {})\n'
    'print("tensorflow" in sys.modules)\n'
  )
  done = launching.python('-c', code, tmp_path)
  assert (done.stdout, done.stderr) == ('False\n', '')


@pytest.mark.parametrize('name', ['dataset_info.json', 'features.json'])
def test_a_damaged_description_is_one_line(written, name, config):
  _, data_dir, folder = written
  with open(os.path.join(folder, name), 'w') as file:
    file.write('version https://git-lfs.github.com/spec/v1')
  config.data.dir, config.data.train_split = data_dir, 'train'
  config.data.source = 'tfds:anp_folder/My-set.v2'
  builders.assert_refused(['that can be read'], sources.open_source, config, True)
