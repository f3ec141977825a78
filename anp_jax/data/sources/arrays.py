"""Pixels on disk: NumPy arrays, MNIST's and CIFAR-10's files."""

import os
import zipfile
import zlib

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import class_texts, raw_files, source as source_lib


class Arrays(source_lib.Source):
  """Pixels in memory or mapped; the files of a folder tell the format.

  NumPy: an .npz file, or a folder of .npy files (read by mapping), with arrays
  `SPLIT_images` (n, height, width, 3) uint8 and `SPLIT_labels` (n,), whole
  numbers; optionally `class_names` (classes,), texts. Else a folder of the
  files that `raw_files` reads.
  """

  kind = 'pixels'

  def __init__(self, path: str, split: str):
    """Opens one split.

    Args:
      path: .npz file or folder.
      split: name of the split: 'train', 'test' and so on.

    Raises:
      ConfigError: for a file that is missing or damaged, or an unknown split.
    """
    self.name = f'{path}: {split}'
    read, path = _reader(path)
    self._images, self._labels, names = read(path, split)
    try:
      self.vocabulary = vocabulary.Vocabulary(names)
    except config_lib.ConfigError as e:
      raise config_lib.ConfigError(f'{path}: {e}') from None

  def __len__(self) -> int:
    return len(self._labels)

  def read(self, indices: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Pixels (height, width, 3), or vectors (1, 1, width), by index, and labels."""
    # Grey images become three channels here. A stack of images that are not
    # contiguous would not be contiguous either, and slow to copy to a device.
    images = [np.ascontiguousarray(self._images[i]) for i in indices]
    return images, self._labels[indices]

  def labels(self) -> np.ndarray:
    """(n,) int32, of all examples."""
    return self._labels


def _reader(path):
  """The function that reads the one format of a path, and its folder."""
  if not os.path.isdir(path):
    return _numpy, path
  try:
    arrays = [f for f in os.listdir(path) if f.endswith('.npy')]
  except OSError as e:
    raise config_lib.ConfigError(f'{path}: {e.strerror}') from e
  formats = raw_files.find(path)
  # Any array will do where nothing else is: the split may be misspelt.
  if any(f.endswith('_images.npy') for f in arrays) or arrays and not formats:
    formats.append(raw_files.Format('NumPy', path, _numpy))
  if not formats:
    raise config_lib.ConfigError(
      f'{path} holds no data set; looked for SPLIT_images.npy, '
      f'{raw_files.LOOKED_FOR} (an archive must be unpacked first)'
    )
  if len(formats) > 1:
    places = ' and '.join(f'{f.title} in {f.folder}' for f in formats)
    raise config_lib.ConfigError(f'{path} holds {places}; expected one per folder')
  return formats[0].read, formats[0].folder


def _numpy(path, split):
  images = _array(path, f'{split}_images')
  is_good = images.ndim == 4 and images.shape[-1] == 3 and images.dtype == np.uint8
  _expect(is_good, f'{path}: {split}_images', images, 'uint8 (n, height, width, 3)')
  labels = _labels(path, split, f'{len(images)} whole numbers', len(images))
  names = _array(path, 'class_names', optional=True)
  if names is None:
    # An evaluation may find no training examples.
    has_train = _array(path, 'train_labels', optional=True) is not None
    name = 'train' if has_train else split
    used = _labels(path, name, 'whole numbers')
    names = class_texts.number_classes(f'{path}: {name}_labels', map(int, used.tolist()))
  else:
    names = _texts(path, names)
  raw_files.check_labels(f'{path}: {split}', labels, len(names))
  return images, np.asarray(labels, np.int32), names


def _labels(path, split, expected, count=None):
  labels = _whole(_array(path, f'{split}_labels'))
  is_good = labels.ndim == 1 and labels.dtype.kind in 'iu' and count in (None, len(labels))
  _expect(is_good, f'{path}: {split}_labels', labels, expected)
  return labels


def _expect(is_good, name, array, expected):
  if not is_good:
    raise config_lib.ConfigError(f'{name} is {array.dtype}{array.shape}, expected {expected}')


def _whole(labels):
  """Labels as whole numbers where they are floats without a fraction."""
  is_float = labels.dtype.kind == 'f' and np.isfinite(labels).all()
  if is_float and not (labels % 1).any():
    return labels.astype(np.int64)
  return labels


def _texts(path, names):
  """The names of the classes, texts or UTF-8."""
  is_good = names.ndim == 1 and names.dtype.kind in 'SU'
  _expect(is_good, f'{path}: class_names', names, 'texts')
  try:
    return tuple(n.decode() if isinstance(n, bytes) else n for n in names.tolist())
  except UnicodeDecodeError as e:
    raise config_lib.ConfigError(f'{path}: class_names is not UTF-8, expected texts') from e


def _array(path, name, optional=False):
  file = path
  try:
    if os.path.isdir(path):
      file = os.path.join(path, f'{name}.npy')
      if os.path.exists(file):
        return np.load(file, mmap_mode='r')
      names = [f[:-4] for f in sorted(os.listdir(path)) if f.endswith('.npy')]
    else:
      with np.load(path) as arrays:  # TypeError: one array, no collection
        if name in arrays:
          return arrays[name]
        names = list(arrays)
  except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
    kind = '.npz' if file == path else '.npy'
    raise config_lib.ConfigError(f'{file} is not an {kind} file: {e}') from e
  if optional:
    return None
  listed = ', '.join(names[:8]) + (', ...' if len(names) > 8 else '')
  raise config_lib.ConfigError(
    f'{path} has no array {name!r} (it has {listed or "none"}){config_lib.nearest(name, names)}'
  )
