"""Tests of corruption: examples that turn out to be damaged in a run."""

import errno
import gc
import itertools
import os
import threading
import weakref

import numpy as np
import pytest

from anp_jax.data.input import batch_reader, batch_sampler, corruption, pipeline
from tests import builders, image_sources

_BATCH, _SIZE = image_sources.BATCH, 21


@pytest.fixture
def config(config):
  """The tiny recipe without flips."""
  config.data.flip = 0.0
  return config


_GONE = FileNotFoundError(errno.ENOENT, 'no such file')
_OUTAGE = OSError(errno.EIO, 'the network is down')
_FLAWS = {
  'gone': _GONE,
  'empty': b'',
  'text': b'<html>no image</html>',
  'header': b'\xff\xd8\xff nothing',
}


def _picture(index, kind='pixels'):
  """Plain grey, another level for each index."""
  pixels = np.full((40, 40, 3), 10 * index, np.uint8)
  if kind == 'pixels':
    return pixels
  return builders.encode_image(pixels, 'PNG' if index % 3 else 'JPEG')


def _source(kind, flaws=()):
  """Plain pictures with flaws, by index: those cannot be read or decoded."""
  images = [_picture(i, kind) for i in range(_SIZE)]
  for index, flaw in dict(flaws).items():
    half = images[index][: len(images[index]) // 2]
    images[index] = half if flaw == 'cut' else _FLAWS[flaw]
  return image_sources.Source(images)


def _order(config, count=9):
  sampler = batch_sampler.BatchSampler(config, _SIZE, _BATCH, np.arange(_BATCH), True)
  return [sampler.indices(step)[1] for step in range(count)]


@pytest.mark.parametrize(
  'kind, flaws',
  [('encoded', ('gone', 'empty', 'text', 'header', 'cut')), ('pixels', ('gone',) * 5)],
)
def test_the_next_whole_example_replaces_a_damaged_one(config, kind, flaws):
  # 6 to 8 in a row, and the last, whose next one is the first.
  stands_for = {6: 9, 7: 9, 8: 9, 14: 15, 20: 0}
  bad = list(stands_for)
  source = _source(kind, zip(bad, flaws))
  batches = image_sources.batches(config, source, count=4)  # an epoch and a half
  for batch, indices in zip(batches, _order(config, 4), strict=True):
    labels = [stands_for.get(i, i) for i in indices]
    assert batch['image'].shape == (8, 32, 32, 3)
    assert batch['label'].tolist() == labels
    # JPEG's rounding: a level.
    level = batch['image'].astype(int).reshape(8, -1)
    assert np.abs(level - 10 * np.array(labels)[:, None]).max() <= 1
    assert batch['weight'].tolist() == [float(i not in bad) for i in indices]
    assert batch['weight'].dtype == np.float32


def test_damage_leaves_other_rows_as_they_are(config):
  """All rows but the damaged ones are the bytes of an undamaged run."""
  undamaged = image_sources.batches(config, _source('encoded'), count=4)
  damaged = image_sources.batches(config, _source('encoded', {4: 'cut', 11: 'gone'}), count=4)
  for a, b, indices in zip(undamaged, damaged, _order(config)):
    same = ~np.isin(indices, [4, 11])
    for name in a:
      np.testing.assert_array_equal(a[name][same], b[name][same])


@pytest.mark.slow
def test_a_batch_with_damage_depends_on_the_step_only(config):
  source = _source('encoded', {4: 'gone', 5: 'cut', 11: 'cut'})
  batches = image_sources.batches(config, source, 9)
  shares = [np.arange(3), np.arange(3, 8)]
  # A process that begins later, or has other rows, finds the damage elsewhere.
  for start, rows in zip((1, 4), shares):
    part = image_sources.batches(config, source, 9 - start, start=start, rows=rows)
    for a, b in zip(batches[start:], part, strict=True):
      for name in a:
        np.testing.assert_array_equal(a[name][rows], b[name])


def test_a_damaged_example_is_named_once(config, caplog):
  source = _source('pixels', {4: 'gone', 5: 'gone'})
  registry = corruption.Registry(source)
  for _ in range(2):
    image_sources.batches(config, source, 9, registry=registry)
    image_sources.batches(config, source, 9, training=False, registry=registry)
  lines = [r.getMessage() for r in caplog.records]
  assert len(lines) == 2
  assert sum('example 4 cannot be used' in line for line in lines) == 1
  assert sum('example 5 cannot be used' in line for line in lines) == 1
  assert '(2 of test so far)' in lines[1]
  # Once known, it is not even opened.
  source.reads.clear()
  image_sources.batches(config, source, 9, registry=registry)
  assert 3 in source.reads and not {4, 5} & set(source.reads)


def test_rows_are_blank_where_every_example_is_damaged(config):
  source = _source('pixels', {i: 'gone' for i in range(21)})
  (batch,) = image_sources.batches(config, source, count=1)
  assert batch['image'].shape == (8, 32, 32, 3) and not batch['image'].any()
  assert not batch['weight'].any()
  assert ((0 <= batch['label']) & (batch['label'] < _SIZE)).all()


def test_a_repaired_example_stays_excluded(config):
  """What was damaged once stays out: an epoch is all of one kind."""
  source = _source('pixels', {4: 'gone'})
  batches = image_sources.stream(config, source)
  order = iter(_order(config, 30))
  for _, indices in zip(batches, order):
    if 4 in indices:
      break
  source.images[4] = _picture(4)
  count = 0
  for batch, indices in zip(itertools.islice(batches, 12), order):
    assert batch['weight'].tolist() == [float(i != 4) for i in indices]
    count += 4 in indices
  assert count > 2


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['encoded', 'pixels'])
def test_an_outage_marks_no_example_damaged(config, kind, monkeypatch, caplog):
  """Its rows count for nothing; when it is over all is as if it never was."""
  monkeypatch.setattr(batch_reader, '_MAX_OUTAGE', 0.01)
  source = _source(kind)
  batches = image_sources.stream(config, source)
  next(batches)
  images, source.images = source.images, [_OUTAGE] * _SIZE
  lost = [b['weight'].sum() for b in itertools.islice(batches, 8)]
  assert 0.0 in lost
  source.images = images
  for _ in itertools.islice(batches, 8):  # what was made in the outage
    pass
  for step, batch in enumerate(itertools.islice(batches, 6), 17):
    assert (batch['weight'] == 1).all()
    assert batch['label'].tolist() == _order(config, step + 1)[step].tolist()
  assert not any('cannot be used' in r.getMessage() for r in caplog.records)


def test_a_short_outage_is_waited_for(config):
  source = _source('pixels')
  images, source.images = source.images, [_OUTAGE] * _SIZE
  threading.Timer(0.3, setattr, (source, 'images', images)).start()
  for batch in image_sources.batches(config, source, count=3):
    assert (batch['weight'] == 1).all()


def test_a_hundred_damaged_examples_have_one_replacement(config):
  """A hundred in a row, and one example replaces them all."""
  source = image_sources.Source([_GONE] * 100 + [_picture(i % 21) for i in range(100)])
  registry = corruption.Registry(source)
  sampler = batch_sampler.BatchSampler(config, 200, 40, np.arange(40), False)
  for again in range(2):
    source.reads.clear()
    batches = list(pipeline.batches(source, sampler, registry))
    labels = np.concatenate([b['label'] for b in batches])
    weights = np.concatenate([b['weight'] for b in batches])
    assert labels.tolist() == [100] * 100 + list(range(100, 200))
    assert weights.tolist() == [0] * 100 + [1] * 100
    assert not again or min(source.reads) == 100


def test_a_closed_stream_frees_its_source(config, quick_collections):
  """TensorFlow keeps the functions of a graph; what they read must go."""
  source = _source('encoded')
  gone = weakref.ref(source)
  stream = image_sources.stream(config, source)
  next(stream)
  stream.close()
  del source, stream
  gc.collect()
  assert gone() is None


# Ten thousand in `make soak`.
_MUTANTS = int(os.environ.get('ANP_MUTANTS', 750))


@pytest.mark.slow
def test_mutated_files_are_whole_or_replaced(config):
  """No crash, no hang; each row has a picture, and the label that belongs."""
  rng = np.random.default_rng(0)
  options = [{}, {'progressive': True}, {'restart_marker_rows': 1}]
  files = [
    builders.encode_image(
      image_sources.picture(48, 40, i), 'PNG' if i % 5 == 4 else 'JPEG', **options[i % 3]
    )
    for i in range(20)
  ]
  mutants = []
  for index in range(_MUTANTS):
    data = bytearray(files[index % 20])
    if index % 4:  # a quarter stays whole
      for _ in range(rng.integers(1, 4)):
        data[rng.integers(len(data))] = rng.integers(256)
      if index % 8 == 1:
        del data[rng.integers(len(data)) :]
    mutants.append(bytes(data))
  source = image_sources.Source(mutants)
  sampler = batch_sampler.BatchSampler(config, _MUTANTS, 250, np.arange(250), False)
  readable = 0
  for step, batch in enumerate(pipeline.batches(source, sampler)):
    indices = np.arange(250 * step, 250 * step + 250)
    assert batch['image'].shape == (250, 32, 32, 3)
    is_readable = batch['weight'] == 1
    assert (batch['weight'][~is_readable] == 0).all()
    assert is_readable[indices % 4 == 0].all()
    assert (batch['label'][is_readable] == indices[is_readable]).all()
    # At most three damaged ones stand before a whole one.
    ahead = (batch['label'] - indices)[~is_readable] % _MUTANTS
    assert ((1 <= ahead) & (ahead <= 3)).all()
    readable += is_readable.sum()
  assert step == _MUTANTS // 250 - 1
  assert 0.3 * _MUTANTS < readable < 0.9 * _MUTANTS
