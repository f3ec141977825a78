"""Tests of cache: image files kept in memory."""

import numpy as np
import pytest

from anp_jax.data.sources import cache, synthetic
from tests import builders, image_sources


def _file(seed=0):
  return builders.encode_image(image_sources.picture(9, 9, seed))


def _wrapped(config, files, kind, gigabytes=1.0):
  config.data.cache = kind
  config.data.cache_gigabytes = gigabytes
  return cache.wrap(files, config)


def test_nothing_is_wrapped_without_need(config):
  files = image_sources.Source([_file()])
  assert _wrapped(config, files, 'none') is files
  config.data.cache = 'mapped'
  source = synthetic.Synthetic(config.data, 'train')
  assert cache.wrap(source, config) is source


def test_files_are_read_once(config):
  files = image_sources.Source([_file(seed) for seed in range(6)])
  source = _wrapped(config, files, 'encoded')
  assert (source.kind, source.name, len(source)) == ('encoded', 'test', 6)
  assert source.vocabulary is files.vocabulary
  assert source.example_name(3) == 'example 3'
  assert source.labels().tolist() == [0, 1, 2, 3, 4, 5]
  for indices in ([4, 1, 4], [1, 5], [0, 1, 2, 3, 4, 5]):
    images, labels = source.read(np.array(indices))
    assert images == [files.images[i] for i in indices]
    assert labels.tolist() == indices
    assert labels.dtype == np.int32
  # Twice in one batch may be read twice.
  assert sorted(set(files.reads)) == [0, 1, 2, 3, 4, 5]
  assert len(files.reads) == 7


def test_no_more_than_the_budget_is_stored(config):
  files = image_sources.Source([bytes([i]) * 100 for i in range(10)])
  source = _wrapped(config, files, 'encoded', gigabytes=350 / 2**30)
  for _ in range(3):
    for i in range(10):
      (image,), _ = source.read(np.array([i]))
      assert image == files.images[i]
  # Three of a hundred bytes fit: they are read once, the others three times.
  counts = [files.reads.count(i) for i in range(10)]
  assert counts == [1, 1, 1, 3, 3, 3, 3, 3, 3, 3]


def test_an_error_is_not_stored(config):
  files = image_sources.Source([_file(), FileNotFoundError('gone')])
  source = _wrapped(config, files, 'encoded')
  with pytest.raises(FileNotFoundError):
    source.read(np.array([1]))
  files.images[1] = b'back'
  assert source.read(np.array([1]))[0] == [b'back']
