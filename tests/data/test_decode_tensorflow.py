"""Tests of decode_tensorflow: the pixels of a box; test_decode_pillow has the resize."""

import importlib
import io
import itertools
import sys

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.input import augment, batch_sampler, pipeline, tensorflow_cpu
from tests import builders, image_sources


class _Boxes(batch_sampler.BatchSampler):
  """Cuts boxes that a test sets, none of them flipped."""

  boxes = None

  def views(self, positions, sizes):
    return augment.Views(self.boxes, np.zeros(len(positions), bool))


@pytest.mark.parametrize('subsampling', [0, 1, 2])
def test_boxes_near_the_edges_have_the_whole_pictures_pixels(config, monkeypatch, subsampling):
  """Halved colour of a box's first and last column depends on the next one."""
  side = 20
  config.data.decode = 'exact'
  config.data.image_size = config.data.resize = side
  # A decoder begins at a block of 8 or 16 columns.
  gaps = np.array([*itertools.product((0, 1, 8, 16, 17), (0, 1, 2, 3))])
  # Boxes of the result's size, so that nothing is resized.
  files = [
    builders.encode_image(
      builders.random_pixels(side + top + 1, side + left + right, (top, left, right)),
      'JPEG',
      subsampling=subsampling,
    )
    for top, (left, right) in enumerate(gaps)
  ]
  boxes = np.array([(top, left, side, side) for top, (left, _) in enumerate(gaps)])
  monkeypatch.setattr(_Boxes, 'boxes', boxes)
  rows = np.arange(len(files))
  sampler = _Boxes(config, len(files), len(files), rows, False)
  (batch,) = pipeline.batches(image_sources.Source(files), sampler)
  for image, file, (top, left, *_), gap in zip(batch['image'], files, boxes, gaps):
    picture = np.asarray(Image.open(io.BytesIO(file)))
    want = picture[top : top + side, left : left + side]
    np.testing.assert_array_equal(image, want, err_msg=str((top, *gap)))


def test_tensorflow_is_imported_without_keras(tmp_path, monkeypatch):
  builders.write_tree(
    tmp_path,
    {
      'tensorflow.py': b"""
class config:
  set_visible_devices = lambda devices, kind: None
try:
  import keras
except ImportError:
  keras = None
""",
      'keras.py': b'',
    },
  )
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('tensorflow', 'keras'):
    monkeypatch.setitem(sys.modules, name, None)  # which is undone
    del sys.modules[name]
  assert tensorflow_cpu.load.__wrapped__().keras is None
  assert importlib.import_module('keras').__file__ == str(tmp_path / 'keras.py')
