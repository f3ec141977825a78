"""Where examples come from: one interface for every kind of data set.

A source is one split: it has a vocabulary, a length, and gives any examples by
index. Encoded images are decoded by TensorFlow in `pipeline.py`; pixels need no
TensorFlow; synthetic examples are made on the device.
"""

import hashlib
import os
from typing import Protocol
import zipfile
import zlib

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import shards
from anp_jax.data import vocabulary

_SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.gif')
# Share of a tree without splits that is used for training.
_TRAIN_SHARE = 0.8


class Source(Protocol):
  """One split of a data set.

  Attributes:
    kind: 'encoded' (image files), 'pixels' (uint8 arrays) or 'synthetic'.
    vocabulary: of the labels.
    name: what messages call it.
  """

  kind: str
  vocabulary: vocabulary.Vocabulary
  name: str

  def __len__(self) -> int:
    """Number of examples."""

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Examples by index, in any order, from any thread.

    Args:
      indices: (n,) int64 in [0, len).

    Returns:
      n images, bytes or (height, width, 3) uint8; labels (n,) int32.
    """


def fingerprint(source: Source) -> dict:
  """What must be equal for a run to be continued on a source."""
  return {
    'examples': len(source),
    'classes': len(source.vocabulary),
    'names': source.vocabulary.digest(),
  }


def open_source(config, training: bool) -> Source:
  """The split of config.data that is trained or evaluated on.

  Raises:
    ConfigError: if it does not exist or is empty, naming the path.
  """
  d = config.data
  split = d.train_split if training else d.eval_split
  if d.source == 'synthetic':
    return Synthetic(d, split)
  if d.source == 'arrays':
    source = Arrays(os.path.expanduser(d.path), split)
  elif d.source == 'folder':
    source = Folder(os.path.expanduser(d.path), split)
  else:
    source = _tfds_source(config, split)
  if not len(source):
    raise config_lib.ConfigError(f'{source.name} has no examples')
  return source


class Synthetic:
  """Random images and labels, made on the device; for measuring."""

  kind = 'synthetic'

  def __init__(self, d, split: str):
    self.name = f'synthetic/{split}'
    self._examples = d.synthetic_examples
    width = len(str(d.synthetic_classes - 1))
    self.vocabulary = vocabulary.Vocabulary(
      tuple(f'class{i:0{width}}' for i in range(d.synthetic_classes))
    )

  def __len__(self):
    return self._examples


class Arrays:
  """NumPy arrays: an .npz file, or a folder of .npy files (read by mapping).

  Arrays `SPLIT_images` (n, height, width, 3) uint8 and `SPLIT_labels` (n,) of
  whole numbers; optionally `class_names` (classes,) of texts.
  """

  kind = 'pixels'

  def __init__(self, path: str, split: str):
    self.name = f'{path}: {split}'
    self._images = _array(path, f'{split}_images')
    labels = _array(path, f'{split}_labels')
    good = self._images.ndim == 4 and self._images.shape[-1] == 3
    if not good or self._images.dtype != np.uint8:
      raise config_lib.ConfigError(
        f'{path}: {split}_images is {self._images.dtype}'
        f'{self._images.shape}, expected uint8 (n, height, width, 3)'
      )
    if labels.shape != self._images.shape[:1] or labels.dtype.kind not in 'iu':
      raise config_lib.ConfigError(
        f'{path}: {split}_labels is {labels.dtype}{labels.shape}, expected '
        f'{len(self._images)} whole numbers'
      )
    self._labels = np.asarray(labels, np.int32)
    names = _array(path, 'class_names', optional=True)
    if names is None:
      used = _array(path, 'train_labels')
      count = int(used.max()) + 1 if len(used) else 0
      names = [f'class{i:0{len(str(count - 1))}}' for i in range(count)]
    self.vocabulary = vocabulary.Vocabulary(tuple(str(n) for n in names))
    _check_labels(self.name, labels, len(self.vocabulary))

  def __len__(self):
    return len(self._labels)

  def read(self, indices):
    """See `Source.read`."""
    return [self._images[i] for i in indices], self._labels[indices]


class Folder:
  """A tree of class folders: ROOT/SPLIT/CLASS/image or ROOT/CLASS/image.

  A tree without splits is divided by a hash of each file's path inside it, so
  that adding a file moves no other.
  """

  kind = 'encoded'

  def __init__(self, root: str, split: str):
    self.name = f'{root}: {split}'
    base = os.path.join(root, split)
    divided = os.path.isdir(base)
    if not divided:
      others = [
        name
        for name in ('train', 'validation', 'val', 'test')
        if os.path.isdir(os.path.join(root, name))
      ]
      if others:
        raise config_lib.ConfigError(
          f'{root} has no split {split!r} (it has {", ".join(others)}); set '
          'config.data.train_split and config.data.eval_split'
        )
      if split not in ('train', 'validation'):
        raise config_lib.ConfigError(
          f'{root} has no split {split!r}; a tree of classes without splits '
          'is divided into train and validation'
        )
      base = root
    names = _class_folders(base)
    if not names:
      raise config_lib.ConfigError(f'{base} has no class folders')
    self._files, labels = [], []
    for label, name in enumerate(names):
      for file in _image_files(os.path.join(base, name)):
        inside = f'{name}/{file}'
        if divided or (_in_train(inside) == (split == 'train')):
          self._files.append(os.path.join(base, inside))
          labels.append(label)
    self._labels = np.array(labels, np.int32)
    self.vocabulary = vocabulary.Vocabulary(tuple(names))

  def __len__(self):
    return len(self._files)

  def read(self, indices):
    """See `Source.read`."""
    images = []
    for i in indices:
      with open(self._files[i], 'rb') as f:
        images.append(f.read())
    return images, self._labels[indices]

  def file(self, index: int) -> str:
    """The path of an example, for messages."""
    return self._files[index]


class Tfds:
  """A prepared tensorflow-datasets set with one image and one class label.

  ArrayRecord shards are read through tfds; TFRecord shards, which tfds reads
  only in order, through an index of where each record begins.
  """

  kind = 'encoded'

  def __init__(self, builder, split: str):
    from tensorflow_datasets import decode

    self.name = f'{builder.info.full_name}: {split}'
    if split not in builder.info.splits:
      raise config_lib.ConfigError(
        f'{builder.info.full_name} has no split {split!r} (it has '
        f'{", ".join(builder.info.splits)})'
      )
    self._image, self._label = _image_and_label(builder)
    names = builder.info.features[self._label].names
    self.vocabulary = vocabulary.Vocabulary(tuple(names))
    skip = {self._image: decode.SkipDecoding()}
    info = builder.info.splits[split]
    self._size = info.num_examples
    stored = builder.info.file_format.value
    if stored not in ('array_record', 'tfrecord'):
      raise config_lib.ConfigError(
        f'{builder.info.full_name} is stored as {stored}, expected '
        'array_record or tfrecord'
      )
    paths = [os.fspath(p) for p in info.filepaths]
    places = [
      shards.record_places(stored, path, count)
      for path, count in zip(paths, info.shard_lengths)
    ]
    if stored == 'array_record':
      self._records = builder.as_data_source(split, decoders=skip)
    else:
      self._records = shards.TfRecords(
        paths, places, builder.info.features, skip
      )

  def __len__(self):
    return self._size

  def read(self, indices):
    """See `Source.read`."""
    records = self._records.__getitems__([int(i) for i in indices])
    labels = np.array([r[self._label] for r in records], np.int32)
    return [bytes(r[self._image]) for r in records], labels


def _tfds_source(config, split):
  directory = config_lib.data_dir(config)
  if config.data.source == 'anp_shapes':
    from anp_jax.data import anp_shapes

    return Tfds(anp_shapes.prepare(directory), split)
  from tensorflow_datasets import core
  from tensorflow_datasets.core import read_only_builder

  name = config.data.source.removeprefix('tfds:')
  try:
    # Generated files only: a run neither downloads nor needs the code.
    builder = read_only_builder.builder_from_files(name, data_dir=directory)
  except (core.DatasetNotFoundError, ValueError) as e:
    found = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    raise config_lib.ConfigError(
      f'{directory} holds no prepared set {name!r}'
      f'{config_lib.nearest(name, found)}; prepare it with: '
      f'tfds build {name} --data_dir={directory}'
    ) from e
  return Tfds(builder, split)


def _image_and_label(builder):
  from tensorflow_datasets import features

  images, labels = [], []
  for key, feature in builder.info.features.items():
    if isinstance(feature, features.Image):
      images.append(key)
    elif isinstance(feature, features.ClassLabel):
      labels.append(key)
  if len(images) != 1 or not labels:
    raise config_lib.ConfigError(
      f'{builder.info.full_name} has images {images} and class labels '
      f'{labels}; expected one of each'
    )
  return images[0], 'label' if 'label' in labels else labels[0]


def _array(path, name, optional=False):
  file = path
  try:
    if os.path.isdir(path):
      file = os.path.join(path, f'{name}.npy')
      if os.path.exists(file):
        return np.load(file, mmap_mode='r')
      have = [f[:-4] for f in sorted(os.listdir(path)) if f.endswith('.npy')]
    else:
      with np.load(path) as arrays:  # TypeError: one array, no collection
        if name in arrays:
          return arrays[name]
        have = list(arrays)
  except (
    OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error,
  ) as e:  # fmt: skip
    kind = '.npz' if file == path else '.npy'
    raise config_lib.ConfigError(f'{file} is not an {kind} file: {e}') from e
  if optional:
    return None
  raise config_lib.ConfigError(
    f'{path} has no array {name!r}{config_lib.nearest(name, have)}'
  )


def _check_labels(name, labels, classes):
  if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
    raise config_lib.ConfigError(
      f'{name}: labels run from {labels.min()} to {labels.max()}, expected '
      f'0 to {classes - 1}'
    )


def _class_folders(folder):
  # Hidden ones are of other programs, such as .ipynb_checkpoints.
  try:
    return sorted(
      e.name
      for e in os.scandir(folder)
      if e.is_dir() and not e.name.startswith('.')
    )
  except OSError as e:
    raise config_lib.ConfigError(f'{folder}: {e.strerror}') from e


def _image_files(folder):
  # macOS leaves a hidden ._NAME.jpg, no image, beside each file it copies.
  return sorted(
    e.name
    for e in os.scandir(folder)
    if e.name.lower().endswith(_SUFFIXES) and not e.name.startswith('.')
  )


def _in_train(path):
  """Whether a file of an undivided tree is trained on, by its own name."""
  digest = hashlib.sha256(path.encode(errors='surrogateescape')).digest()
  return int.from_bytes(digest[:8], 'big') / 2.0**64 < _TRAIN_SHARE
