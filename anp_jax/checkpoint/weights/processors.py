"""How images are prepared for published weights, by their own files.

A folder as transformers writes it has preprocessor_config.json; timm's have it
in config.json. The values that result are those of `anp_jax.config`.
"""

import os

from anp_jax import config as config_lib
from anp_jax.config import rules
from anp_jax.system import files

# ImageNet's, with which torchvision, timm and transformers train; of 0..1.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FILTERS = {'bilinear': 2, 'bicubic': 3}  # as Pillow numbers them
_LEAST_SHARE = 0.01  # of the shorter side that a crop keeps
# From this size on ConvNeXt's processor squeezes whole images into a square.
_SQUEEZED = 384
# Sides of EfficientNet-Lite's images, which were resized to 32 pixels more (github.com/
# tensorflow/tpu, efficientnet/lite); its files of weights have no processor.
_LITE_SIDES = {
  'tf_efficientnet_lite0': 224,
  'tf_efficientnet_lite1': 240,
  'tf_efficientnet_lite2': 260,
}


def read(folder: str, architecture: dict, model: str) -> tuple[dict, str]:
  """Reads the processor of a folder with weights.

  Args:
    folder: folder of the weights.
    architecture: the folder's config.json; {} for a file by itself.
    model: name of their network.

  Returns:
    The processor in transformers' form, {} where nothing says; and the path of
    the file that has it.

  Raises:
    ConfigError: if a processor has another form.
  """
  path = os.path.join(folder, 'preprocessor_config.json')
  processor = files.read_json_object(path) if architecture else {}
  timm = architecture.get('pretrained_cfg')
  if not processor and not timm and model in _LITE_SIDES:
    return {
      'size': _LITE_SIDES[model] + 32,
      'crop_size': _LITE_SIDES[model],
      'image_mean': (127 / 255,) * 3,
      'image_std': (128 / 255,) * 3,
    }, path
  if processor or not isinstance(timm, dict):
    return processor, path
  path = os.path.join(folder, 'config.json')
  side = timm.get('input_size')
  if isinstance(side, list) and len(side) == 3:
    side = side[-1]  # after the channels
  return {
    'size': min(_sides(path, 'input_size', side), default=224),
    'crop_pct': timm.get('crop_pct'),
    'crop_mode': timm.get('crop_mode'),
    'resample': FILTERS.get(str(timm.get('interpolation')), 3),
    'image_mean': _colours(path, 'mean', timm.get('mean') or _MEAN),
    'image_std': _colours(path, 'std', timm.get('std') or _STD),
  }, path


def images(processor: dict, path: str, default_filter: str) -> tuple[dict, tuple[str, ...]]:
  """Values of the config for how images are prepared, and notes for people.

  Args:
    processor: processor from `read`.
    path: path of the file that has it.
    default_filter: one of FILTERS, used where there is no processor.

  Raises:
    ConfigError: if a processor has another form.
  """
  normalisation_keys = normalisation(processor, path)
  if not processor:
    number = FILTERS[default_filter]
    processor = {'size': 224, 'crop_pct': None, 'resample': number}
  side, resize, is_squeezed = _sizes(processor, path)
  notes = []
  number = processor.get('resample', 3)
  decode = next((name for name in FILTERS if FILTERS[name] == number), '')
  if not decode:
    notes.append(f'resample {number}, a filter of Pillow: bicubic is used')
  return {
    'data.image_size': side,
    'data.resize': resize,
    'data.decode': decode or 'bicubic',
    'data.stretch': is_squeezed,
    **normalisation_keys,
  }, tuple(notes)


def normalisation(processor: dict, path: str) -> dict[str, tuple]:
  """Values of data.mean and data.std, of 0..255; see `images`."""
  scale = processor.get('rescale_factor') or 1 / 255
  if not rules.is_number(scale):
    raise _unexpected(path, 'rescale_factor', scale, 'a number')
  scale = scale if processor.get('do_rescale', True) else 1
  mean = _colours(path, 'image_mean', processor.get('image_mean') or _MEAN)
  divisor = _colours(path, 'image_std', processor.get('image_std') or _STD)
  std = divisor
  if not processor.get('do_normalize', True):
    mean, std = (0, 0, 0), (1, 1, 1)
  kind = str(processor.get('image_processor_type'))
  if kind.startswith('EfficientNet') and processor.get('include_top', True):
    # Their processor divides once more for networks with a classifier.
    std = [s * d for s, d in zip(std, divisor, strict=True)]
  if processor.get('rescale_offset'):  # a processor's that subtracts 1 first
    mean = [m + 1 for m in mean]
  return {'data.mean': _of_255(mean, scale), 'data.std': _of_255(std, scale)}


def _sizes(processor, path):
  """Pixels of the crop, of the shorter side before it, and whether both sides get as many."""
  size = processor.get('size')
  side = resize = min(_sides(path, 'size', size), default=224)
  # A processor with two sides makes an image of just these.
  is_squeezed = (
    isinstance(size, list)
    or (isinstance(size, dict) and 'shortest_edge' not in size)
    or processor.get('crop_mode') == 'squash'
  )
  kind = str(processor.get('image_processor_type') or processor.get('feature_extractor_type'))
  if 'crop_pct' in processor or kind.startswith('ConvNext'):
    share = processor.get('crop_pct') or 224 / 256
    if not rules.is_number(share) or share < _LEAST_SHARE:
      raise _unexpected(path, 'crop_pct', share, f'a number, at least {_LEAST_SHARE}')
    resize = int(side / share)
    if side >= _SQUEEZED:
      resize, is_squeezed = side, True
  elif processor.get('do_center_crop', True):
    crop = _sides(path, 'crop_size', processor.get('crop_size'))
    side = min(crop, default=side)
  return side, resize, is_squeezed


def _sides(path, key, value):
  """Pixels, in any of the forms that processors have; () for null."""
  sides = value if isinstance(value, list) else [value]
  if isinstance(value, dict):
    names = ('shortest_edge', 'height', 'width')
    sides = [value[name] for name in names if value.get(name)]
  if value is None:
    return ()
  # By type: a bool is an int too.
  if len(sides) not in (1, 2) or not all(type(side) is int and side > 0 for side in sides):
    raise _unexpected(
      path,
      key,
      value,
      'pixels: a number, a pair, or {"shortest_edge": ...} or {"height": ..., "width": ...}',
    )
  return tuple(sides)


def _colours(path, key, value):
  """A number for each of red, green and blue."""
  is_triple = isinstance(value, list | tuple) and len(value) == 3
  if not is_triple or not all(map(rules.is_number, value)):
    raise _unexpected(path, key, value, 'three numbers')
  return value


def _unexpected(path, key, value, what):
  return config_lib.ConfigError(f'{path}: {key}={value!r}: expected {what}')


def _of_255(values, scale):
  # Rounded: what 255 was divided out of comes back.
  return tuple(round(value / scale, 6) for value in values)
