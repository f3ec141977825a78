"""Tests of the copying of TFRecord sets, whole and damaged."""

import contextlib
import io
import json
import os
import struct

import pytest
import tensorflow_datasets as tfds

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.data.prepare import __main__ as prepare, conversion
from tests import builders, prepared

# Several processes import TensorFlow.
pytestmark = pytest.mark.slow


class SomeRecords(tfds.core.GeneratorBasedBuilder):
  """Pictures of one value each, in several shards."""

  VERSION = tfds.core.Version('2.1.0')
  RELEASE_NOTES = {'2.1.0': 'For tests.'}
  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='plain'), tfds.core.BuilderConfig(name='more')]
  url_infos = None

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(
        {
          'image': tfds.features.Image(encoding_format='png'),
          'label': tfds.features.ClassLabel(names=['tall_tree', 'red_car']),
        }
      ),
      metadata=tfds.core.MetadataDict({'mine': 1}),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {s: self._generate_examples(n) for s, n in _COUNTS.items()}

  def _generate_examples(self, count):
    for i in range(count):
      yield (i, {'image': builders.random_pixels(3 + i % 4, 5, i), 'label': i % 2})


_COUNTS = {'train': 37, 'test': 5}


@pytest.fixture(scope='module')
def records(tmp_path_factory):
  tfds.disable_progress_bar()
  data_dir = tmp_path_factory.mktemp('records')
  SomeRecords(config='more', data_dir=data_dir, file_format='tfrecord').download_and_prepare(
    download_config=tfds.download.DownloadConfig(num_shards=3)
  )
  return data_dir


def _in_order(folder, split):
  builder = tfds.builder_from_directory(folder)
  skip = {'image': tfds.decode.SkipDecoding()}
  if builder.info.file_format.value == 'array_record':
    return list(builder.as_data_source(split, decoders=skip))
  read = tfds.ReadConfig(interleave_cycle_length=1)
  data = builder.as_dataset(split, decoders=skip, read_config=read)
  return list(tfds.as_numpy(data))


@pytest.fixture(scope='module')
def copied(records, tmp_path_factory):
  """The copy under its default name, and what was printed."""
  data_dir = tmp_path_factory.mktemp('copied')
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    assert prepare.main(['prepare', *_copy_arguments(records, data_dir)]) == 0
  return data_dir, out.getvalue()


def _copy_arguments(records, data_dir):
  # One worker: each imports TensorFlow.
  return [
    '--from=tfds:some_records/more',
    f'--from_dir={records}',
    f'--data_dir={data_dir}',
    '--workers=1',
  ]


_COPY = 'some_records_array_record'


def test_records_are_copied(records, copied, capsys):
  data_dir, out = copied
  assert f'--config.data.source=tfds:{_COPY}/more ' in out
  assert '42 examples in 6 files' in out
  source = records / 'some_records' / 'more' / '2.1.0'
  copy = data_dir / _COPY / 'more' / '2.1.0'
  shards = {p.name for p in copy.glob('*array_record-*')}
  assert f'{_COPY}-train.array_record-00002-of-00003' in shards
  for split, count in _COUNTS.items():
    originals = _in_order(source, split)
    copies = _in_order(copy, split)
    assert len(copies) == count
    assert [e['image'] for e in copies] == [e['image'] for e in originals]
    assert [e['label'] for e in copies] == [e['label'] for e in originals]
  features = [(f / 'features.json').read_bytes() for f in (source, copy)]
  assert features[0] == features[1]
  before, after = (json.loads((f / 'dataset_info.json').read_text()) for f in (source, copy))
  assert (after.pop('name'), after.pop('fileFormat')) == (_COPY, 'array_record')
  before.pop('name'), before.pop('fileFormat', None)
  assert before == after
  assert json.loads((copy / 'metadata.json').read_text()) == {'mine': 1}
  assert os.listdir(data_dir) == [_COPY]
  assert prepare.main(['prepare', *_copy_arguments(records, data_dir)]) == 0
  out, err = capsys.readouterr()
  assert err == '' and 'already' in out


def test_copied_records_are_read_by_name(copied, config):
  builder = tfds.builder(f'{_COPY}/more', data_dir=copied[0])
  assert builder.info.splits['train'].num_examples == 37
  config.data.source, config.data.dir = f'tfds:{_COPY}/more', str(copied[0])
  config.data.eval_split = 'test'
  assert len(sources.open_source(config, training=False)) == 5


def _copy_of_records(records, folder):
  """A copy to damage; its folder and one of its shards."""
  copy = folder / 'some_records' / 'more' / '2.1.0'
  copy.mkdir(parents=True)
  for path in (records / 'some_records' / 'more' / '2.1.0').iterdir():
    (copy / path.name).write_bytes(path.read_bytes())
  return copy / 'some_records-train.tfrecord-00001-of-00003'


@pytest.mark.parametrize('damage', ['payload', 'length', 'cut', 'record'])
def test_damage_to_records_is_seen(records, tmp_path, damage):
  shard = _copy_of_records(records, tmp_path)
  data = bytearray(shard.read_bytes())
  (length,) = struct.unpack('<Q', data[:8])
  if damage == 'payload':
    data[12 + length // 2] ^= 1
  elif damage == 'length':
    data[0] ^= 1
  elif damage == 'cut':
    del data[-3:]
  else:
    del data[: 16 + length]  # what is left is well formed
  shard.write_bytes(bytes(data))
  info = tfds.builder_from_directory(shard.parent).info.splits['train']
  records = conversion.Records(str(shard), info.shard_lengths[1])
  with pytest.raises(config_lib.ConfigError, match=str(shard)):
    conversion.copy_records(lambda _: None, records, str(tmp_path / 'out'))


def test_record_sets_that_are_refused(records, copied, tmp_path, capsys):
  shard = _copy_of_records(records, tmp_path / 'in')
  data = bytearray(shard.read_bytes())
  data[20] ^= 1
  shard.write_bytes(bytes(data))
  arguments = _copy_arguments(tmp_path / 'in', tmp_path / 'out')
  assert str(shard) in prepared.error(capsys, *arguments)
  assert not (tmp_path / 'out' / _COPY).exists()
  shard.unlink()
  assert str(shard) in prepared.error(capsys, *arguments)
  line = prepared.error(capsys, '--from=tfds:some_record/more', f'--data_dir={records}')
  assert str(records) in line and "'some_records'" in line
  line = prepared.error(
    capsys, '--from=tfds:some_records/more', '--name=some_records', f'--data_dir={records}'
  )
  assert 'the set itself' in line
  line = prepared.error(capsys, f'--from=tfds:{_COPY}/more', '--name=y', f'--data_dir={copied[0]}')
  assert 'array_record' in line and 'expected tfrecord' in line
