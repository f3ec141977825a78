"""Tests of one rule: what training decodes and what prediction decodes is one.

Each file has Pillow's pixels in both, or is refused in both.
"""

import io
from unittest import mock

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.image_files import images
from anp_jax.data.input import decode_pillow
from anp_jax.data.sources import mapped
from tests import builders, image_files, image_sources


def _config(cached='none', folder=''):
  keys = {'image_size': 32, 'resize': 36, 'cache': cached, 'max_damaged': 1.0, 'dir': str(folder)}
  return builders.config({f'data.{key}': value for key, value in keys.items()})


def _trained(config, files):
  """Pixels and weights of files in one stream, and the files that it names."""
  source = image_sources.Source(files)
  batch = image_sources.evaluated(config, mapped.wrap(source, config))
  return batch['image'], batch['weight'], source.named


@pytest.fixture(scope='module')
def decoded():
  images, weights, named = _trained(_config(), list(image_files.WHOLE.values()))
  return {
    name: (image, weight, i in named)
    for i, (name, image, weight) in enumerate(zip(image_files.WHOLE, images, weights))
  }


def _pillow(file):
  """The picture as Pillow alone makes it, transparency dropped."""
  with Image.open(io.BytesIO(file)) as image:
    if image.mode.startswith('I;16'):
      return Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    if image.format == 'GIF' and 'transparency' in image.info:
      pixels = np.array(image.convert('RGBA'))
      pixels[pixels[..., 3] == 0] = 0
      return Image.fromarray(pixels[..., :3])
    if image.mode in ('LA', 'RGBA', 'P', 'PA'):
      return Image.fromarray(np.asarray(image.convert('RGBA'))[..., :3])
    return image.convert('RGB')


@pytest.mark.parametrize('name', image_files.WHOLE)
def test_a_whole_file_is_trained_and_predicted_as_pillow_has_it(decoded, name):
  file = image_files.WHOLE[name]
  trained, weight, is_named = decoded[name]
  assert weight == 1 and not is_named
  read = decode_pillow.eval_decoder(_config())
  np.testing.assert_array_equal(trained, read(file))
  want = read(builders.encode_image(_pillow(file).convert('RGB'), 'PNG'))
  # The product of inks is rounded.
  tolerance = 2 if 'cmyk' in name else 0
  assert np.abs(trained.astype(int) - want).max() <= tolerance
  assert want.std() > 5


@pytest.mark.parametrize('cached', ['none', 'mapped'])
def test_damaged_files_are_named_in_training_and_in_prediction(cached, tmp_path):
  config = _config(cached, tmp_path)
  files = [image_files.PNG, *image_files.DAMAGED.values()]
  _, weights, named = _trained(config, files)
  weight_of = dict(zip(['png', *image_files.DAMAGED], weights))
  assert [name for name in weight_of if weight_of[name]] == ['png']
  assert sorted(named) == list(range(1, len(files)))
  read = decode_pillow.eval_decoder(config)
  for name, file in image_files.DAMAGED.items():
    with pytest.raises(ValueError) as e:
      read(file)
    assert str(e.value) and '\n' not in str(e.value), name


def test_no_program_is_started_for_postscript(monkeypatch):
  """Pillow has Ghostscript draw an EPS, under any suffix."""
  started = []
  monkeypatch.setattr('subprocess.check_call', started.append)
  monkeypatch.setattr('subprocess.Popen', started.append)
  monkeypatch.setattr('shutil.which', lambda name: f'/usr/bin/{name}')
  with pytest.raises(ValueError, match='format'):
    decode_pillow.eval_decoder(_config())(image_files.DAMAGED['postscript'])
  assert not started


def test_a_lack_of_memory_is_no_damage(monkeypatch):
  error = OSError('out of memory error when reading image file')
  monkeypatch.setattr('PIL.ImageFile.ImageFile.load', mock.Mock(side_effect=error))
  with pytest.raises(MemoryError):
    images.decode_shrunk(image_files.PNG, 32, 100)


def test_one_frame_of_a_gif_is_decoded():
  """TensorFlow would decode all: a file of a megabyte may fill the memory."""
  file = decode_pillow.for_tensorflow(image_files.WHOLE['gif of many frames'], 100)
  assert file.startswith(b'BM')
  assert len(file) == 54 + (3 * image_files.WIDTH + 3) // 4 * 4 * image_files.HEIGHT


def test_photographs_go_to_tensorflow_as_they_are():
  for name in ('jpeg', 'jpeg progressive', 'jpeg cmyk', 'png', 'png P'):
    assert decode_pillow.for_tensorflow(image_files.WHOLE[name], 100) is image_files.WHOLE[name]
