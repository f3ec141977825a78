"""MNIST and CIFAR-10 in the files that their authors publish.

MNIST: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
CIFAR-10: Krizhevsky, "Learning multiple layers of features from tiny images",
2009. Sets of other authors in the same formats, such as Fashion-MNIST, are
read too.
"""

from collections.abc import Callable
import gzip
import math
import os
import pickle
import struct
from typing import NamedTuple
import zlib

import numpy as np

from anp_jax import config as config_lib

# Where the archives of CIFAR-10 put their files.
_ARCHIVES = ('cifar-10-batches-bin', 'cifar-10-batches-py')
# The published sets have no third split: the test images are evaluated on.
_MNIST_SPLITS = {'train': 'train', 'test': 't10k', 't10k': 't10k', 'validation': 't10k'}
_CIFAR_SPLITS = {
  'train': tuple(f'data_batch_{i}' for i in range(1, 6)),
  'test': ('test_batch',),
  'validation': ('test_batch',),
}
_CLASSES = 10
_CIFAR_PIXELS = 3 * 32 * 32

LOOKED_FOR = (
  'train-images-idx3-ubyte or its .gz (MNIST), data_batch_1.bin or '
  'data_batch_1 (CIFAR-10), these two also in cifar-10-batches-bin/ and '
  'cifar-10-batches-py/'
)

# Images (n, height, width, 3) uint8, labels (n,) int32, class names.
Contents = tuple[np.ndarray, np.ndarray, tuple[str, ...]]


class Format(NamedTuple):
  """A format that was found.

  Attributes:
    title: what messages call it.
    folder: where its files lie.
    read: (folder, split) -> the split's contents; raises ConfigError.
  """

  title: str
  folder: str
  read: Callable[[str, str], Contents]


def find(path: str) -> list[Format]:
  """The formats whose files lie in a folder, or in an archive's below it."""
  formats = []
  folders = [os.path.join(path, name) for name in _ARCHIVES]
  for folder in (path, *folders):
    for title, read, names in (
      ('MNIST', mnist, _spellings('train') + _spellings('t10k')),
      ('CIFAR-10 (binary)', cifar10_binary, _batch_files('.bin')),
      ('CIFAR-10 (Python)', cifar10_python, _batch_files('')),
    ):
      if any(os.path.isfile(os.path.join(folder, name)) for name in names):
        formats.append(Format(title, folder, read))
  return formats


def mnist(folder: str, split: str) -> Contents:
  """Grey images of any size in idx files, plain or .gz."""
  part = _of_split(folder, split, _MNIST_SPLITS)
  images_file, images = _idx(folder, part, 'images')
  labels_file, labels = _idx(folder, part, 'labels')
  if len(labels) != len(images):
    raise config_lib.ConfigError(
      f'{labels_file} holds {len(labels)} labels, expected {len(images)}, one '
      f'for each image of {images_file}'
    )
  # Both splits must have the same classes, so training says how many.
  train = labels if part == 'train' else _idx(folder, 'train', 'labels')[1]
  names = _numbers(max(_CLASSES, int(train.max(initial=0)) + 1))
  check_labels(labels_file, labels, len(names))
  # A view: the three channels are the same bytes.
  colour = np.broadcast_to(images[..., None], (*images.shape, 3))
  return colour, labels.astype(np.int32), names


def cifar10_binary(folder: str, split: str) -> Contents:
  """Records of a label and the planes R, G and B, in five batches."""
  files = _cifar_files(folder, split, '.bin')
  names = _cifar_names(folder, 'batches.meta.txt', _names_from_text)
  batches = []
  for file in files:
    data, size = _mapped(file), 1 + _CIFAR_PIXELS
    if not len(data) or len(data) % size:
      raise config_lib.ConfigError(f'{file} holds {len(data)} bytes, expected records of {size}')
    records = data.reshape(-1, size)
    check_labels(file, records[:, 0], len(names))
    batches.append((records[:, 1:], records[:, 0]))
  return *_joined(batches), names


def cifar10_python(folder: str, split: str) -> Contents:
  """Five batches pickled by Python 2; a file that would run code is refused."""
  files = _cifar_files(folder, split, '')
  names = _cifar_names(folder, 'batches.meta', _names_from_pickle)
  batches = []
  for file in files:
    record = _unpickled(file)
    data, labels = (_field(file, record, name) for name in ('data', 'labels'))
    good = data.ndim == 2 and data.shape[1] == _CIFAR_PIXELS
    if not good or data.dtype != np.uint8:
      raise config_lib.ConfigError(
        f'{file}: data is {data.dtype}{data.shape}, expected uint8 (n, {_CIFAR_PIXELS})'
      )
    if labels.shape != data.shape[:1] or labels.dtype.kind not in 'iu':
      raise config_lib.ConfigError(
        f'{file}: labels is {labels.dtype}{labels.shape}, expected {len(data)} whole numbers'
      )
    check_labels(file, labels, len(names))
    batches.append((data, labels))
  return *_joined(batches), names


def check_labels(name: str, labels: np.ndarray, classes: int) -> None:
  """Refuses labels outside 0 to classes - 1.

  Args:
    name: of the file or split, for the message.
    labels: (n,) of any whole numbers.
    classes: how many there are.

  Raises:
    ConfigError: with the range that was found and the one expected.
  """
  if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
    raise config_lib.ConfigError(
      f'{name}: labels run from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}'
    )


def _numbers(classes):
  return tuple(str(i) for i in range(classes))


def _of_split(folder, split, parts):
  if split not in parts:
    raise config_lib.ConfigError(
      f'{folder} has no split {split!r} (it has {", ".join(parts)})'
      f'{config_lib.nearest(split, parts)}'
    )
  return parts[split]


def _spellings(part, kind='images'):
  """Names that copies of an idx file go by."""
  ending = {'images': 'idx3-ubyte', 'labels': 'idx1-ubyte'}[kind]
  plain = [f'{part}-{kind}-{ending}', f'{part}-{kind}.{ending}']
  return [name + suffix for suffix in ('', '.gz') for name in plain]


def _idx(folder, part, kind):
  """The file's path, and its (n,) or (n, height, width) uint8."""
  names = _spellings(part, kind)
  files = [os.path.join(folder, name) for name in names]
  # Some archives unpack each file into a folder of the same name.
  file = next((f for f in files if os.path.isfile(f)), None)
  if file is None:
    raise config_lib.ConfigError(f'{folder} has no file {names[0]} or its .gz')
  data = _unzipped(file) if file.endswith('.gz') else _mapped(file)
  dimensions = {'images': 3, 'labels': 1}[kind]
  magic, start_bytes = 0x800 + dimensions, data[:4].tobytes()
  if start_bytes != struct.pack('>I', magic):
    raise config_lib.ConfigError(
      f'{file} begins with 0x{start_bytes.hex()}, expected 0x{magic:08x} (idx, '
      f'{dimensions}-D uint8)'
    )
  start = 4 + 4 * dimensions
  # A header that is cut is short of its own size: zeros say so below.
  header = data[4:start].tobytes().ljust(start - 4, b'\0')
  shape = struct.unpack(f'>{dimensions}I', header)
  if len(data) != start + math.prod(shape):
    raise config_lib.ConfigError(
      f'{file} holds {len(data)} bytes, expected {start + math.prod(shape)} '
      f'for {" x ".join(map(str, shape))} uint8 after a header of {start}'
    )
  if 0 in shape[1:]:
    raise config_lib.ConfigError(f'{file} holds images of {shape[1]} x {shape[2]}, expected pixels')
  return file, data[start:].reshape(shape)


def _unzipped(file):
  try:
    with gzip.open(file) as f:
      return np.frombuffer(f.read(), np.uint8)
  except (OSError, EOFError, zlib.error) as e:
    raise config_lib.ConfigError(f'cannot read {file}, expected a whole gzip file: {e}') from e


def _mapped(file):
  """The file's bytes, (n,) uint8, read when they are used."""
  try:
    if not os.path.getsize(file):  # cannot be mapped
      return np.zeros(0, np.uint8)
    return np.asarray(np.memmap(file, np.uint8, 'r'))
  except OSError as e:
    raise config_lib.ConfigError(f'cannot read {file}: {e}') from e


def _batch_files(suffix):
  parts = ('train', 'test')
  return [f + suffix for part in parts for f in _CIFAR_SPLITS[part]]


def _cifar_files(folder, split, suffix):
  names = [f + suffix for f in _of_split(folder, split, _CIFAR_SPLITS)]
  files = [os.path.join(folder, name) for name in names]
  for name, file in zip(names, files):
    if not os.path.isfile(file):
      raise config_lib.ConfigError(f'{folder} has no file {name}; expected {", ".join(names)}')
  return files


def _cifar_names(folder, name, read):
  file = os.path.join(folder, name)
  if not os.path.isfile(file):
    return _numbers(_CLASSES)
  try:
    names = read(file)
  except UnicodeDecodeError as e:
    raise config_lib.ConfigError(f'{file} is not UTF-8 text: {e}') from e
  if not names or not all(names):
    raise config_lib.ConfigError(
      f'{file} holds the class names {names}, expected one a class, none empty'
    )
  return names


def _names_from_text(file):
  # The published file ends with an empty line. One further up would shift the
  # classes, and is kept to be refused.
  lines = _mapped(file).tobytes().decode().rstrip().splitlines()
  return tuple(line.strip() for line in lines)


def _names_from_pickle(file):
  names = _field(file, _unpickled(file), 'label_names')
  if names.ndim != 1 or names.dtype.kind not in 'SU':
    raise config_lib.ConfigError(
      f'{file}: label_names is {names.dtype}{names.shape}, expected texts'
    )
  return tuple(n.decode() if names.dtype.kind == 'S' else n for n in names.tolist())


def _joined(batches):
  """Images (n, 32, 32, 3) and labels (n,) of (planes, labels) of batches."""
  sizes = [len(labels) for _, labels in batches]
  images = np.empty((sum(sizes), 32, 32, 3), np.uint8)
  parts = np.split(images, np.cumsum(sizes)[:-1])
  for part, (planes, _) in zip(parts, batches):
    part[...] = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
  labels = np.concatenate([labels for _, labels in batches])
  return images, labels.astype(np.int32)


def _latin1(text, encoding):
  """Bytes that Python 3 pickled for Python 2, as text to be encoded again."""
  if encoding != 'latin1':
    raise ValueError(f'encoding {encoding!r}')
  return text.encode(encoding)


def _dtype(kind, align, copy):
  # NumPy 2.4.0 to 2.4.4 warns of the 0 and 1 that Python 2 wrote for booleans.
  return np.dtype(kind, align=bool(align), copy=bool(copy))


# What pickled arrays refer to, under the names of NumPy 1 and 2.
_array_maker = np.zeros(0).__reduce__()[0]
_buffer_maker = np.zeros(0).__reduce_ex__(5)[0]
_ADMITTED = {
  ('numpy', 'ndarray'): np.ndarray,
  ('numpy', 'dtype'): _dtype,
  ('numpy.core.multiarray', '_reconstruct'): _array_maker,
  ('numpy._core.multiarray', '_reconstruct'): _array_maker,
  ('numpy.core.numeric', '_frombuffer'): _buffer_maker,
  ('numpy._core.numeric', '_frombuffer'): _buffer_maker,
  ('_codecs', 'encode'): _latin1,
}


class _Unpickler(pickle.Unpickler):
  """Refuses everything by which a pickle could run code."""

  def find_class(self, module, name):
    if (module, name) not in _ADMITTED:
      raise pickle.UnpicklingError(f'refused {f"{module}.{name}"!r}')
    return _ADMITTED[module, name]


def _unpickled(file):
  try:
    with open(file, 'rb') as f:
      return _Unpickler(f, encoding='bytes').load()
  except Exception as e:  # a damaged pickle may raise anything
    text = ' '.join(f'{type(e).__name__}: {e}'.split())
    raise config_lib.ConfigError(
      f'cannot read {file}, expected a pickle of arrays and plain values: {text}'
    ) from e


def _field(file, record, name):
  """An entry of an unpickled dict as an array; Python 2 made its keys bytes."""
  for key in (name.encode(), name):
    if isinstance(record, dict) and key in record:
      try:
        return np.asarray(record[key])
      except ValueError as e:
        raise config_lib.ConfigError(f'{file}: {name} is no array: {e}') from e
  raise config_lib.ConfigError(f'{file} has no {name!r}, expected a dict with it')
