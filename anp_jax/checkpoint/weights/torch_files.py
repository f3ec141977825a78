"""PyTorch's files of tensors, read without PyTorch and without running their code.

Such a file is a pickle, which names functions to call, and the numbers of the tensors. Only the
names that a dictionary of tensors needs are known here, as in `torch.load(weights_only=True)`; a
file with any other is refused. `torch.save` writes a zip archive since version 1.6; before, it
wrote five pickles and the numbers.
"""

import collections
import dataclasses
import math
import pickle
from typing import IO, Any
import zipfile

import ml_dtypes
import numpy as np

_DTYPES: dict[str, Any] = {
  'DoubleStorage': np.float64,
  'FloatStorage': np.float32,
  'HalfStorage': np.float16,
  'BFloat16Storage': ml_dtypes.bfloat16,
  'LongStorage': np.int64,
  'IntStorage': np.int32,
  'ShortStorage': np.int16,
  'CharStorage': np.int8,
  'ByteStorage': np.uint8,
  'BoolStorage': np.bool_,
}
_OLD_FORM = 0x1950A86A20F9469CFC6C  # the first of the five pickles
# Where training scripts keep the weights among other things.
_INNER = ('state_dict', 'model')


def read(path: str) -> dict[str, np.ndarray]:
  """Returns the tensors of a file by name.

  Args:
    path: path of a file that `torch.save` wrote: a dictionary of tensors, or one that has it as
      `state_dict` or `model`.

  Raises:
    ValueError: if it is another file, or needs more than tensors.
    OSError: if it cannot be read.
  """
  with open(path, 'rb') as file:
    try:
      return _of_zip(file) if zipfile.is_zipfile(file) else _of_pickles(file)
    except OSError:
      raise
    except Exception as e:  # a damaged pickle can raise any
      text = str(e) if isinstance(e, ValueError) else repr(e)
      raise ValueError(f'expected a dictionary of tensors by PyTorch: {text}') from e


@dataclasses.dataclass(slots=True)  # whose default is not to be hashed, either
class _Storage:
  """Numbers that tensors are views of, by their key in the file."""

  key: str


@dataclasses.dataclass(slots=True)
class _View:
  """A tensor: numbers of a storage from `offset` on; strides count numbers."""

  storage: _Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]

  def of(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the view of the storage's numbers.

    Raises:
      ValueError: if it reaches beyond them, or repeats them.
    """
    spans = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
    negative = min(self.offset, *self.shape, *self.strides, 0) < 0
    most = max(self.offset + sum(spans) + 1, math.prod(self.shape))
    if negative or (0 not in self.shape and most > numbers.size):
      raise ValueError('a tensor reaches beyond its numbers')
    strides = [stride * numbers.itemsize for stride in self.strides]
    return np.lib.stride_tricks.as_strided(numbers[self.offset :], self.shape, strides)


class _Rebuild:
  """What stands for PyTorch's functions; no pickle can change it."""

  __slots__ = ()

  def __call__(self, value, *arguments):
    """A tensor, or a parameter, which is made of one."""
    return _View(value, *arguments[:3]) if isinstance(value, _Storage) else value


class _Tuple(tuple):
  """A tuple that is no key: its hash recurses in C, and is for ever where it holds itself twice."""

  __hash__ = None  # type: ignore[assignment]


def _unhashable(load):
  """Returns the function that makes a tuple from the stack of an unpickler."""

  def load_tuple(unpickler):
    load(unpickler)
    unpickler.stack[-1] = _Tuple(unpickler.stack[-1])

  return load_tuple


class _Unpickler(pickle._Unpickler):
  """Knows dictionaries and tensors only.

  It is the one in Python: that in C has a memo of as many places as the largest one named.

  Attributes:
    dtypes: dtypes of the storages by key, as far as they were met.
  """

  dispatch = pickle._Unpickler.dispatch | {
    code: _unhashable(pickle._Unpickler.dispatch[code])
    for (code,) in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
  }
  del dispatch[pickle.FROZENSET[0]]  # whose hash recurses, too

  def __init__(self, file: IO[bytes]):
    """Begins at the file's position."""
    super().__init__(file)
    self.dtypes: dict[str, np.dtype] = {}

  def find_class(self, module, name):
    if (module, name) == ('collections', 'OrderedDict'):
      return collections.OrderedDict
    if module == 'torch' and name in _DTYPES:
      return name  # a pickle could change a dtype, for the whole process
    if module == 'torch._utils' and name in ('_rebuild_tensor_v2', '_rebuild_parameter'):
      return _Rebuild()
    raise ValueError(f'{module}.{name} is none, and could run any code')

  def persistent_load(self, pid):
    _, dtype, key, *_ = pid
    self.dtypes[key] = np.dtype(_DTYPES[dtype])
    return _Storage(key)


def _of_zip(file: IO[bytes]) -> dict[str, np.ndarray]:
  with zipfile.ZipFile(file) as archive:
    names = archive.namelist()
    root = next(name for name in names if name.endswith('data.pkl')).removesuffix('data.pkl')
    if f'{root}byteorder' in names and archive.read(f'{root}byteorder') != b'little':
      raise ValueError('its numbers are big-endian')
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
      raise ValueError('it is compressed')
    with archive.open(f'{root}data.pkl') as pickled:
      unpickler = _Unpickler(pickled)
      views = _views(unpickler.load())
    keys = {view.storage.key for view in views.values()}
    return _arrays(views, {key: archive.read(f'{root}data/{key}') for key in keys}, unpickler)


def _of_pickles(file: IO[bytes]) -> dict[str, np.ndarray]:
  file.seek(0)
  if _Unpickler(file).load() != _OLD_FORM:
    raise ValueError('its beginning is of another kind')
  _, system = (_Unpickler(file).load() for _ in range(2))
  if not system['little_endian']:
    raise ValueError('its numbers are big-endian')
  unpickler = _Unpickler(file)
  views = _views(unpickler.load())
  numbers = {}
  for key in _Unpickler(file).load():
    count = int.from_bytes(file.read(8), 'little')
    numbers[key] = file.read(count * unpickler.dtypes[key].itemsize)
  return _arrays(views, numbers, unpickler)


def _views(value: Any) -> dict[str, _View]:
  """The tensors of an unpickled value by name."""
  for name in _INNER:
    if isinstance(value, dict) and isinstance(value.get(name), dict):
      value = value[name]
  if not isinstance(value, dict):
    raise ValueError(f'it is of type {type(value).__name__}')
  return {str(name): view for name, view in value.items() if isinstance(view, _View)}


def _arrays(views, numbers, unpickler):
  storages = {key: np.frombuffer(data, unpickler.dtypes[key]) for key, data in numbers.items()}
  return {name: view.of(storages[view.storage.key]) for name, view in views.items()}
