"""Sets that tensorflow-datasets has prepared, read without TensorFlow."""

import glob
import json
import os
import shlex
from typing import TYPE_CHECKING

import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.sources import shards, source as source_lib, splits
from anp_jax.system import error_lines, files

if TYPE_CHECKING:
  import tensorflow_datasets as tfds

# Keys of features.json whose values tfds imports.
_CLASS_KEYS = {'pythonClassName', 'python_class_name', 'type'}
_CHUNK = 256  # records that a pass over all of them holds at a time


class TfdsSet(source_lib.Source):
  """A prepared tensorflow-datasets set with one image and one class label.

  ArrayRecord shards are read by the library of that name; TFRecord shards,
  which tfds reads only in order, through an index of where each record begins.
  """

  kind = 'encoded'

  def __init__(self, builder: 'tfds.core.DatasetBuilder', split: str):
    """Opens one split.

    Args:
      builder: tfds builder, such as from `open_builder`.
      split: name, or another that the split usually goes by.

    Raises:
      ConfigError: for a split that is missing, features or a format that are
        not read, or a damaged shard.
    """
    full_name, parts = builder.info.full_name, builder.info.splits
    self.name = f'{full_name}: {split}'
    part = parts[splits.choose(full_name, split, parts)]
    self._image, self._label = _image_and_label(builder)
    self.vocabulary = _vocabulary(builder.info.features, self._label)
    self._size = part.num_examples
    self._paths = [os.fspath(path) for path in part.filepaths]
    self._records = _records(builder, self._paths, list(part.shard_lengths))

  def __len__(self) -> int:
    return self._size

  def read(self, indices: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    """Image files by index, and labels."""
    # By hand: with tfds's dicts of arrays a read took 2.5 times as long.
    images, labels = [], []
    for features in self._features(indices):
      images.append(features[self._image].bytes_list.value[0])
      labels.append(features[self._label].int64_list.value[0])
    return images, np.array(labels, np.int32)

  def labels(self) -> np.ndarray:
    """(n,) int32; takes a pass over the records."""
    return np.array(
      [
        features[self._label].int64_list.value[0]
        for start in range(0, self._size, _CHUNK)
        for features in self._features(range(start, min(start + _CHUNK, self._size)))
      ],
      np.int32,
    )

  def example_name(self, index: int) -> str:
    """The position in the split, and the file that the record names."""
    text = super().example_name(index)
    try:  # the example may be damaged
      (features,) = self._features([index])
      name = features['file_name'].bytes_list.value[0].decode()
    except Exception:  # noqa: BLE001 - of the file, its record or the text
      return text
    return config_lib.printable(f'{text} ({name})')

  def identity(self) -> str:
    """The shards, with their sizes and times."""
    return repr([(os.path.abspath(path), *files.state(path)) for path in self._paths])

  def _features(self, indices):
    from tensorflow_datasets.proto import tf_example_pb2

    records = self._records.__getitems__([int(i) for i in indices])
    return [tf_example_pb2.Example.FromString(record).features.feature for record in records]


def open_builder(name: str, directory: str) -> 'tfds.core.DatasetBuilder':
  """The tfds builder of a set's generated files.

  A run neither downloads nor needs the code that made them.

  Args:
    name: NAME, NAME/CONFIG, with or without :VERSION.
    directory: folder of data sets.

  Raises:
    ConfigError: if there is none, with the command that makes it, or if its
      features are classes that are not of tfds.
  """
  from google.protobuf import json_format
  from tensorflow_datasets import core
  from tensorflow_datasets.core import read_only_builder

  try:
    _check_features(directory, name)
    return read_only_builder.builder_from_files(name, data_dir=directory)
  except config_lib.ConfigError:
    raise
  except (core.DatasetNotFoundError, json_format.ParseError, RecursionError, ValueError) as e:
    place = shlex.quote(directory)
    group, _, set_name = name.partition('/')
    if group == 'anp_folder':
      folder = os.path.join(directory, group)
      command = (
        'python -m anp_jax.data.prepare --from=FOLDER '
        f'--name={set_name.partition(":")[0] or "NAME"} --data_dir={place}'
      )
    else:
      folder, set_name = directory, name
      command = f'tfds build {name} --data_dir={place}'
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    is_missing = isinstance(e, core.DatasetNotFoundError)
    hint = config_lib.nearest(set_name, names)
    reason = hint if is_missing else f' that can be read ({error_lines.typed_line(e)})'
    raise config_lib.ConfigError(
      f'{directory} holds no prepared set {name!r}{reason}; prepare it with: {command}'
    ) from e


def enlargement(builder: 'tfds.core.DatasetBuilder', d: ml_collections.ConfigDict) -> str:
  """A line about a run that enlarges images which `prepare` has reduced; '' if it does not.

  Args:
    builder: tfds builder.
    d: the run's config.data.
  """
  stored = (builder.info.metadata or {}).get('shorter_side', 0)
  sides = {'resize': d.resize, 'scale_range': max(d.get('scale_range', (0,)))}
  key, side = max(sides.items(), key=lambda item: item[1])
  if not stored or side <= stored:
    return ''
  return (
    f'{builder.info.full_name} was prepared with --shorter_side={stored}, and config.data.{key} '
    f'enlarges its images to {side} pixels: prepare it with --shorter_side={side} or more'
  )


def _check_features(directory, name):
  """Refuses features that are no classes of tfds, which it would import."""
  folder = os.path.join(directory, name.partition(':')[0])
  pattern = os.path.join(glob.escape(folder), '**', 'features.json')
  for path in glob.glob(pattern, recursive=True):
    with open(path, encoding='utf-8') as f:
      pending = [json.load(f)]
    while pending:
      value = pending.pop()
      pending += value.values() if isinstance(value, dict) else ()
      pending += value if isinstance(value, list) else ()
      keys = value.keys() if isinstance(value, dict) else ()
      for key in _CLASS_KEYS.intersection(keys):
        kind = value[key]
        # Of older files, "type" is a class; of newer ones a word.
        is_class = key != 'type' or (isinstance(kind, str) and '.' in kind)
        if is_class and not str(kind).startswith('tensorflow_datasets.'):
          raise config_lib.ConfigError(
            f'{path}: {key}={kind!r}: expected a class of tensorflow_datasets; '
            'no code of a data set is imported'
          )


def _records(builder, paths, counts):
  """Random access to the records of a split's shards."""
  file_format = builder.info.file_format.value
  if file_format not in ('array_record', 'tfrecord'):
    raise config_lib.ConfigError(
      f'{builder.info.full_name} is stored as {file_format}, expected array_record or tfrecord'
    )
  kind = shards.TfRecords if file_format == 'tfrecord' else shards.ArrayRecords
  return kind(paths, counts)


def _vocabulary(features, label):
  """The classes; with factors in order where the set has features of them."""
  names = tuple(features[label].names)
  factors = [features[key] for key in ('adjective', 'noun') if key in features]
  words = [tuple(f.names) for f in factors if hasattr(f, 'names')]
  return vocabulary.Vocabulary(names, *(words if len(words) == 2 else ()))


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
