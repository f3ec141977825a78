"""Tests of pipeline: what a process reads, decodes and cuts at each step."""

import io
import itertools
import os

from hypothesis import strategies as st
import numpy as np
from PIL import Image
import pytest

from anp_jax.data.input import batch_sampler, pipeline
from tests import builders, image_sources, launching, showing


@pytest.fixture(scope='module', params=['encoded', 'pixels'])
def source(request):
  """21 pictures of several sizes, as files and as arrays."""
  images = image_sources.pixels_of_many_sizes()
  if request.param == 'encoded':
    kinds = itertools.cycle(['JPEG', 'JPEG', 'PNG'])
    images = [builders.encode_image(image, next(kinds)) for image in images]
  return image_sources.Source(images)


def _same(a, b):
  assert a.keys() == b.keys() == {'image', 'label', 'weight', 'row'}
  for name in a:
    assert a[name].dtype == b[name].dtype
    np.testing.assert_array_equal(a[name], b[name], name)


# Which examples.


def test_batch_of_a_step_does_not_depend_on_the_start(config, source):
  config.data.resize = 40
  first = image_sources.batches(config, source, 5)
  for start in (1, 3):
    for a, b in zip(image_sources.batches(config, source, 2, start=start), first[start:]):
      _same(a, b)
  assert {k: (v.shape, v.dtype) for k, v in first[0].items()} == {
    'image': ((8, 32, 32, 3), np.uint8),
    'label': ((8,), np.int32),
    'weight': ((8,), np.float32),
    'row': ((8,), np.int32),
  }
  for batch in first:
    assert batch['row'].tolist() == list(range(8))
    assert (batch['weight'] == 1).all()
  config.seed = 1
  other = image_sources.batches(config, source, 1)[0]
  assert (other['label'] != first[0]['label']).any()


@pytest.mark.parametrize('training', [True, False])
def test_shares_of_processes_are_parts_of_one_batch(config, source, training):
  batches = image_sources.batches(config, source, 3, training=training)
  shares = [
    image_sources.batches(config, source, 3, training=training, rows=np.array(rows))
    for rows in ([0, 1, 6, 7], [2], [3, 4, 5])
  ]
  assert len(batches) == 3
  assert training or np.ravel([b['weight'] for b in batches]).tolist() == [1] * 21 + [0] * 3
  for step, batch in enumerate(batches):
    joined = {k: np.concatenate([share[step][k] for share in shares]) for k in batch}
    _same({k: v[np.argsort(joined['row'])] for k, v in joined.items()}, batch)


@builders.fuzzed(20, st.integers(1, 300), st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_every_example_once_an_epoch_over_processes(config, size, counts):
  *cuts, batch = np.cumsum(counts).tolist()  # an epoch ends anywhere in it
  for training in (True, False):
    samplers = [
      batch_sampler.BatchSampler(config, size, batch, rows, training)
      for rows in np.split(np.arange(batch), cuts)
    ]
    steps = -(-3 * size // batch) if training else samplers[0].steps
    rows_read = np.concatenate(
      [np.array(sampler.indices(s)) for s in range(steps) for sampler in samplers], 1
    )
    positions, indices, weights = rows_read[:, np.argsort(rows_read[0])]
    assert positions.tolist() == list(range(steps * batch))
    for epoch in range(3 if training else 1):
      part = slice(epoch * size, (epoch + 1) * size)
      assert sorted(indices[part]) == list(range(size))
      assert (weights[part] == 1).all()
    assert training or not weights[size:].any()


# What they look like.


def _pillow(file):
  return np.asarray(Image.open(io.BytesIO(file)).convert('RGB')).astype(int)


def _reference(image, box, flip, side):
  """Pillow alone: the box, resized."""
  top, left, height, width = (int(v) for v in box)
  cut = Image.fromarray(image).crop((left, top, left + width, top + height))
  cut = np.asarray(cut.resize((side, side), Image.Resampling.BILINEAR))
  return cut[:, ::-1] if flip else cut


@pytest.mark.parametrize('kind', ['pixels', 'PNG', 'JPEG'])
@pytest.mark.parametrize('training', [True, False])
def test_views_are_cut_resized_and_flipped(config, kind, training):
  images = [image_sources.pixels(50 + 9 * i, 120 - 8 * i, i) for i in range(8)]
  stored = images
  if kind != 'pixels':
    # Halved colour would be interpolated from inside of the crop only.
    options = {'subsampling': 0} if kind == 'JPEG' else {}
    stored = [builders.encode_image(image, kind, **options) for image in images]
    images = [_pillow(file).astype(np.uint8) for file in stored]
  config.data.resize = 40
  config.data.decode = 'exact'
  source = image_sources.Source(stored)
  sampler = batch_sampler.BatchSampler(config, 8, 8, np.arange(8), training)
  positions, indices, _ = sampler.indices(0)
  sizes = np.array([images[i].shape[:2] for i in indices])
  views = sampler.views(positions, sizes)
  batch = next(pipeline.batches(source, sampler))
  assert batch['label'].tolist() == indices.tolist()
  assert not training or 0 < views.flips.sum() < 8
  for got, index, box, flip in zip(batch['image'], indices, views.boxes, views.flips):
    want = _reference(images[index], box, flip, 32)
    off = np.abs(got.astype(int) - want)
    # Pillow rounds between its two passes, TensorFlow once at the end: one
    # level.
    most = 0 if kind == 'pixels' else 1
    assert off.max() <= most and off.mean() <= 0.3 * most


# How it behaves as a program.


def _program(code, folder, monkeypatch):
  """Runs code in a fresh Python, with the settings of a plain terminal."""
  for name in [n for n in os.environ if n.startswith(('TF_', 'JAX_'))]:
    monkeypatch.delenv(name)
  return launching.python('-c', _HEAD + code, folder, JAX_PLATFORMS='cpu')


_HEAD = """
import os
import sys
import jax
import numpy as np
from anp_jax.config import command_line
from anp_jax.parallel import mesh
from anp_jax.data.input import batch_sampler
from anp_jax.data.input import feed
from anp_jax.data.input import pipeline
from anp_jax.data.input import random_batches
from anp_jax.data import sources
from anp_jax.data.sources import listings

def stream(**overrides):
  overrides = {'data.' + k: v for k, v in overrides.items()}
  config = command_line.load('configs/resnet_anp.py:tiny', overrides)
  source = sources.open_source(config, True)
  placement = feed.Placement.create(mesh.batch_sharding(mesh.create(config)), 8)
  rows = np.arange(8)
  sampler = batch_sampler.BatchSampler(config, len(source), 8, rows, True)
  if source.kind == 'synthetic':
    return random_batches.batches(sampler, 9, placement)
  return feed.on_device(pipeline.batches(source, sampler), rows, placement)
"""


@pytest.mark.slow
def test_exact_decoding_alone_takes_tensorflow(tmp_path, tree, monkeypatch):
  showing.save_arrays(tmp_path / 'set.npz', range(9), side=40)
  done = _program(
    """
whole = {'image_size': '40', 'resize': '40', 'augment': 'none'}
for overrides in (
  {'source': 'synthetic'},
  {'source': 'arrays', 'path': sys.argv[1] + '/set.npz', **whole},
  {'source': 'digits'},
  {'source': 'folder', 'path': sys.argv[1] + '/tree'},
):
  batches = feed.Feed(stream(**overrides), 2)
  for _ in range(3):
    next(batches)
  if overrides['source'] in ('synthetic', 'arrays'):
    print('cv2' in sys.modules)
print([m for m in sys.modules if m.split('.')[0].startswith('tensorflow')])
""",
    tmp_path,
    monkeypatch,
  )
  # Without OpenCV, too, where nothing is resized.
  assert (done.stdout, done.stderr, done.returncode) == ('False\nFalse\n[]\n', '', 0)


@pytest.fixture
def tree(tmp_path):
  kinds = itertools.cycle(['JPEG', 'PNG'])
  files = {
    f'class{i % 3}/{i}.{kind.lower()}': builders.encode_image(
      image_sources.pixels(300, 200, i), kind
    )
    for i, kind in zip(range(12), kinds)
  }
  return builders.write_tree(tmp_path / 'tree', files)


@pytest.mark.slow
def test_decoding_is_silent_sees_no_accelerator_and_does_not_hang_the_exit(tree, monkeypatch):
  """With streams left open: TensorFlow waits for functions that Python no longer runs."""
  (tree / 'class1' / '4.jpeg').write_bytes(b'\xff\xd8\xff nothing')
  done = _program(
    """
import time

keys = {'source': 'folder', 'path': sys.argv[1], 'decode': 'exact'}
thread = feed.Feed(stream(**keys), 2)
for _ in range(8):
  next(thread)
read = listings.StoredImages.read

def slowly(self, indices):
  time.sleep(0.5)  # so that the exit finds it at work
  return read(self, indices)

listings.StoredImages.read = slowly
batches = stream(**keys)
next(batches)
import tensorflow as tf
print([tf.config.get_visible_devices(kind) for kind in ('GPU', 'TPU')])
print(os.environ['TF_CPP_MIN_LOG_LEVEL'])
sys.exit('an error')
""",
    tree,
    monkeypatch,
  )
  # JAX's level, for JAX and for child processes.
  assert (done.stdout, done.returncode) == ('[[], []]\n1\n', 1)
  *damage, last = done.stderr.splitlines()  # each stream names it once
  assert last == 'an error' and 1 <= len(damage) <= 2
  assert all('class1/4.jpeg cannot be used' in line for line in damage)
