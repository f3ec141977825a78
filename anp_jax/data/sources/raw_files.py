"""MNIST and CIFAR-10 in the files that their authors publish, CIFAR-10 in its binary version.

MNIST: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
CIFAR-10: Krizhevsky, "Learning multiple layers of features from tiny images",
2009. Sets of other authors in the same formats, such as Fashion-MNIST, are
read too.
"""

from collections.abc import Callable
import gzip
import math
import os
import struct
from typing import NamedTuple
import zlib

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import splits

# Where the archive of CIFAR-10 puts its files.
_ARCHIVE = 'cifar-10-batches-bin'
# The published sets have no third split: the test images are evaluated on.
_MNIST_SPLITS = {'train': 'train', 'test': 't10k', 't10k': 't10k', 'validation': 't10k'}
_CIFAR_SPLITS = {
  'train': tuple(f'data_batch_{i}.bin' for i in range(1, 6)),
  'test': ('test_batch.bin',),
  'validation': ('test_batch.bin',),
}
_CLASSES = 10
_CIFAR_PIXELS = 3 * 32 * 32

LOOKED_FOR = (
  'train-images-idx3-ubyte or its .gz (MNIST), data_batch_1.bin (CIFAR-10, binary '
  'version), also in cifar-10-batches-bin/'
)

# Images (n, height, width, 3) uint8, labels (n,) int32, class names.
Contents = tuple[np.ndarray, np.ndarray, tuple[str, ...]]


class Format(NamedTuple):
  """A format whose files a folder holds.

  Attributes:
    title: name in messages.
    folder: folder of its files.
    read: function (folder, split) -> contents of the split; raises ConfigError.
  """

  title: str
  folder: str
  read: Callable[[str, str], Contents]


def find(path: str) -> list[Format]:
  """The formats whose files lie in a folder, or in an archive's below it."""
  formats = []
  for folder in (path, os.path.join(path, _ARCHIVE)):
    for title, read, names in (
      ('MNIST', mnist, _spellings('train') + _spellings('t10k')),
      ('CIFAR-10', cifar10, [f for name in ('train', 'test') for f in _CIFAR_SPLITS[name]]),
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
  # Both splits must have the same classes, so training says how many, if it is there.
  has_train = part != 'train' and _file(folder, 'train', 'labels')
  train = _idx(folder, 'train', 'labels')[1] if has_train else labels
  names = _numbers(max(_CLASSES, int(train.max(initial=0)) + 1))
  check_labels(labels_file, labels, len(names))
  # A view: the three channels are the same bytes.
  colour = np.broadcast_to(images[..., None], (*images.shape, 3))
  return colour, labels.astype(np.int32), names


def cifar10(folder: str, split: str) -> Contents:
  """Records of a label and the planes R, G and B, in five batches."""
  files = [os.path.join(folder, name) for name in _of_split(folder, split, _CIFAR_SPLITS)]
  names = _cifar_names(folder)
  records, size = [], 1 + _CIFAR_PIXELS
  for file in files:
    data = _content(file)
    if not len(data) or len(data) % size:
      raise config_lib.ConfigError(f'{file} holds {len(data)} bytes, expected records of {size}')
    records.append(data.reshape(-1, size))
    check_labels(file, records[-1][:, 0], len(names))
  joined = np.concatenate(records)
  planes = joined[:, 1:].reshape(-1, 3, 32, 32)
  return (np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), joined[:, 0].astype(np.int32), names)


def check_labels(name: str, labels: np.ndarray, classes: int) -> None:
  """Refuses labels outside 0 to classes - 1.

  Args:
    name: file or split in the message.
    labels: (n,) whole numbers of any type.
    classes: number of classes.

  Raises:
    ConfigError: with the range of the labels and the one expected.
  """
  if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
    raise config_lib.ConfigError(
      f'{name}: labels run from {labels.min()} to {labels.max()}, expected 0 to {classes - 1}'
    )


def _numbers(classes):
  return tuple(str(i) for i in range(classes))


def _of_split(folder, split, parts):
  return parts[splits.choose(folder, split, parts)]


def _spellings(part, kind='images'):
  """Names that copies of an idx file go by."""
  ending = {'images': 'idx3-ubyte', 'labels': 'idx1-ubyte'}[kind]
  plain = [f'{part}-{kind}-{ending}', f'{part}-{kind}.{ending}']
  return [name + suffix for suffix in ('', '.gz') for name in plain]


def _file(folder, part, kind):
  """The path of an idx file; None if it is missing."""
  # Some archives unpack each file into a folder of the same name.
  files = (os.path.join(folder, name) for name in _spellings(part, kind))
  return next(filter(os.path.isfile, files), None)


def _idx(folder, part, kind):
  """The file's path, and its (n,) or (n, height, width) uint8."""
  file = _file(folder, part, kind)
  if file is None:
    name = _spellings(part, kind)[0]
    raise config_lib.ConfigError(f'{folder} has no file {name} or its .gz')
  data = _content(file)
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


def _content(file):
  """The file's bytes, (n,) uint8, unpacked."""
  try:
    if not file.endswith('.gz'):
      return np.fromfile(file, np.uint8)
    with gzip.open(file) as f:
      return np.frombuffer(f.read(), np.uint8)
  except (OSError, EOFError, zlib.error) as e:
    raise config_lib.ConfigError(f'cannot read {file}, expected a whole file: {e}') from e


def _cifar_names(folder):
  """The names of the classes; numbers if no file has them."""
  file = os.path.join(folder, 'batches.meta.txt')
  if not os.path.isfile(file):
    return _numbers(_CLASSES)
  # The published file ends with an empty line. One further up would shift the
  # classes, and is kept to be refused.
  names = tuple(line.strip() for line in vocabulary.read_lines(file))
  if not all(names):
    raise config_lib.ConfigError(
      f'{file} holds the class names {names}, expected one a class, none empty'
    )
  return names
