"""Tests of mapped: decoded images in files that processes share."""

import io
import os
import shutil
from unittest import mock

import numpy as np
from PIL import Image
import pytest

from anp_jax.data import sources
from anp_jax.data.sources import mapped, synthetic
from anp_jax.system import host_memory
from tests import builders, coordinating, image_sources

_RESIZE = 20


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
  monkeypatch.setattr(mapped, '_PART', 4)
  monkeypatch.setattr(mapped, '_SAMPLE', 1)


@pytest.fixture
def config(config, tmp_path):
  """The tiny recipe with the cache in a folder of the test."""
  config.data.cache, config.data.dir, config.data.resize = 'mapped', str(tmp_path), _RESIZE
  config.data.image_size, config.data.threads = 16, 1
  return config


def _files(count):
  return [builders.encode_image(image_sources.picture(25 + i, 60 - i, i, 5)) for i in range(count)]


def _parts(tmp_path):
  return sorted(path for path in (tmp_path / 'mapped').glob('*/0*'))


def _all(source):
  """Copies: a test may change the files that are mapped."""
  pictures, labels = source.read(np.arange(len(source)))
  return [picture.copy() for picture in pictures], labels


def test_nothing_is_wrapped_without_need(config):
  source = synthetic.Synthetic(config.data, 'train')
  assert mapped.wrap(source, config) is source
  files = image_sources.Source(_files(1))
  config.data.cache = 'none'
  assert mapped.wrap(files, config) is files


@pytest.mark.parametrize(
  'height, width, want',
  [
    (100, 200, (50, 100)),
    (90, 60, (75, 50)),
    (50, 70, (50, 70)),
    (30, 20, (30, 20)),  # never enlarged
  ],
)
def test_images_have_their_shorter_side_brought_down(config, height, width, want):
  config.data.resize = 50
  files = image_sources.Source([builders.encode_image(image_sources.picture(height, width, 0, 5))])
  source = mapped.wrap(files, config)
  assert (source.kind, source.name, len(source)) == ('pixels', 'test', 1)
  (image,), _ = source.read(np.array([0]))
  assert image.shape == (*want, 3) and image.dtype == np.uint8
  by_hand = Image.open(io.BytesIO(files.images[0])).resize(want[::-1], Image.Resampling.BILINEAR)
  np.testing.assert_array_equal(image, by_hand)


def test_a_jpeg_decoded_at_a_smaller_scale_looks_the_same(config):
  file = builders.encode_image(image_sources.picture(403, 601, 0, 5), 'JPEG')
  config.data.resize = 50  # decoded at a quarter
  (image,), _ = mapped.wrap(image_sources.Source([file]), config).read(np.array([0]))
  full_size = Image.open(io.BytesIO(file)).convert('RGB')
  want = np.asarray(full_size.resize(image.shape[1::-1], Image.Resampling.BILINEAR))
  off = np.abs(image.astype(int) - want)
  # A smooth picture; the last pixels of a quarter hang over its edge.
  assert off.mean() < 1.5 and off.max() <= 12


def test_images_are_decoded_once_and_have_their_labels(config, tmp_path):
  files = image_sources.Source(_files(10))
  pictures, labels = _all(mapped.wrap(files, config))
  assert labels.tolist() == [*range(10)] and labels.dtype == np.int32
  assert len(_parts(tmp_path)) == 3
  assert sorted(files.reads) == [0, *range(10)]  # the first also as the sample of sizes
  again = image_sources.Source(files.images)
  source = mapped.wrap(again, config)
  for indices in ([7, 2, 7], [9]):
    images, labels = source.read(np.array(indices))
    assert labels.tolist() == indices
    for image, index in zip(images, indices):
      np.testing.assert_array_equal(image, pictures[index])
      assert not image.flags.writeable
  assert not again.reads


def test_a_build_that_was_killed_goes_on_with_the_missing_parts(config, tmp_path, monkeypatch):
  files = _files(10)
  want, _ = _all(mapped.wrap(image_sources.Source(files), config))
  shutil.rmtree(tmp_path / 'mapped')
  killed = image_sources.Source(files)
  read = killed.read

  def read_until_killed(indices):
    if 6 in indices:
      raise KeyboardInterrupt
    return read(indices)

  monkeypatch.setattr(killed, 'read', read_until_killed)
  with pytest.raises(KeyboardInterrupt):
    mapped.wrap(killed, config)
  (part,) = _parts(tmp_path)
  assert part.name == '000000'
  draft = builders.leave_draft(part.with_name('000001'))
  source = image_sources.Source(files)
  for image, expected in zip(_all(mapped.wrap(source, config))[0], want, strict=True):
    np.testing.assert_array_equal(image, expected)
  assert sorted(source.reads) == [0, 4, 5, 6, 7, 8, 9]
  assert not draft.exists()


def test_others_wait_for_the_one_that_builds(config):
  """Threads here: the lock is of an open file, not of a process."""
  all_files = [image_sources.Source(_files(10)) for _ in range(4)]
  coordinating.at_once([lambda f=files: mapped.wrap(f, config) for files in all_files])
  assert sorted(len(files.reads) for files in all_files) == [0, 0, 0, 11]


def test_a_changed_byte_is_noticed(config, tmp_path, caplog):
  files = image_sources.Source(_files(4))
  want, _ = _all(mapped.wrap(files, config))
  (part,) = _parts(tmp_path)
  data = bytearray(part.read_bytes())
  data[-100] ^= 1  # of the last image
  part.write_bytes(data)
  source = mapped.wrap(files, config)
  for _ in range(2):
    for image, expected in zip(_all(source)[0], want, strict=True):
      np.testing.assert_array_equal(image, expected)
  (line,) = [r.getMessage() for r in caplog.records if 'damaged' in r.getMessage()]
  assert line.startswith('example 3: damaged in ')


def test_a_part_that_was_cut_off_is_made_again(config, tmp_path):
  files = image_sources.Source(_files(6))
  want, _ = _all(mapped.wrap(files, config))
  first, second = _parts(tmp_path)
  content = first.read_bytes()
  for cut in (content[:-8], content[: 8 * 17]):  # in the last image, in its numbers
    first.write_bytes(cut)
    second.write_bytes(b'')
    for image, expected in zip(_all(mapped.wrap(files, config))[0], want, strict=True):
      np.testing.assert_array_equal(image, expected)


def test_parts_hold_no_descriptors(config):
  files = image_sources.Source(_files(40))
  before = len(os.listdir('/proc/self/fd'))
  source = mapped.wrap(files, config)
  assert len(_all(source)[0]) == 40
  assert len(os.listdir('/proc/self/fd')) < before + 5  # of ten parts


def test_another_size_or_a_changed_file_is_another_cache(config, tmp_path):
  tree = {f'train/{"ab"[i % 2]}/{i}.png': file for i, file in enumerate(_files(4))}
  root = builders.write_tree(tmp_path / 'tree', tree)
  config.data.source, config.data.path = 'folder', str(root)

  def caches():
    sources.open_source(config, training=True)
    return len(list((tmp_path / 'mapped').iterdir()))

  assert [caches(), caches()] == [1, 1]
  config.data.resize = _RESIZE + 1
  assert caches() == 2
  (root / 'train/a/0.png').write_bytes(tree['train/b/1.png'])
  assert caches() == 3
  config.data.imbalance = 2.0  # part of the same split
  assert caches() == 3


@pytest.mark.parametrize('kind', ['memory', 'disk'])
def test_a_host_that_is_too_small_is_told_before_anything_is_written(
  config, tmp_path, monkeypatch, kind
):
  files = image_sources.Source(_files(4))
  if kind == 'memory':
    monkeypatch.setattr(host_memory, 'available', lambda: 1000.0)
  else:
    builders.use_disk(monkeypatch, 1000)
  text = builders.refusal(mapped.wrap, files, config)
  assert 'config.data' in text and ('memory left' in text or 'room' in text)
  assert not _parts(tmp_path)


def test_a_source_without_identity_is_refused(config, monkeypatch):
  files = image_sources.Source(_files(1))
  monkeypatch.setattr(files, 'identity', sources.Source().identity)
  builders.assert_refused('expected a source with `identity`: test$', mapped.wrap, files, config)


def test_an_error_of_the_machine_ends_the_build(config, monkeypatch, tmp_path):
  files = image_sources.Source(_files(4))
  monkeypatch.setattr(files, 'read', mock.Mock(side_effect=OSError(5, 'Input/output error')))
  builders.assert_refused('Input/output error$', mapped.wrap, files, config)
  assert not _parts(tmp_path)
