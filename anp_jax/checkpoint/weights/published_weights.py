"""Published weights: their network, the names of its classes, its images.

The tensors' shapes tell the architecture. A folder as transformers or timm
writes it also has config.json, with the names of the classes; how images are to
be prepared is read by `processors`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import re
from typing import Any

import numpy as np
import safetensors

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import caffe_file, families, processors
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.system import error_lines, files

FILE = 'model.safetensors'  # in a folder
NORMALISATION = ('data.mean', 'data.std')
_WRAPPERS = re.compile(r'(module\.|_orig_mod\.)*')
_PICKLES = ('.pt', '.pth', '.bin', '.ckpt', '.pkl')


@dataclasses.dataclass(frozen=True)
class Published:
  """A file of weights, without its tensors.

  Attributes:
    path: path of the .safetensors file.
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
  """Returns whether a path is a file of weights, or a folder with one."""
  path = os.path.expanduser(path)
  if os.path.isfile(os.path.join(path, FILE)):
    return True
  has_name = path.endswith(('.safetensors', *_PICKLES)) or caffe_file.has_name(path)
  return has_name and not os.path.isdir(path)


def missing_path(path: str) -> str:
  """Returns the error for a path at which there is nothing; or ''."""
  if os.path.exists(os.path.expanduser(path)):
    return ''
  return (
    f'config.init.from={path!r}: expected a .safetensors or .caffemodel file or '
    'the workdir of a run, and there is neither'
  )


def weights_file(path: str) -> str:
  """Returns the file of weights at a path.

  Raises:
    ConfigError: if there is no such file, or it is a pickle.
  """
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


def architecture(path: str) -> dict:
  """Returns the config.json of a file that lies in a folder, or like it; {} if none."""
  if caffe_file.has_name(path):
    with open_file(path) as file:
      return file.config
  if os.path.basename(path) != FILE:
    return {}
  return files.read_json_object(os.path.join(os.path.dirname(path), 'config.json'))


class _Unwrapped:
  """A file of weights, by the names of tensors without PyTorch's wrappers.

  Data parallel and compiled modules save each name below module. or _orig_mod.
  """

  def __init__(self, file):
    self._file = file
    self._prefix = _WRAPPERS.match(os.path.commonprefix(list(file.keys())))[0]

  def keys(self) -> list[str]:
    return [name.removeprefix(self._prefix) for name in self._file.keys()]

  def get_slice(self, name: str) -> Any:
    return self._file.get_slice(self._prefix + name)

  def get_tensor(self, name: str) -> np.ndarray:
    return self._file.get_tensor(self._prefix + name)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[Any]:
  """Opens a file of weights in a `with` block.

  Raises:
    ConfigError: if it cannot be read, in the block too.
  """
  try:
    if caffe_file.has_name(path):
      yield caffe_file.CaffeFile(path)
    else:
      with safetensors.safe_open(path, framework='numpy') as file:
        yield _Unwrapped(file)
  except (safetensors.SafetensorError, caffe_file.FormatError, OSError) as e:
    if files.is_lfs_pointer(path):
      raise config_lib.ConfigError(
        f'config.init.from={path!r} is a Git LFS pointer, not the file itself; '
        'fetch it: git lfs pull'
      ) from e
    raise config_lib.ConfigError(
      f'config.init.from={path!r} cannot be read: {error_lines.first_line(e)}'
    ) from e


def read(path: str) -> Published:
  """Reads all but the tensors themselves.

  Args:
    path: path of a .safetensors file, or of a folder with one.

  Raises:
    ConfigError: if the weights cannot be read, or are not a network of the
      `families` with a classifier.
  """
  path = weights_file(path)
  with open_file(path) as file:
    shapes = {
      name: tuple(file.get_slice(name).get_shape())
      for name in file.keys()  # noqa: SIM118 - it is no dict
    }
  family, kind = families.of_tensors(path, shapes.keys())
  saved_config = architecture(path)
  classifier = f'{family.namings[kind].classifier}.weight'
  if classifier not in shapes:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} has no {classifier}: without a classifier '
      'it names nothing; it can be trained from'
    )
  classes = shapes[classifier][0]
  keys, notes = processors.images(
    *processors.read(os.path.dirname(path), saved_config), family.namings[kind].filter
  )
  keys = family.network(path, shapes, kind, saved_config) | keys
  return Published(path, keys, classes, _names(saved_config, classes), notes)


def normalisation(path: str) -> dict[str, tuple]:
  """Returns the mean and deviation for published weights, by config key.

  Whether the weights fit a network shows when they are loaded, so a file
  without a classifier will do. JAX is not imported.

  Args:
    path: path of a .safetensors file, or of a folder with one.

  Raises:
    ConfigError: if the file is a pickle, or a processor has another form.
  """
  path = weights_file(path)
  return processors.normalisation(*processors.read(os.path.dirname(path), architecture(path)))


def vocabulary(weights: Published, labels: str = '') -> vocabulary_lib.Vocabulary:
  """Returns the classes of a network; numbered where nothing names them.

  Args:
    weights: weights from `read`.
    labels: path of their names, see `read_labels`; '': the weights' own.

  Raises:
    ConfigError: as `read_labels`, or if the number of names differs.
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
