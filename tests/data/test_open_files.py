"""Tests of stored_images: sets of more shards than a process may open."""

import gc
import os
import tarfile
from unittest import mock

import numpy as np
import pytest

from anp_jax.data.input import corruption
from anp_jax.data.sources import stored_images
from tests import builders, launching

_SHARDS = 300

# Runs with 256 file descriptors, and prints how many of 300 examples have
# weight 1 in two epochs; an example is the only one of its shard.
_READ = """
import resource, sys
import numpy as np
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from anp_jax.data.input import batch_sampler, pipeline
from anp_jax.data.sources import shards, stored_images
from tests import builders, image_sources
folder, count = sys.argv[1], int(sys.argv[2])

class Source(image_sources.Source):
  def __init__(self, kind):
    super().__init__([b''] * count)
    paths = [f'{folder}/{kind}/{i}' for i in range(count)]
    if kind == 'array_record':
      records = shards.ArrayRecords(paths, [1] * count)  # opens each to count it
      self.get = lambda i: records.__getitems__([i])[0]
    else:
      places = np.array([(i, 512, 0) for i in range(count)])
      places[:, 2] = int(sys.argv[3])
      self.get = stored_images.FileRanges(paths, places).read

  def read(self, indices):
    return [self.get(int(i)) for i in indices], np.asarray(indices, np.int32)

config = builders.config({
  'data.decode': 'bilinear', 'data.image_size': 8, 'data.threads': 4})
sampler = batch_sampler.BatchSampler(config, count, 50, np.arange(50), True)
for kind in ('array_record', 'tar'):
  stream = pipeline.batches(Source(kind), sampler)
  print(int(sum(next(stream)['weight'].sum() for _ in range(2 * count // 50))))
  stream.close()
"""


def test_more_shards_than_descriptors_lose_no_example(tmp_path):
  from array_record.python import array_record_module

  photo = builders.encode_image(builders.random_pixels(12, 16), 'PNG')
  (tmp_path / 'x.png').write_bytes(photo)
  for kind in ('array_record', 'tar'):
    (tmp_path / kind).mkdir()
  for i in range(_SHARDS):
    with tarfile.open(tmp_path / 'tar' / str(i), 'w', format=tarfile.USTAR_FORMAT) as tar:
      tar.add(tmp_path / 'x.png', 'x.png')
    path = str(tmp_path / 'array_record' / str(i))
    writer = array_record_module.ArrayRecordWriter(path, 'group_size:1')
    writer.write(photo)
    writer.close()
  result = launching.python('-c', _READ, tmp_path, _SHARDS, len(photo))
  assert result.stdout.split() == [str(2 * _SHARDS)] * 2, result.stderr[-2000:]
  assert 'cannot be' not in result.stderr


def test_the_file_used_longest_ago_is_closed(tmp_path, monkeypatch, quick_collections):
  monkeypatch.setattr('resource.getrlimit', lambda which: (16, 16))
  opened = []

  def open_file(key):
    opened.append(key)
    return open(tmp_path / str(key), 'wb')

  files = stored_images.keep_open(open_file)
  first = files(0)
  for key in (1, 2, 3, 0, 4, 0, 1):
    files(key)
  assert opened == [0, 1, 2, 3, 4, 1]
  assert files(0) is first and not first.closed
  before = len(os.listdir('/proc/self/fd'))
  for key in range(100):
    files(key)
  del first
  gc.collect()
  assert len(os.listdir('/proc/self/fd')) <= before


@pytest.mark.parametrize(
  'error, is_transient',
  [
    (OSError(24, 'Too many open files'), True),
    (OSError(5, 'Input/output error'), True),
    (MemoryError(), True),
    (RuntimeError('open() failed: Too many open files; opening /sets/12'), True),
    (RuntimeError('open() failed: No such file or directory'), False),
    (OSError(2, 'No such file or directory'), False),
    (OSError('broken data stream when reading image file'), False),
    (ValueError('truncated: no end marker'), False),
  ],
)
def test_what_can_pass_is_no_damage(error, is_transient):
  assert corruption.is_transient(error) == is_transient


def test_a_lack_of_descriptors_while_a_format_is_loaded(monkeypatch):
  """Pillow loads a format's module when the first such file comes."""
  from anp_jax.data.image_files import images

  webp = builders.encode_image(np.zeros((9, 9, 3), np.uint8), 'WEBP')
  error = OSError(24, 'Too many open files')
  monkeypatch.setattr('importlib.import_module', mock.Mock(side_effect=error))
  with pytest.raises(OSError) as e:
    images.decode_shrunk(webp, 8, 100)
  assert corruption.is_transient(e.value)


def test_a_file_stays_open_while_it_is_read(tmp_path, monkeypatch):
  """Another thread may make it leave the files that stay open."""
  path = tmp_path / 'shard'
  path.write_bytes(b'abcdef')
  images = stored_images.FileRanges([str(path)], np.array([[0, 2, 3]]), [(6, 0)])
  pread = os.pread

  def evict(*arguments):
    images._file.cache_clear()
    gc.collect()
    return pread(*arguments)

  monkeypatch.setattr(stored_images.os, 'pread', evict)
  assert images.read(0) == b'cde'
