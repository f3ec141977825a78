"""Tests of decode_pillow: the pixels of TensorFlow's decoders, to the bit."""

import io

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.input import augment, batch_sampler, decode_pillow, pipeline
from anp_jax.data.sources import mapped
from tests import builders, image_files, image_sources


def _picture(height, width, seed, mode='RGB'):
  """Coarse enough for a JPEG, and with colours that change at every edge."""
  detail = height // 6 + 2, width // 6 + 2
  return image_sources.picture(height, width, seed, detail, mode)


def _evaluated(config, files):
  """By TensorFlow, as evaluation has them; none of them is damaged."""
  batch = image_sources.evaluated(config, mapped.wrap(image_sources.Source(files), config))
  assert batch['weight'].all()
  return batch['image']


def _assert_equal(config, files):
  read = decode_pillow.eval_decoder(config)
  for i, want in enumerate(_evaluated(config, files)):
    np.testing.assert_array_equal(read(files[i]), want, str(i))


_SIZES = (
  (40, 40),
  (47, 61),
  (20, 25),
  (31, 90),
  (90, 130),
  (121, 97),
  (260, 331),
  (530, 300),
  (517, 701),
)


@pytest.mark.parametrize(
  'decode, subsampling, cached',
  [
    *((d, s, 'none') for d in ('fast', 'exact') for s in (0, 2)),
    ('fast', 1, 'none'),
    ('bilinear', 2, 'none'),
    ('fast', 2, 'mapped'),
  ],
)
def test_jpegs_of_any_size_and_sampling(config, decode, subsampling, cached):
  """Colour at half the resolution is where the two decoders would part."""
  config.data.decode, config.data.cache = decode, cached
  config.data.image_size, config.data.resize = 32, 36
  files = [
    builders.encode_image(
      _picture(*size, i), 'JPEG', subsampling=subsampling, progressive=bool(i % 2)
    )
    for i, size in enumerate(_SIZES)
  ]
  files.append(builders.encode_image(_picture(517, 701, 9), 'PNG'))
  files.append(builders.encode_image(_picture(121, 97, 9, 'L'), 'JPEG'))
  _assert_equal(config, files)


def test_other_formats_and_modes(config):
  """In the exact mode; test_kinds_of_files has the fast one."""
  config.data.decode = 'exact'
  config.data.image_size, config.data.resize = 32, 40
  names = ('png LA', 'png P', 'png 1', 'bmp', 'gif', 'jpeg grey')
  _assert_equal(config, [image_files.WHOLE[name] for name in names])


@pytest.mark.parametrize('side', [60, 300])
def test_inks_with_and_without_the_mark_of_adobe(config, side):
  config.data.image_size, config.data.resize = 32, 32
  rng = np.random.default_rng(0)
  inks = Image.fromarray(rng.integers(0, 256, (9, 9, 4), np.uint8), 'CMYK')
  marked = builders.encode_image(inks.resize((side, side)), 'JPEG', quality=90)
  plain = image_sources.without_adobe(marked)
  assert b'Adobe' in marked and b'Adobe' not in plain
  _assert_equal(config, [marked, plain])


@pytest.mark.parametrize('decode', ['bilinear', 'bicubic'])
@pytest.mark.parametrize('upright, stretch', [(False, False), (True, False), (False, True)])
def test_whole_image_is_resized_then_cropped(config, decode, upright, stretch):
  """By Pillow in two steps, as transformers and torchvision do it."""
  config.data.decode, config.data.stretch = decode, stretch
  config.data.image_size, config.data.resize = 32, 37
  files = [builders.encode_image(_picture(*size, i), 'JPEG') for i, size in enumerate(_SIZES)]
  files.append(builders.encode_image(_picture(50, 70, 0), 'PNG'))
  read = decode_pillow.eval_decoder(config, upright)
  for file in files:
    image = Image.open(io.BytesIO(file))
    sides = [37 if stretch else int(37 * n / min(image.size)) for n in image.size]
    left, top = ((n - 32) // 2 for n in sides)
    resized = image.resize(sides, Image.Resampling[decode.upper()])
    want = np.asarray(resized.crop((left, top, left + 32, top + 32)), int)
    gaps = np.abs(read(file) - want)
    # Pillow takes a box in float32: some values are rounded the other way.
    assert gaps.max() <= 3 and gaps.mean() < 0.05


def test_random_crops_are_resampled(config):
  """A linear ramp stays one: each pixel's value is its place in the image."""
  config.data.decode, config.data.image_size = 'bilinear', 16
  ramp = np.tile(np.arange(200, dtype=np.uint8)[:, None, None], (1, 200, 3))
  source = image_sources.Source([builders.encode_image(Image.fromarray(ramp), 'PNG')])
  sampler = batch_sampler.BatchSampler(config, 1, 4, np.arange(4), True)
  images = next(pipeline.batches(source, sampler))['image']
  positions = np.arange(4)
  draws = augment.train_draws(config, positions)
  boxes = augment.train_views(config, draws, np.full((4, 2), 200)).boxes
  for image, (top, _, height, _) in zip(images, boxes, strict=True):
    places = top + (np.arange(16) + 0.5) * height / 16 - 0.5
    inside = (places > height / 16) & (places < 199 - height / 16)
    gaps = np.abs(image[..., 0] - places[:, None])[inside]
    assert inside.sum() > 8 and gaps.max() <= 0.51


def test_a_pointer_of_git_lfs_is_named(config, caplog):
  """Whoever cloned without Git LFS has such files under the images' names."""
  pointer = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n'
  file = builders.encode_image(_picture(90, 80, 0), 'JPEG')
  batch = image_sources.evaluated(config, image_sources.Source([file, pointer]))
  assert batch['weight'].tolist() == [1, 0]
  assert 'a pointer of Git LFS' in caplog.text


def test_exact_views_of_arrays_are_pillows(config):
  """The picture's shorter side brought to `resize`, the centre of it."""
  config.data.decode = 'exact'
  config.data.source = 'digits'
  config.data.image_size = config.data.resize = 32
  image = _picture(48, 64, 0)
  got = decode_pillow.eval_decoder(config)(builders.encode_image(image, 'PNG'))
  want = image.crop((8, 0, 56, 48)).resize((32, 32), Image.Resampling.BILINEAR)
  np.testing.assert_array_equal(got, np.asarray(want))


@pytest.mark.parametrize(
  'orientation, cached', [*((i, 'none') for i in range(1, 9)), (6, 'mapped')]
)
def test_upright(config, orientation, cached):
  """A picture turned away and tagged so is seen as the picture itself."""
  config.data.image_size, config.data.resize = 32, 36
  config.data.cache = cached
  picture = _picture(61, 90, 1)
  # EXIF: where row 0 and column 0 of the file are in the upright picture.
  array = np.asarray(picture)
  stored = {
    1: array,
    2: array[:, ::-1],
    3: array[::-1, ::-1],
    4: array[::-1],
    5: array.transpose(1, 0, 2),
    6: array.transpose(1, 0, 2)[::-1],
    7: array.transpose(1, 0, 2)[::-1, ::-1],
    8: array.transpose(1, 0, 2)[:, ::-1],
  }[orientation]
  image = Image.fromarray(np.ascontiguousarray(stored))
  tagged = builders.encode_image(image, 'PNG', exif=builders.exif(orientation))
  want = decode_pillow.eval_decoder(config)(builders.encode_image(picture, 'PNG'))
  got = decode_pillow.eval_decoder(config, upright=True)(tagged)
  np.testing.assert_array_equal(got, want)
