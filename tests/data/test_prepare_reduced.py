"""Tests of prepare --shorter_side: sets stored at the size that is used."""

import io
import json

import numpy as np
from PIL import Image
import pytest

from anp_jax.data import sources
from anp_jax.data.input import tensorflow_cpu
from tests import builders, image_sources, prepared


def _files():
  landscape = image_sources.picture(80, 120, 1)
  inks = image_sources.picture(60, 90, 3).convert('CMYK')
  return {
    'train/a/large.png': builders.encode_image(landscape),
    'train/a/photo.jpg': builders.encode_image(landscape, 'JPEG', quality=95),
    'train/a/inks.jpg': image_sources.without_adobe(builders.encode_image(inks, 'JPEG')),
    'train/a/turned.jpg': builders.encode_image(landscape, 'JPEG', exif=builders.exif(6)),
    'train/a/equal.jpg': builders.encode_image(image_sources.picture(90, 40, 2), 'JPEG'),
    'train/b/small.png': builders.encode_image(image_sources.picture(39, 200, 2)),
  }


def _prepare(tmp_path, capsys, *arguments):
  """Reduces the files to 40 pixels; returns what is printed and the stored bytes by name."""
  root = builders.write_tree(tmp_path / 'tree', _files())
  out = prepared.make(capsys, root, tmp_path, '--eval_split=', '--shorter_side=40', *arguments)
  return out, {name: data for name, data, _ in prepared.examples(tmp_path)}


def _reduced(pixels, width, height):
  """Independent: Pillow's antialiased bicubic filter."""
  image = Image.fromarray(np.asarray(pixels)).resize((width, height), Image.Resampling.BICUBIC)
  return np.asarray(image, int)


def _decoded(data):
  return np.asarray(Image.open(io.BytesIO(data)).convert('RGB'), int)


def test_larger_images_are_reduced_and_others_copied(tmp_path, capsys):
  out, stored = _prepare(tmp_path, capsys, '--quality=80')
  assert 'train: 4 images reduced to 40 pixels on their shorter side' in out
  files = _files()
  for name in ('a/equal.jpg', 'b/small.png'):
    assert stored[name] == files[f'train/{name}']
  landscape = image_sources.pixels(80, 120, 1)
  np.testing.assert_array_equal(_decoded(stored['a/large.png']), _reduced(landscape, 60, 40))
  photo = Image.open(io.BytesIO(stored['a/photo.jpg']))
  assert (photo.format, photo.size) == ('JPEG', (60, 40))
  # The tables of libjpeg's quality 80.
  plain = Image.open(io.BytesIO(builders.encode_image(landscape, 'JPEG', quality=80)))
  assert photo.quantization == plain.quantization
  # Lossy: a few levels of a smooth picture.
  assert np.abs(_decoded(stored['a/photo.jpg']) - _reduced(landscape, 60, 40)).mean() < 3
  # Upright, as `prepare` stores rotated files by default: 90 degrees clockwise.
  turned = Image.open(io.BytesIO(stored['a/turned.jpg']))
  assert turned.size == (40, 60) and not turned.getexif()
  want = _reduced(np.rot90(landscape, -1), 40, 60)
  assert np.abs(_decoded(stored['a/turned.jpg']) - want).mean() < 3
  metadata = json.loads((prepared.folder(tmp_path) / 'metadata.json').read_text())
  assert (metadata['shorter_side'], metadata['quality']) == (40, 80)
  assert metadata['files']['train']['reduced'] == 4
  assert metadata['files']['train']['converted'] == 2  # the inks and the turned one


@pytest.mark.parametrize('action', ['keep', 'convert'])
def test_pictures_are_those_that_training_sees_in_the_files(action, tmp_path, capsys):
  """A kept file's orientation is ignored, and the inks of a JPEG are multiplied."""
  policy = f'--policy=cmyk={action},rotated=keep'
  _, stored = _prepare(tmp_path, capsys, policy, '--quality=100')
  for name, size in (('a/inks.jpg', (60, 40)), ('a/turned.jpg', (60, 40))):
    image = Image.open(io.BytesIO(stored[name]))
    assert (image.mode, image.size) == ('RGB', size) and not image.getexif()
    file = _files()[f'train/{name}']
    trained_on = tensorflow_cpu.load().image.decode_jpeg(
      file, channels=3, dct_method='INTEGER_ACCURATE'
    )
    # Lossy; inks turned over, as Pillow has them, would be 60 levels away.
    assert np.abs(_decoded(stored[name]) - _reduced(trained_on, *size)).mean() < 3


@pytest.mark.parametrize(
  'keys, side',
  [
    ({'resize': 40, 'image_size': 32}, 0),
    ({'resize': 41, 'image_size': 32}, 41),
    ({'resize': 40, 'image_size': 32, 'augment': 'scale', 'scale_range': (32, 48)}, 48),
  ],
)
def test_a_run_that_enlarges_stored_images_is_warned(keys, side, tmp_path, capsys, caplog):
  _prepare(tmp_path, capsys)
  changes = {'source': 'tfds:anp_folder/x', 'dir': str(tmp_path), 'eval_split': 'train', **keys}
  config = builders.config({f'data.{key}': value for key, value in changes.items()})
  assert len(sources.open_source(config, training=True)) == 6
  lines = [r.getMessage() for r in caplog.records if 'shorter_side' in r.getMessage()]
  assert len(lines) == (side > 0)
  if side:
    assert f'enlarges its images to {side} pixels' in lines[0]


def test_the_disk_needs_room_for_what_is_stored_only(tmp_path, capsys, monkeypatch):
  builders.use_disk(monkeypatch, sum(map(len, _files().values())) - 1)
  _prepare(tmp_path, capsys)
