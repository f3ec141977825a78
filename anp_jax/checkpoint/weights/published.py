"""What published weights say of their network, and of its images.

The tensors' shapes tell the architecture. A folder as transformers or timm
writes it also has config.json, with the names of the classes, and how images
are to be prepared (preprocessor_config.json; of timm, in config.json).
"""

import dataclasses
import json
import os

import safetensors

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming as naming_lib
from anp_jax.data import vocabulary as vocabulary_lib

FILE = 'model.safetensors'  # in a folder
# ImageNet's, with which torchvision, timm and transformers train; of 0..1.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALISATION = ('data.mean', 'data.std')
_PICKLES = ('.pt', '.pth', '.bin', '.ckpt', '.pkl')
FILTERS = {'bilinear': 2, 'bicubic': 3}  # as Pillow numbers them
# From this size on ConvNeXt's processor squeezes whole images into a square.
_SQUEEZED = 384


@dataclasses.dataclass(frozen=True)
class Published:
  """What a file of weights says.

  Attributes:
    path: of the .safetensors file.
    keys: values of the config by dotted key: the network, and how images are
      prepared for it.
    classes: how many it tells apart.
    names: of the classes; () where nothing says.
    notes: lines about what is done otherwise than it says.
  """

  path: str
  keys: dict[str, object]
  classes: int
  names: tuple[str, ...]
  notes: tuple[str, ...]


def is_published(path: str) -> bool:
  """Whether a path is of a file of weights, or of a folder with one."""
  path = os.path.expanduser(path)
  if os.path.isfile(os.path.join(path, FILE)):
    return True
  return path.endswith(('.safetensors', *_PICKLES)) and not os.path.isdir(path)


def missing_path(path: str) -> str:
  """What to say of a path at which there is nothing; '' if there is."""
  if os.path.exists(os.path.expanduser(path)):
    return ''
  return (
    f'config.init.from={path!r}: expected a .safetensors file or the workdir '
    'of a run, and there is neither'
  )


def weights_file(path: str) -> str:
  """The file of weights at a path; ConfigError for a pickle, or nothing."""
  if problem := missing_path(path):
    raise config_lib.ConfigError(problem)
  path = os.path.expanduser(path)
  inside = os.path.join(path, FILE)
  path = inside if os.path.isfile(inside) else path
  if path.endswith(_PICKLES):
    raise config_lib.ConfigError(
      f'config.init.from={path!r}: expected a .safetensors file; a pickle can '
      'run any code, so save its tensors with safetensors.torch.save_file'
    )
  return path


def naming(path: str, names: set[str]) -> str:
  """The naming of a file's tensors; ConfigError if they are no ResNet's."""
  result = naming_lib.detect(names)
  if result is None:
    some = ', '.join(sorted(names)[:3]) or 'none'
    raise config_lib.ConfigError(
      f'config.init.from={path!r}: expected the tensors of a ResNet, named as '
      f'in {naming_lib.TORCHVISION} or in {naming_lib.TRANSFORMERS}; '
      f'its first are {some}'
    )
  return result


def architecture(path: str) -> dict:
  """The config.json of a file that lies in a folder; {} if there is none."""
  if os.path.basename(path) != FILE:
    return {}
  return _json(os.path.join(os.path.dirname(path), 'config.json'))


def read(path: str) -> Published:
  """Reads all but the tensors themselves.

  Args:
    path: of a .safetensors file, or of a folder with one.

  Raises:
    ConfigError: for what cannot be read, or is no ResNet with a classifier.
  """
  path = weights_file(path)
  shapes = _shapes(path)
  kind = naming(path, shapes.keys())
  told = architecture(path)
  classifier = naming_lib.published_name('params/head/kernel', kind)
  if classifier not in shapes:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} has no {classifier}: without a classifier '
      'it names nothing; it can be trained from'
    )
  classes = shapes[classifier][0]
  keys, notes = _images(os.path.dirname(path), kind, told)
  return Published(
    path, _network(path, shapes, kind, told) | keys, classes,
    _names(told, classes), notes,
  )  # fmt: skip


def normalisation(path: str) -> dict[str, tuple]:
  """The mean and deviation that weights were trained with, by config key.

  Whether they fit a network shows where they are taken, so a file without a
  classifier will do. JAX is not imported.

  Args:
    path: of a .safetensors file, or of a folder with one.

  Raises:
    ConfigError: for a pickle, or a processor of another form.
  """
  path = weights_file(path)
  processor, source = _processor(os.path.dirname(path), architecture(path))
  return _normalisation(processor, source)


def vocabulary(
  weights: Published, labels: str = ''
) -> vocabulary_lib.Vocabulary:
  """The classes of a network; numbered where nothing names them.

  Args:
    weights: as from `read`.
    labels: path of their names, see `read_labels`; '': the weights' own.

  Raises:
    ConfigError: as `read_labels`, and for another number of names.
  """
  names = read_labels(labels) if labels else weights.names
  if names and len(names) != weights.classes:
    raise config_lib.ConfigError(
      f'{labels} names {len(names)} classes, but the network of {weights.path} '
      f'has {weights.classes}'
    )
  numbered = tuple(f'class_{i}' for i in range(weights.classes))
  return vocabulary_lib.Vocabulary(_distinct(names) or numbered)


def read_labels(path: str) -> tuple[str, ...]:
  """The names of classes in a file.

  Args:
    path: of a text with a name a line, in the order of the ids; or of JSON: a
      list, {id: name}, transformers' config.json, or an export's labels.json.

  Raises:
    ConfigError: if it cannot be read, or is none of these.
  """
  path = os.path.expanduser(path)
  if not path.endswith('.json'):
    names = [line.strip() for line in vocabulary_lib.read_lines(path)]
    if '' in names:
      raise config_lib.ConfigError(
        f'{path}:{names.index("") + 1}: the line is empty, expected the name '
        'of a class'
      )
    return tuple(names)
  try:
    with open(path, encoding='utf-8') as f:
      value = json.load(f)
  except (OSError, ValueError) as e:
    raise config_lib.ConfigError(f'cannot read {path}: {e}') from e
  if isinstance(value, dict):
    value = value.get('classes') or value.get('id2label') or value
    value = value if isinstance(value, list) else _by_id(value)
  if not isinstance(value, list) or not value:
    raise config_lib.ConfigError(
      f'{path}: expected a list of names, or names by id: 0, 1 and so on'
    )
  return tuple(str(name) for name in value)


def _shapes(path):
  try:
    with safetensors.safe_open(path, framework='numpy') as f:
      return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
  except (safetensors.SafetensorError, OSError) as e:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} cannot be read: {str(e).splitlines()[0]}'
    ) from e


def _network(path, shapes, kind, told):
  """Keys of the network's architecture."""
  from anp_jax.models import resnet  # heavy: it imports JAX

  stages, layers = naming_lib.blocks(shapes, kind)
  depths = [
    depth for depth, known in resnet.DEPTHS.items()
    if known == (stages, layers == 3)
  ]  # fmt: skip
  if not depths:
    names = ', '.join(f'resnet{depth}' for depth in resnet.DEPTHS)
    raise config_lib.ConfigError(
      f'config.init.from={path!r} holds a network of '
      f'{naming_lib.describe(shapes, kind)}: expected one of {names}'
    )
  for key, ours in (('downsample_in_first_stage', False),
                    ('hidden_act', 'relu')):  # fmt: skip
    if told.get(key, ours) != ours:
      raise config_lib.ConfigError(
        f'config.init.from={path!r}: its config.json has {key}={told[key]!r}, '
        f'and this package has ResNets of {ours!r} only'
      )
  stem = naming_lib.published_name('params/stem_conv/kernel', kind)
  stem = next(name for name in shapes if stem.endswith(name))
  first = told.get('downsample_in_bottleneck')
  return {
    'model.name': f'resnet{depths[0]}',
    'model.version': 'v1' if first and layers == 3 else 'v1.5',
    'model.width': shapes[stem][0],
    'model.head': 'joint',
  }


def _processor(folder, told):
  """How images are prepared, as transformers has it, and the file with it.

  It is {} where nothing says.
  """
  path = os.path.join(folder, 'preprocessor_config.json')
  processor = _json(path) if told else {}  # else a file by itself
  timm = told.get('pretrained_cfg')
  if processor or not isinstance(timm, dict):
    return processor, path
  path = os.path.join(folder, 'config.json')
  side = timm.get('input_size')
  if isinstance(side, list) and len(side) == 3:
    side = side[-1]  # after the channels
  return {
    'size': min(_sides(path, 'input_size', side), default=224),
    'crop_pct': timm.get('crop_pct'),
    'resample': FILTERS.get(timm.get('interpolation'), 3),
    'image_mean': _colours(path, 'mean', timm.get('mean') or _MEAN),
    'image_std': _colours(path, 'std', timm.get('std') or _STD),
  }, path


def _images(folder, kind, told):
  """Keys of how images are prepared, and notes."""
  processor, path = _processor(folder, told)
  normalisation = _normalisation(processor, path)
  if not processor:
    # As torchvision's weights are evaluated, and transformers' own ResNets.
    number = 2 if kind == naming_lib.TORCHVISION else 3
    processor = {'size': 224, 'crop_pct': None, 'resample': number}
  side, resize, notes = _sizes(processor, path)
  number = processor.get('resample', 3)
  decode = next((name for name in FILTERS if FILTERS[name] == number), '')
  if not decode:
    notes.append(f'resample {number}, a filter of Pillow: bicubic is used')
  return {
    'data.image_size': side,
    'data.resize': resize,
    'data.decode': decode or 'bicubic',
    **normalisation,
  }, tuple(notes)


def _normalisation(processor, path):
  """Keys of the mean and the deviation, of 0..255."""
  scale = processor.get('rescale_factor') or 1 / 255
  if not _is_number(scale):
    raise _unexpected(path, 'rescale_factor', scale, 'a number')
  scale = scale if processor.get('do_rescale', True) else 1
  mean, std = processor.get('image_mean'), processor.get('image_std')
  if not processor.get('do_normalize', True):
    mean, std = (0, 0, 0), (1, 1, 1)
  return {
    'data.mean': _of_255(_colours(path, 'image_mean', mean or _MEAN), scale),
    'data.std': _of_255(_colours(path, 'image_std', std or _STD), scale),
  }


def _sizes(processor, path):
  """Pixels of the crop, of the shorter side before it, and notes."""
  size = processor.get('size')
  side = resize = min(_sides(path, 'size', size), default=224)
  # Of two sides it makes an image of just these.
  squeezed = isinstance(size, list) or (
    isinstance(size, dict) and 'shortest_edge' not in size
  )
  kind = str(
    processor.get('image_processor_type')
    or processor.get('feature_extractor_type')
  )
  if 'crop_pct' in processor or kind.startswith('ConvNext'):
    share = processor.get('crop_pct') or 224 / 256
    if not _is_number(share):
      raise _unexpected(path, 'crop_pct', share, 'a number')
    resize = int(side / share)
    if side >= _SQUEEZED:
      resize, squeezed = side, True
  elif processor.get('do_center_crop', True):
    crop = _sides(path, 'crop_size', processor.get('crop_size'))
    side = min(crop, default=side)
  notes = []
  if squeezed:
    notes.append(
      f'its processor squeezes whole images into {side} x {side}: their '
      'central square is used'
    )
  return side, resize, notes


def _sides(path, key, value):
  """Pixels, in any of the forms that processors have; () for null."""
  sides = value if isinstance(value, list) else [value]
  if isinstance(value, dict):
    names = ('shortest_edge', 'height', 'width')
    sides = [value[name] for name in names if value.get(name)]
  if value is None:
    return ()
  # By type: a bool is an int too.
  if len(sides) not in (1, 2) or not all(
    type(side) is int and side > 0 for side in sides
  ):
    raise _unexpected(
      path, key, value,
      'pixels: a number, a pair, or {"shortest_edge": ...} or {"height": ..., '
      '"width": ...}',
    )  # fmt: skip
  return tuple(sides)


def _colours(path, key, value):
  """A number for each of red, green and blue."""
  if (
    not isinstance(value, list | tuple)
    or len(value) != 3
    or not all(map(_is_number, value))
  ):
    raise _unexpected(path, key, value, 'three numbers')
  return value


def _is_number(value):
  return isinstance(value, int | float) and not isinstance(value, bool)


def _unexpected(path, key, value, what):
  return config_lib.ConfigError(f'{path}: {key}={value!r}: expected {what}')


def _of_255(values, scale):
  # Rounded: what 255 was divided out of comes back.
  return tuple(round(value / scale, 6) for value in values)


def _names(told, classes):
  """The names in a config.json, all different; () if it has none."""
  names = _by_id(told.get('id2label') or {})
  if not names and isinstance(told.get('label_names'), list):  # timm's
    texts = told.get('label_descriptions') or {}
    names = [texts.get(name, name) for name in told['label_names']]
  # What transformers writes where nobody said.
  if len(names) != classes or names[0] == 'LABEL_0':
    return ()
  return _distinct(tuple(names))


def _by_id(value):
  """Names by id, 0 and so on, as a list; [] for anything else."""
  names = []
  for i in range(len(value)):
    name = value.get(str(i), value.get(i))
    # Keras' has (id in WordNet, name).
    name = name[-1] if isinstance(name, list) and name else name
    if not isinstance(name, str):
      return []
    names.append(name)
  return names


def _distinct(names):
  """ImageNet has two cranes: the second is named with its id."""
  seen, result = set(), []
  for i, name in enumerate(names):
    result.append(f'{name} ({i})' if name in seen else name)
    seen.add(name)
  return tuple(result)


def _json(path):
  """A JSON object; {} where there is none."""
  try:
    with open(path, encoding='utf-8') as f:
      value = json.load(f)
  except (OSError, ValueError):
    return {}  # of another kind
  return value if isinstance(value, dict) else {}
