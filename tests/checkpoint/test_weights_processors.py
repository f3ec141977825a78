"""How images are prepared for published weights, by their own files."""

import pytest

from anp_jax.checkpoint.weights import published_weights
from tests import builders, weight_files


@pytest.mark.parametrize(
  'processor, want',
  [
    (weight_files.CONVNEXT, (224, 256, 'bicubic', weight_files.MEAN, weight_files.STD)),
    (
      weight_files.CONVNEXT | {'size': {'shortest_edge': 288}, 'crop_pct': 0.95},
      (288, 303, 'bicubic', weight_files.MEAN, weight_files.STD),
    ),
    (  # 224 / 0.9 is 248.9; timm and transformers round it down
      weight_files.CONVNEXT | {'crop_pct': 0.9},
      (224, 248, 'bicubic', weight_files.MEAN, weight_files.STD),
    ),
    (weight_files.BIT, (64, 72, 'bilinear', (127.5, 63.75, 191.25), (127.5, 51.0, 255.0))),
    (
      weight_files.BIT | {'do_center_crop': False, 'do_normalize': False},
      (72, 72, 'bilinear', (0, 0, 0), (255, 255, 255)),
    ),
    (
      weight_files.BIT | {'do_rescale': False},
      (64, 72, 'bilinear', (0.5, 0.25, 0.75), (0.5, 0.2, 1)),
    ),
    (None, (224, 256, 'bilinear', weight_files.MEAN, weight_files.STD)),
  ],
)
def test_what_a_processor_says(tmp_path, processor, want):
  path = weight_files.folder(tmp_path, processor)
  for place in (path, tmp_path):
    weights = published_weights.read(str(place))
    assert weight_files.images(weights.keys) == want
    assert weights.notes == ()


def test_what_timm_says(tmp_path):
  weight_files.folder(
    tmp_path,
    pretrained_cfg={
      'input_size': [3, 288, 288],
      'crop_pct': 0.95,
      'interpolation': 'bicubic',
      'mean': [0.5, 0.5, 0.5],
      'std': [0.5, 0.5, 0.5],
    },
    label_names=['a', 'b', 'c'],
    label_descriptions={'b': 'bee'},
  )
  weights = published_weights.read(str(tmp_path))
  half = (127.5, 127.5, 127.5)
  assert weight_files.images(weights.keys) == (288, 303, 'bicubic', half, half)
  assert weights.names == ('a', 'bee', 'c')


@pytest.mark.parametrize(
  'change, want',
  [
    ({'crop_size': {'shortest_edge': 48}}, 48),
    ({'crop_size': [48, 48]}, 48),
    ({'crop_size': 48}, 48),
    ({'crop_size': None}, 72),
    ({'size': [72, 72]}, 64),
  ],
)
def test_all_forms_of_a_size(tmp_path, change, want):
  weight_files.folder(tmp_path, weight_files.BIT | change)
  keys = published_weights.read(str(tmp_path)).keys
  assert (keys['data.image_size'], keys['data.resize']) == (want, 72)


@pytest.mark.parametrize(
  'key, value',
  [
    ('size', {'longest_edge': 72}),
    ('size', [3, 72, 72]),
    ('size', 'x'),
    ('crop_size', {'height': '64'}),
    ('crop_size', True),
    ('crop_pct', 'x'),
    ('crop_pct', float('nan')),
    ('crop_pct', 1e-320),
    ('image_mean', 0.5),
    ('image_mean', [10**400, 0, 0]),
    ('image_std', 'x'),
    ('image_std', [1, 1]),
    ('rescale_factor', '1/255'),
  ],
)
def test_another_form_of_a_processor_is_one_line(tmp_path, key, value):
  weight_files.folder(tmp_path, weight_files.BIT | {key: value})
  line = builders.refusal(published_weights.read, str(tmp_path))
  where = tmp_path / 'preprocessor_config.json'
  assert line.startswith(f'{where}: {key}={value!r}: expected ')


@pytest.mark.parametrize('key, value', [('input_size', 'x'), ('mean', 0.5), ('std', [1, None, 1])])
def test_another_form_of_timms_is_one_line(tmp_path, key, value):
  weight_files.folder(tmp_path, pretrained_cfg={key: value})
  builders.assert_refused(rf'config\.json: {key}=', published_weights.read, str(tmp_path))


@pytest.mark.parametrize(
  'processor, pretrained, want',
  [
    (weight_files.CONVNEXT, {}, False),
    (weight_files.CONVNEXT | {'size': {'shortest_edge': 384}}, {}, True),
    (weight_files.CONVNEXT | {'size': {'height': 224, 'width': 224}}, {}, True),
    (None, {'crop_mode': 'squash'}, True),
    (None, {'crop_mode': 'center'}, False),
  ],
)
def test_whole_images_are_squeezed_where_files_say_so(tmp_path, processor, pretrained, want):
  weight_files.folder(tmp_path, processor, pretrained_cfg=pretrained)
  weights = published_weights.read(str(tmp_path))
  assert weights.keys['data.stretch'] == want and not weights.notes


def test_what_is_done_otherwise_is_said(tmp_path):
  weight_files.folder(tmp_path, weight_files.CONVNEXT | {'resample': 1})
  (note,) = published_weights.read(str(tmp_path)).notes
  assert 'resample 1' in note


# Of google/efficientnet-b0: the roots of ImageNet's deviations, by which its
# processor divides twice.
_EFFICIENTNET = {
  'image_processor_type': 'EfficientNetImageProcessor',
  'include_top': True,
  'size': {'height': 224, 'width': 224},
  'do_center_crop': False,
  'resample': 2,
  'image_mean': [0.485, 0.456, 0.406],
  'image_std': [0.47853944, 0.4732864, 0.47434163],
}


@pytest.mark.parametrize(
  'change, mean, std',
  [
    ({}, weight_files.MEAN, weight_files.STD),
    ({'include_top': False}, weight_files.MEAN, (122.0276, 120.688, 120.9571)),
    # (x / 255 - 1 - mean) / std
    ({'rescale_offset': True}, [m + 255 for m in weight_files.MEAN], weight_files.STD),
    ({'do_normalize': False}, (0, 0, 0), (122.0276, 120.688, 120.9571)),
  ],
)
def test_an_efficientnets_processor_divides_twice(tmp_path, change, mean, std):
  weight_files.folder(tmp_path, _EFFICIENTNET | change)
  keys = published_weights.read(str(tmp_path)).keys
  assert keys['data.mean'] == pytest.approx(mean, abs=1e-4)
  assert keys['data.std'] == pytest.approx(std, abs=1e-4)
