"""Where examples come from: one interface for every kind of data set.

A source is one split: it has a vocabulary, a length, and gives any examples by
index. Encoded images are decoded by TensorFlow in `decode.py`; pixels need no
TensorFlow; synthetic examples are made on the device.
"""

import os
import shlex
from typing import Protocol

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import arrays
from anp_jax.data.sources import cache
from anp_jax.data.sources import digits
from anp_jax.data.sources import image_folder
from anp_jax.data.sources import shards
from anp_jax.data.sources import subset

_CHUNK = 256  # records that a pass over all of them holds at a time


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

  def labels(self) -> np.ndarray:
    """(n,) int32, of all examples; may take a pass over the data."""

  def example_name(self, index: int) -> str:
    """What messages call an example."""


def fingerprint(source: Source) -> dict:
  """What must be equal for a run to be continued on a source."""
  return {
    'examples': len(source),
    'classes': len(source.vocabulary),
    'names': source.vocabulary.digest(),
  }


def open_source(config, training: bool) -> Source:
  """The split of config.data that is trained or evaluated on.

  That of training without what config.data.held_out and imbalance leave out.

  Raises:
    ConfigError: if it does not exist or is empty, naming the path; of what is
      left out as `subset.wrap`.
  """
  d = config.data
  split, other = d.train_split, d.eval_split
  if not training:
    split, other = other, split
  if d.source == 'synthetic':
    return Synthetic(d, split)
  if d.source == 'arrays':
    source = arrays.Arrays(os.path.expanduser(d.path), split)
  elif d.source == 'digits':
    source = digits.Digits(split)
  elif d.source == 'folder':
    files = image_folder.find(
      d.path, split, d.lists, other_splits=(other,), pairs=d.pairs
    )
    if files.left_out:
      image_folder.warn_once('%s', files.left_out)
    source = Folder(files)
  else:
    source = _tfds_source(config, split)
  if not len(source):
    raise config_lib.ConfigError(f'{source.name} has no examples')
  source.vocabulary = source.vocabulary.with_pairs(d.pairs)
  if training:
    source = subset.wrap(source, config)
  return cache.wrap(source, config)


def prepared(name: str, directory: str):
  """The tfds builder of a set's generated files.

  A run neither downloads nor needs the code that made them.

  Args:
    name: NAME, NAME/CONFIG, with or without :VERSION.
    directory: of data sets.

  Raises:
    ConfigError: if there is none, with the command that makes it.
  """
  from tensorflow_datasets import core
  from tensorflow_datasets.core import read_only_builder

  try:
    return read_only_builder.builder_from_files(name, data_dir=directory)
  except (core.DatasetNotFoundError, ValueError) as e:
    place = shlex.quote(directory)
    group, _, own = name.partition('/')
    if group == 'anp_folder':
      folder = os.path.join(directory, group)
      command = (
        'python -m anp_jax.data.prepare --from=FOLDER '
        f'--name={own.partition(":")[0] or "NAME"} --data_dir={place}'
      )
    else:
      folder, own = directory, name
      command = f'tfds build {name} --data_dir={place}'
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    raise config_lib.ConfigError(
      f'{directory} holds no prepared set {name!r}'
      f'{config_lib.nearest(own, found)}; prepare it with: {command}'
    ) from e


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


class Folder:
  """Image files in a tree of class folders, or named by a split file.

  See `listing.find`.
  """

  kind = 'encoded'

  def __init__(self, found: image_folder.Listing):
    self.name = found.name
    self.vocabulary = found.vocabulary
    self._root = found.root
    self._files = found.files
    self._labels = found.labels

  def __len__(self):
    return len(self._files)

  def read(self, indices):
    """See `Source.read`."""
    images = []
    for i in indices:
      with open(self.example_name(i), 'rb') as f:
        images.append(f.read())
    return images, self._labels[indices]

  def labels(self):
    """See `Source.labels`."""
    return self._labels

  def example_name(self, index):
    """See `Source.example_name`."""
    return os.path.join(self._root, self._files[index])


class Tfds:
  """A prepared tensorflow-datasets set with one image and one class label.

  ArrayRecord shards are read through tfds; TFRecord shards, which tfds reads
  only in order, through an index of where each record begins.
  """

  kind = 'encoded'

  def __init__(self, builder, split: str):
    self.name = f'{builder.info.full_name}: {split}'
    if split not in builder.info.splits:
      raise config_lib.ConfigError(
        f'{builder.info.full_name} has no split {split!r} (it has '
        f'{", ".join(builder.info.splits)})'
      )
    self._image, self._label = _image_and_label(builder)
    self.vocabulary = _vocabulary(builder.info.features, self._label)
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
    if stored == 'tfrecord':
      self._records = shards.TfRecords(paths, places)
    else:
      self._records = shards.ArrayRecords(paths, list(info.shard_lengths))

  def __len__(self):
    return self._size

  def read(self, indices):
    """See `Source.read`."""
    # By hand: with tfds's dicts of arrays a read took 2.5 times as long.
    images, labels = [], []
    for features in self._features(indices):
      images.append(features[self._image].bytes_list.value[0])
      labels.append(features[self._label].int64_list.value[0])
    return images, np.array(labels, np.int32)

  def labels(self):
    """See `Source.labels`."""
    return np.array(
      [
        features[self._label].int64_list.value[0]
        for start in range(0, self._size, _CHUNK)
        for features in self._features(
          range(start, min(start + _CHUNK, self._size))
        )
      ],
      np.int32,
    )

  def example_name(self, index):
    """See `Source.example_name`."""
    text = f'{self.name}, example {index}'
    try:  # what is asked for may be damaged
      (features,) = self._features([index])
      name = features['file_name'].bytes_list.value[0].decode()
    except Exception:  # noqa: BLE001 - of the file, its record or the text
      return text
    return f'{text} ({name})'

  def _features(self, indices):
    from tensorflow_datasets.proto import tf_example_pb2

    records = self._records.__getitems__([int(i) for i in indices])
    return [
      tf_example_pb2.Example.FromString(record).features.feature
      for record in records
    ]


def _tfds_source(config, split):
  directory = config_lib.data_dir(config)
  if config.data.source == 'anp_shapes':
    from anp_jax.data.sources import anp_shapes

    return Tfds(anp_shapes.prepare(directory), split)
  name = config.data.source.removeprefix('tfds:')
  return Tfds(prepared(name, directory), split)


def _vocabulary(features, label):
  """Of a builder's class label; of its parts too where `anp_folder` made it."""
  names = tuple(features[label].names)
  if 'adjective' in features and 'noun' in features:
    return vocabulary.Vocabulary(
      names,
      tuple(features['adjective'].names),
      tuple(features['noun'].names),
    )
  return vocabulary.Vocabulary(names)


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
