"""What published weights say of their network; read before JAX is imported.

The tensors' shapes tell the architecture. A folder as transformers or timm
writes it also has config.json, with the names of the classes, and how images
are to be prepared (preprocessor_config.json; of timm, in config.json).
"""

import dataclasses
import json
import os

import safetensors

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.weights import naming as naming_lib

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


def absent(path: str) -> str:
  """What to say of a path at which there is nothing; '' if there is."""
  if os.path.exists(os.path.expanduser(path)):
    return ''
  return (
    f'config.init.from={path!r}: expected a .safetensors file or the workdir '
    'of a run, and there is neither'
  )


def file(path: str) -> str:
  """The file of weights at a path; ConfigError for a pickle, or nothing."""
  if problem := absent(path):
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
  result = naming_lib.find(names)
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
  path = file(path)
  shapes = _shapes(path)
  kind = naming(path, shapes.keys())
  told = architecture(path)
  classifier = naming_lib.theirs('params/head/kernel', kind)
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
  stem = naming_lib.theirs('params/stem_conv/kernel', kind)
  stem = next(name for name in shapes if stem.endswith(name))
  first = told.get('downsample_in_bottleneck')
  return {
    'model.name': f'resnet{depths[0]}',
    'model.version': 'v1' if first and layers == 3 else 'v1.5',
    'model.width': shapes[stem][0],
    'model.head': 'joint',
  }


def _images(folder, kind, told):
  """Keys of how images are prepared, and notes."""
  processor = _json(os.path.join(folder, 'preprocessor_config.json'))
  if not told:  # a file by itself
    processor = {}
  timm = told.get('pretrained_cfg')
  if not processor and isinstance(timm, dict):
    processor = {
      'size': timm.get('input_size', (3, 224, 224))[-1],
      'crop_pct': timm.get('crop_pct'),
      'resample': FILTERS.get(timm.get('interpolation'), 3),
      'image_mean': timm.get('mean', _MEAN),
      'image_std': timm.get('std', _STD),
    }
  if not processor:
    # As torchvision's weights are evaluated, and transformers' own ResNets.
    number = 2 if kind == naming_lib.TORCHVISION else 3
    processor = {'size': 224, 'crop_pct': None, 'resample': number}
  side, resize, notes = _sizes(processor)
  number = processor.get('resample', 3)
  filters = {number: name for name, number in FILTERS.items()}
  if number not in filters:
    notes.append(f'resample {number}, a filter of Pillow: bicubic is used')
  scale = processor.get('rescale_factor') or 1 / 255
  scale = scale if processor.get('do_rescale', True) else 1
  mean, std = processor.get('image_mean'), processor.get('image_std')
  if not processor.get('do_normalize', True):
    mean, std = (0, 0, 0), (1, 1, 1)
  return {
    'data.image_size': side,
    'data.resize': resize,
    'data.decode': filters.get(number, 'bicubic'),
    'data.mean': _of_255(mean or _MEAN, scale),
    'data.std': _of_255(std or _STD, scale),
  }, tuple(notes)


def _sizes(processor):
  """Pixels of the crop, of the shorter side before it, and notes."""
  size = processor.get('size', 224)
  names = ('shortest_edge', 'height', 'width')
  if isinstance(size, dict):
    sides = [size[name] for name in names if size.get(name)]
  else:
    sides = [size]
  side = resize = min(sides, default=224)
  squeezed = isinstance(size, dict) and 'shortest_edge' not in size
  kind = str(
    processor.get('image_processor_type')
    or processor.get('feature_extractor_type')
  )
  if 'crop_pct' in processor or kind.startswith('ConvNext'):
    resize = int(side / (processor.get('crop_pct') or 224 / 256))
    if side >= _SQUEEZED:
      resize, squeezed = side, True
  elif processor.get('do_center_crop', True):
    crop = processor.get('crop_size', side)
    side = crop['height'] if isinstance(crop, dict) else crop
  notes = []
  if squeezed:
    notes.append(
      f'its processor squeezes whole images into {side} x {side}: their '
      'central square is used'
    )
  return side, resize, notes


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
